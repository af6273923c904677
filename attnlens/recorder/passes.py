"""Capture of one unit: forward passes with hooks, statistics as the tensors go by, one writer.

:func:`capture_unit` is a plain function of a plan and a unit's number: whoever has the model, the
prompts and the store's folder can capture any unit, in any order, and gets the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnlens.activations import ACTIVATIONS
from attnlens.attention import Attention
from attnlens.errors import MissingActivationError
from attnlens.plan.parts import kv_heads
from attnlens.plan.storeplan import StorePlan
from attnlens.recorder.background import Background
from attnlens.recorder.rotated import Rotated, check_rule
from attnlens.recorder.taps import (
    Buffers,
    check_fit,
    check_shape,
    check_softmax,
    cut,
    largest_magnitude,
)
from attnlens.statistics import Statistic

if TYPE_CHECKING:
    from attnlens.corpora import Prompts
    from attnlens.models import Model
    from attnlens.store.schema import UnitSpec
    from attnlens.store.write import StoreWriter, UnitWriter


class _EverythingArrivedError(Exception):
    """Ends a forward pass early: nothing is wanted from the rest of the model."""


def capture_unit(
    model: Model,
    plan: StorePlan,
    unit: UnitSpec,
    prompts: Prompts,
    writer: StoreWriter,
    statistics: Mapping[str, type[Statistic]],
    done: Callable[[int], None] = lambda steps: None,
) -> None:
    """Capture one unit of a store.

    Parameters
    ----------
    model : Model
    plan : StorePlan
    unit : UnitSpec
    prompts : Prompts
    writer : StoreWriter
    statistics : mapping from name to class
        The classes of ``plan.statistics``.
    done : callable, optional
        Called with 1 after each forward pass.

    Raises
    ------
    NonFiniteError
        If a captured tensor holds NaN or infinity.
    MissingActivationError
        If an activation never arrived.
    DoesNotFitError
        If an activation is planned as float16 and its values need float32.
    RuleDisagreesError
        If patterns are to be computed on reading, and are not what queries and keys give.
    OutOfMemoryError
        If the device has too little memory for one forward pass.
    """
    with writer.unit(unit) as out:
        _UnitCapture(model, plan, unit, prompts, statistics).run(out, done)


class _UnitCapture:
    """What one unit needs between the first and the last of its forward passes."""

    def __init__(
        self,
        model: Model,
        plan: StorePlan,
        unit: UnitSpec,
        prompts: Prompts,
        statistics: Mapping[str, type[Statistic]],
    ) -> None:
        facts = model.facts
        self.model = model
        self.plan = plan
        self.unit = unit
        self.prompts = prompts
        self.buffers = Buffers()
        self.layers = plan.layers if plan.layers is not None else tuple(range(facts.n_layers))
        self.heads: dict[str | None, tuple[int, ...] | None] = {None: None}
        self.heads["head"] = plan.heads
        self.heads["kv_head"] = None if plan.heads is None else kv_heads(facts, plan.heads)
        self.statistics: dict[str, list[Statistic]] = {}
        self.states: dict[str, Statistic] = {}
        for name in plan.statistics:
            kind = statistics[name]
            dim = ACTIVATIONS[kind.of].head_dim
            heads = self.heads[dim]
            every = facts.n_kv_heads if dim == "kv_head" else facts.n_heads
            made = kind(
                n_prompts=len(unit.prompts),
                layers=self.layers,
                n_heads=every if heads is None else len(heads),
                length=unit.length,
                d_head=facts.d_head,
            )
            self.states[name] = made
            self.statistics.setdefault(kind.of, []).append(made)
        names = {*plan.activations, *self.statistics}
        #: Whether statistics of the pattern come from queries and keys: there is no pattern.
        self.from_qk = plan.lean and "pattern" in names
        if self.from_qk:
            names = (names - {"pattern"}) | {"q_rot", "k_rot"}
        self.wanted = {(name, layer) for name in names for layer in self.layers}
        self.check_scores = {"scores", "pattern"} <= {name for name, _ in self.wanted}

    def run(self, out: UnitWriter, done: Callable[[int], None]) -> None:
        """Run the unit's forward passes and write what they bring."""
        out.tokens(self.tokens(slice(None)))
        n, size = len(self.unit.prompts), self.plan.batch_size
        if self.wanted:
            with Background() as background:
                for start in range(0, n, size):
                    rows = slice(start, min(start + size, n))
                    _Pass(self, rows, out, background).run()
                    done(1)
        for name, statistic in self.states.items():
            out.statistic(name, statistic.state())

    def tokens(self, rows: slice) -> npt.NDArray[np.int64]:
        """Return the token ids of some of the unit's prompts, ``[prompt, pos]``."""
        ids = [self.prompts.tokens[i] for i in self.unit.prompts[rows]]
        return np.stack(ids).astype(np.int64)


class _Pass:
    """One forward pass over one batch."""

    def __init__(
        self, capture: _UnitCapture, rows: slice, out: UnitWriter, background: Background
    ) -> None:
        self.capture = capture
        self.rows = rows
        self.out = out
        self.background = background
        self.missing = set(capture.wanted)
        self.scores: dict[int, Tensor] = {}
        heads = capture.heads
        self.rotated = Rotated(capture.model.facts, heads["head"], heads["kv_head"])
        self.made: dict[int, Attention] = {}
        self.check_rule = bool(capture.plan.captured) and rows.start == 0
        if self.check_rule:
            self.missing |= {("pattern", layer) for layer in capture.layers}
        self.prompt_ids: Sequence[int] = capture.unit.prompts[rows]

    def run(self) -> None:
        """Run the model until everything wanted has arrived."""
        capture = self.capture
        names = sorted({name for name, _ in self.missing})
        with (
            contextlib.suppress(_EverythingArrivedError),
            capture.model.record(names, self._arrive, layers=capture.layers),
            capture.model.lean() if capture.plan.lean else contextlib.nullcontext(),
        ):
            capture.model.forward(torch.from_numpy(capture.tokens(self.rows)))
        if self.missing:
            self._refuse_missing()

    def _arrive(self, name: str, layer: int, value: Tensor) -> None:
        if (name, layer) not in self.missing:
            return
        self.missing.discard((name, layer))
        self._take(name, layer, value.detach())
        if not self.missing:
            raise _EverythingArrivedError

    def _take(self, name: str, layer: int, value: Tensor) -> None:
        capture = self.capture
        check_shape(name, layer, value, capture.model.facts, capture.unit.length)
        heads = capture.heads[ACTIVATIONS[name].head_dim]
        value = cut(name, value, heads=heads, positions=None)
        largest = largest_magnitude(name, layer, value, prompts=self.prompt_ids, heads=heads)
        if capture.check_scores and self.rows.start == 0:
            self._compare(name, layer, value)
        if self.check_rule:
            self._check_rule(name, layer, value)
        for statistic in capture.statistics.get(name, ()):
            seen = self._attention(layer, value) if name == "pattern" else value
            statistic.update(layer, seen, self.rows)
        if capture.from_qk and name in ("q_rot", "k_rot"):
            attention = self.rotated.add(name, layer, value)
            for statistic in capture.statistics["pattern"] if attention is not None else ():
                statistic.update(layer, attention, self.rows)
        if name in capture.plan.activations:
            kept = cut(name, value, heads=None, positions=capture.plan.positions)
            dtype = capture.plan.activations[name]
            check_fit(name, dtype, largest)
            kept = capture.buffers.copy(kept, dtype)
            self.background.submit(functools.partial(self._write, name, layer, kept))

    def _attention(self, layer: int, pattern: Tensor) -> Attention:
        facts = self.capture.model.facts
        return Attention.from_pattern(pattern, causal=facts.causal, window=facts.windows[layer])

    def _write(self, name: str, layer: int, value: Tensor) -> None:
        # On the writer's thread, so that the copy from a GPU overlaps with the forward pass too.
        self.out.write(name, layer, self.rows, value.cpu().numpy())
        self.capture.buffers.release(value)

    def _compare(self, name: str, layer: int, value: Tensor) -> None:
        """Check, in the unit's first batch, that scores and pattern belong together."""
        if name == "scores":
            self.scores[layer] = value
        elif name == "pattern" and layer in self.scores:
            check_softmax(layer, self.scores.pop(layer), value, value.dtype)

    def _check_rule(self, name: str, layer: int, value: Tensor) -> None:
        """Check, on the unit's first prompt, that queries and keys give the pattern."""
        if name in ("q_rot", "k_rot"):
            attention = self.rotated.add(name, layer, value[:1])
            if attention is not None:
                self.made[layer] = attention
        elif name == "pattern" and layer in self.made:
            check_rule(layer, self.made.pop(layer), value[:1])

    def _refuse_missing(self) -> None:
        model = self.capture.model
        places = [f"{name} of layer {layer}" for name, layer in sorted(self.missing)]
        shown = ", ".join(places[:4]) + (f" and {len(places) - 4} more" if places[4:] else "")
        hooks = []
        for name, layer in sorted(self.missing)[:4]:
            # What is computed from several hooks has no name of its own.
            with contextlib.suppress(MissingActivationError):
                hooks.append(model.hook_name(name, layer))
        through = f": nothing came through {', '.join(hooks)}" if hooks else ""
        raise MissingActivationError(
            f"{shown} never arrived{through}.",
            hint=f"{model.facts.architecture} gives: {', '.join(sorted(model.available()))}.",
        )
