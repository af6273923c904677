"""The plan: from what analyses need to what is captured, and whether it fits this machine.

Nothing here runs the model or allocates anything: a plan is made from facts and lengths alone, so
that ``--dry-run`` can print it and a capture that cannot fit is refused before it starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from attnlens.activations import ACTIVATIONS, nearest
from attnlens.errors import NeedError, OptionError, PlanRefusedError
from attnlens.needs import MAIN, Request
from attnlens.plan.derivation import Abilities, Lean, choose
from attnlens.plan.estimates import (
    STORED_DTYPES,
    default_batch_size,
    disk_bytes,
    layer_bytes,
    on_disk,
    peak_bytes,
)
from attnlens.plan.machine import free_disk, free_memory, readable_bytes
from attnlens.plan.parts import chosen_indices, chosen_positions, kv_heads
from attnlens.plan.storeplan import StorePlan
from attnlens.store.schema import UnitSpec

if TYPE_CHECKING:
    from attnlens.corpora import Prompts
    from attnlens.models import ModelFacts

#: Raw bytes of one unit, all activations together; a unit is never smaller than one batch.
UNIT_BYTES: Final = 2**29
#: And at most this many batches, so that an interrupted capture loses little.
UNIT_BATCHES: Final = 16


@dataclass(frozen=True)
class Plan:
    """All that one run captures, and what it costs.

    Attributes
    ----------
    stores : tuple of StorePlan
        The run's own first, then its other corpora, then the twins.
    n_twins : int
    disk_bytes : int
        Upper estimate; a causal pattern is half zeros, which compress to nothing.
    peak_memory_bytes : int
        Weights, one forward pass, statistics, and what waits to be written, on the model's device.
    resident_bytes : int
        The part of `peak_memory_bytes` that is already in use: the weights, once loaded.
    free_disk, free_memory : int or None
        None where it cannot be known.
    notes : tuple of str
    """

    stores: tuple[StorePlan, ...]
    n_twins: int
    disk_bytes: int
    peak_memory_bytes: int
    resident_bytes: int
    free_disk: int | None
    free_memory: int | None
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> StorePlan:
        """The run's own store."""
        return self.stores[0]

    @property
    def batches(self) -> int:
        """Number of forward passes of all stores together."""
        return sum(
            -(-len(unit.prompts) // store.batch_size)
            for store in self.stores
            if store.activations or store.statistics
            for unit in store.units
        )

    def check(self) -> None:
        """Refuse what cannot fit.

        Raises
        ------
        PlanRefusedError
            If the disk or the memory is too small; the message holds the estimate.
        """
        needed = self.peak_memory_bytes - self.resident_bytes
        if self.free_memory is not None and needed > self.free_memory:
            store = max(self.stores, key=lambda s: s.longest)
            raise PlanRefusedError(
                f"The capture needs about {readable_bytes(needed)} of memory for batches of "
                f"{store.batch_size} x {store.longest} tokens, and "
                f"{readable_bytes(self.free_memory)} are free.",
                hint="Attention takes memory by the square of the length: use shorter prompts "
                "(--length)"
                + (", smaller batches (--batch-size 1)" if store.batch_size > 1 else "")
                + ", half precision (--dtype float16)"
                + (", no twins (--twins 0)" if self.n_twins else "")
                + " or a smaller model.",
            )
        if self.free_disk is not None and self.disk_bytes > self.free_disk:
            largest: dict[str, int] = {}
            for store in self.stores:
                for name, size in store.sizes.items():
                    largest[name] = largest.get(name, 0) + size
            shown = sorted(largest.items(), key=lambda item: -item[1])[:3]
            raise PlanRefusedError(
                f"The store needs about {readable_bytes(self.disk_bytes)} "
                f"({', '.join(f'{n}: {readable_bytes(b)}' for n, b in shown)}), and "
                f"{readable_bytes(self.free_disk)} are free on the disk.",
                hint="Capture fewer or shorter prompts (--samples, --length), fewer layers "
                "(--layers), or statistics such as pattern.entropy instead of raw activations.",
            )

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the plan as a table for people: store, what, how much, bytes."""
        table = []
        for store in self.stores:
            label = store.where or "store"
            amount = f"{store.n_prompts} x {store.longest} tokens"
            for name, dtype in store.activations.items():
                table.append((label, name, f"{amount}, {dtype}", readable_bytes(store.sizes[name])))
            for name in store.derived:
                table.append((label, name, f"{amount}, from q_rot and k_rot", "nothing"))
            for name in store.statistics:
                table.append((label, name, f"{amount}, statistic", "small"))
            if store.weights:
                table.append((label, "weights", "float32", readable_bytes(store.sizes["weights"])))
        return table

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {
            "stores": [store.to_json() for store in self.stores],
            "twins": self.n_twins,
            "disk_bytes": self.disk_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "free_disk": self.free_disk,
            "free_memory": self.free_memory,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        amount = f"at most {readable_bytes(self.disk_bytes)}" if self.disk_bytes else "little"
        disk = f"disk: {amount}"
        if self.free_disk is not None:
            disk += f" of {readable_bytes(self.free_disk)} free"
        memory = f"memory: about {readable_bytes(self.peak_memory_bytes)}"
        if self.free_memory is not None:
            memory += f", {readable_bytes(self.free_memory)} free"
        batch = f"batches of {self.main.batch_size}"
        return "\n".join([*lines, disk, memory, batch, *self.notes])


def make_plan(
    facts: ModelFacts,
    prompts: Mapping[str, Prompts],
    model_requests: Mapping[str, Request],
    twin_requests: Mapping[str, Request] | None = None,
    *,
    n_twins: int = 0,
    batch_size: int | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | Literal["last"] | None = None,
    dtypes: Mapping[str, str] | None = None,
    out: Path | None = None,
    lean: Lean = "auto",
    abilities: Abilities | None = None,
) -> Plan:
    """Plan one run.

    Parameters
    ----------
    facts : ModelFacts
    prompts : mapping from corpus name to Prompts
        ``""`` is the run's own corpus.
    model_requests, twin_requests : mapping from corpus name to Request
        As :func:`attnlens.needs.requests` gathers them.
    n_twins : int, optional
        How many twins; none are planned where no analysis asks for them.
    batch_size : int, optional
        Prompts per forward pass. By default as many as one forward pass of about 1 GiB takes
        (4 GiB on a GPU), and at most 32. It never depends on how much memory happens to be free,
        so that a capture can be resumed later.
    layers, heads : iterable of int, optional
        Which layers and (query) heads; all by default. Of keys and values those heads are kept
        that the chosen query heads read.
    positions : iterable of int, or "last", optional
        Which positions of raw activations.
    dtypes : mapping from str to {"float16", "float32", "float64"}, optional
        How to store an activation, where its default is not wanted.
    out : Path, optional
        Where the store will be, to look at the free space there.
    lean : bool or "auto", optional
        Whether to capture without attention matrices; by default where prompts are long and
        everything can be had without (:mod:`attnlens.plan.derivation`).
    abilities : Abilities, optional
        What is known of the model beyond its facts, once it is loaded.

    Raises
    ------
    OptionError
        If a layer, head, position, dtype or batch size does not exist, or lean capture cannot
        give what is asked for.
    UnsupportedModelError
        If lean capture is asked for and the model, once loaded, cannot run lean.
    NeedError
        If `dtypes` names no activation.
    """
    chosen_layers = chosen_indices("layer", layers, facts.n_layers)
    chosen_heads = chosen_indices("head", heads, facts.n_heads)
    own = prompts[MAIN]
    wanted_positions = chosen_positions(positions, own.lengths)
    for name, dtype in (dtypes or {}).items():
        if name not in ACTIVATIONS or ACTIVATIONS[name].hook is None:
            raise NeedError(f"dtype for {name!r}: no such activation is stored.", hint=_near(name))
        if dtype not in STORED_DTYPES:
            raise OptionError(
                f"dtype {dtype!r} for {name!r} is not one of {', '.join(STORED_DTYPES)}.",
                hint="The model's own dtype is another matter: --dtype.",
            )
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"batch size {batch_size} is under 1.")

    abilities = abilities or Abilities()
    n_twins = n_twins if twin_requests else 0
    of_model, of_twins = _main_first(model_requests), _main_first(twin_requests)
    wanted: list[tuple[int | None, str, Request]] = [(None, *item) for item in of_model.items()]
    wanted += [(twin, *item) for twin in range(n_twins) for item in of_twins.items()]

    def planned(lean: Lean) -> tuple[list[StorePlan], list[str]]:
        made = [
            _store_plan(
                facts,
                corpus,
                twin,
                request,
                prompts[corpus].by_length(),
                batch_size=batch_size,
                layers=chosen_layers,
                heads=chosen_heads,
                positions=wanted_positions if corpus == MAIN else None,
                dtypes=dtypes or {},
                lean=lean,
                abilities=abilities,
            )
            for twin, corpus, request in wanted
        ]
        return [store for store, _ in made], [note for _, notes in made for note in notes]

    stores, notes = planned(lean)
    if lean == "auto" and abilities.lean_problem is None and any(s.lean for s in stores):
        eager = readable_bytes(peak_bytes(facts, planned(False)[0], twins=n_twins > 0))
        notes.append(f"If the model cannot run lean, it takes about {eager} of memory.")
    return Plan(
        stores=tuple(stores),
        n_twins=n_twins,
        disk_bytes=sum(disk_bytes(facts, store) for store in stores),
        peak_memory_bytes=peak_bytes(facts, stores, twins=n_twins > 0),
        resident_bytes=facts.size if facts.weights_hash is not None else 0,
        free_disk=free_disk(out if out is not None else Path(tempfile.gettempdir())),
        free_memory=free_memory(facts.device or "cpu"),
        notes=tuple(dict.fromkeys([*_notes(facts, stores), *notes])),
    )


def _store_plan(
    facts: ModelFacts,
    corpus: str,
    twin: int | None,
    request: Request,
    groups: Sequence[tuple[int, Sequence[int]]],
    *,
    batch_size: int | None,
    layers: tuple[int, ...] | None,
    heads: tuple[int, ...] | None,
    positions: tuple[int, ...] | None,
    dtypes: Mapping[str, str],
    lean: Lean,
    abilities: Abilities,
) -> tuple[StorePlan, tuple[str, ...]]:
    """Plan one store; return it with what people should know."""
    dtype = {name: dtypes.get(name, spec.dtype) for name, spec in ACTIVATIONS.items()}
    longest = max(length for length, _ in groups)
    n_layers = facts.n_layers if layers is None else len(layers)

    def size(name: str, length: int) -> int:
        """Raw bytes of one prompt."""
        shape = {
            "head": facts.n_heads if heads is None else len(heads),
            "kv_head": len(kv_heads(facts, heads)),
            "d_head": facts.d_head,
            "d_model": facts.d_model,
        }
        rows = length if positions is None else len(positions)
        return n_layers * layer_bytes(name, dtype[name], shape, rows=rows, length=length)

    def total(name: str) -> int:
        return sum(size(name, length) * len(members) for length, members in groups)

    whole = positions is None
    choice = choose(
        facts,
        request,
        abilities,
        length=longest,
        lean=lean,
        whole=whole,
        dtypes=dtypes,
        size=lambda name: on_disk(name, total(name), facts, whole=whole),
    )
    activations = {name: dtype[name] for name in choice.activations}
    asked = {name: dtype[name] for name in ACTIVATIONS if name in request.activations}
    batch = batch_size or default_batch_size(facts, longest, lean=choice.lean)
    sizes = {name: total(name) for name in activations}
    if request.weights:
        sizes["weights"] = facts.n_params * 4  # float32
    units: list[UnitSpec] = []
    for length, members in groups:
        raw = sum(size(name, length) for name in activations)
        per_unit = min(UNIT_BATCHES * batch, max(batch, UNIT_BYTES // max(raw, 1) // batch * batch))
        units += [
            UnitSpec(
                id=len(units) + k, prompts=list(members[start : start + per_unit]), length=length
            )
            for k, start in enumerate(range(0, len(members), per_unit))
        ]
    plan = StorePlan(
        corpus=corpus,
        twin=twin,
        activations=activations,
        statistics=tuple(sorted(request.statistics)),
        weights=request.weights,
        layers=layers,
        heads=heads,
        positions=positions,
        units=tuple(units),
        batch_size=batch,
        sizes=sizes,
        lean=choice.lean,
        not_lean=choice.not_lean,
        captured=asked if choice.derived and not choice.lean else {},
        derived=choice.derived,
    )
    return plan, choice.notes


def _notes(facts: ModelFacts, stores: Sequence[StorePlan]) -> tuple[str, ...]:
    notes = []
    if any(s.positions is not None and s.statistics for s in stores):
        notes.append("Statistics are over all positions; --positions chooses raw activations only.")
    if any(s.heads is not None and set(s.activations) & {"k", "v", "k_rot"} for s in stores):
        notes.append(
            f"k and v keep the key-value heads that the chosen heads read: "
            f"{', '.join(map(str, kv_heads(facts, stores[0].heads)))}."
        )
    return tuple(notes)


def _main_first(requests: Mapping[str, Request] | None) -> dict[str, Request]:
    # The other corpora live inside the main store, so there is always one, if only of tokens.
    return {MAIN: Request()} | dict(requests or {})


def _near(name: str) -> str:
    near = nearest(name, ACTIVATIONS)
    known = ", ".join(n for n, a in ACTIVATIONS.items() if a.hook)
    return (f"Did you mean {near!r}? " if near else "") + f"Known are: {known}."
