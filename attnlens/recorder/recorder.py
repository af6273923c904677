"""Recording: the stores of one plan, one after the other."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnlens.activations import ACTIVATIONS, nearest
from attnlens.errors import NeedError
from attnlens.plan import Plan
from attnlens.plan.parts import kv_heads
from attnlens.plan.storeplan import StorePlan
from attnlens.recorder.passes import capture_unit
from attnlens.recorder.rotated import RuleDisagreesError
from attnlens.recorder.taps import DoesNotFitError
from attnlens.store.schema import (
    MANIFEST,
    SCHEMA,
    ActivationSpec,
    Manifest,
    PromptsSpec,
    load_manifest,
)
from attnlens.store.write import StoreWriter

if TYPE_CHECKING:
    from attnlens.corpora import Prompts
    from attnlens.models import Model
    from attnlens.progress import Progress
    from attnlens.statistics import Statistic

_VERSIONS: Final = ("attnlens", "torch", "transformers", "transformer-lens", "numpy", "zarr")


def twin_seed(seed: int, index: int) -> int:
    """Return the seed of one twin: ``1000 * seed + 1 + index``."""
    return 1000 * seed + 1 + index


class Recorder:
    """One call of :func:`record`."""

    def __init__(
        self,
        *,
        plan: Plan,
        prompts: Mapping[str, Prompts],
        out: Path,
        seed: int,
        resume: bool,
        overwrite: bool,
        command: tuple[str, ...],
        progress: Progress,
        statistics: Mapping[str, type[Statistic]],
    ) -> None:
        self.plan = plan
        self.prompts = prompts
        self.out = out
        self.seed = seed
        self.resume = resume
        self.overwrite = overwrite
        self.command = command
        self.progress = progress
        self.statistics = statistics
        self._check_statistics()

    def _check_statistics(self) -> None:
        for store in self.plan.stores:
            for name in store.statistics:
                if name not in self.statistics:
                    near = nearest(name, self.statistics)
                    raise NeedError(
                        f"There is no statistic {name!r}.",
                        hint=(f"Did you mean {near!r}? " if near else "")
                        + f"Known are: {', '.join(sorted(self.statistics))}.",
                    )

    def run(self, model: Model) -> None:
        """Capture all stores; the run's own is sealed last, for it holds the others."""
        for store in self.plan.stores:
            # Finds every hook before anything is written.
            names = {*store.activations, *(self.statistics[n].of for n in store.statistics)}
            names |= {*store.captured}
            if store.lean and "pattern" in names:
                names = (names - {"pattern"}) | {"q_rot", "k_rot"}
            with model.record(sorted(names), lambda *_: None, layers=store.layers):
                pass
        with contextlib.ExitStack() as stack:
            main = self._capture(stack, model, self.plan.main, "capture")
            for store in self.plan.stores[1:]:
                if store.twin is None:
                    self._companion(model, store)
            for index in range(self.plan.n_twins):
                twin = model.twin(twin_seed(self.seed, index))
                own, *others = [s for s in self.plan.stores if s.twin == index]
                with contextlib.ExitStack() as inner:
                    writer = self._capture(inner, twin, own, f"capture twin {index + 1}")
                    for store in others:
                        self._companion(twin, store)
                    writer.seal()
                # Before the next twin is made, or two would be in memory at once.
                del twin
            main.seal()

    def _companion(self, model: Model, store: StorePlan) -> None:
        label = f"capture {store.corpus}"
        if store.twin is not None:
            label = f"capture twin {store.twin + 1} on {store.corpus}"
        with contextlib.ExitStack() as stack:
            self._capture(stack, model, store, label).seal()

    def _capture(
        self, stack: contextlib.ExitStack, model: Model, plan: StorePlan, label: str
    ) -> StoreWriter:
        """Write all of one store but its seal; `stack` holds its lock."""
        prompts = self.prompts[plan.corpus]
        place = self.out / plan.where if plan.where else self.out
        overwrite = self.overwrite
        resumed = self.resume and not overwrite and (place / MANIFEST).exists()
        if resumed and plan.captured and {*plan.derived} <= {*load_manifest(place).activations}:
            # The run that was interrupted found out, at its first batch.
            plan = plan.as_captured()
        manifest = _manifest(plan, model, prompts, seed=self.seed, command=self.command)
        while True:
            writer = self._open(place, manifest, overwrite=overwrite)
            try:
                chosen = {name: spec.dtype for name, spec in writer.manifest.activations.items()}
                self._units(model, replace(plan, activations=chosen), prompts, writer, label)
                if plan.weights and not writer.manifest.weights:
                    writer.weights(model.weights())
                texts = model.token_texts()
                if texts is not None and not writer.manifest.vocabulary:
                    writer.vocabulary(texts)
            except DoesNotFitError as error:
                # One dtype for the whole store: what was written goes, and all starts again.
                writer.close()
                self.progress.note(
                    f"{error.name} is stored as float32: its values reach {error.largest:.3g}, "
                    "which float16 cannot hold."
                )
                manifest = _with_dtypes(manifest, {error.name: "float32"})
                overwrite = True
            except RuleDisagreesError as error:
                writer.close()
                self.progress.note(
                    f"{' and '.join(plan.derived)}: stored as captured, for queries and keys of "
                    f"layer {error.layer} give weights that are off by up to {error.off:.2g}."
                )
                plan = plan.as_captured()
                manifest = _manifest(plan, model, prompts, seed=self.seed, command=self.command)
                overwrite = True
            except BaseException:
                writer.close()
                raise
            else:
                stack.callback(writer.close)
                return writer

    def _open(self, place: Path, manifest: Manifest, *, overwrite: bool) -> StoreWriter:
        if self.resume and not overwrite and (place / MANIFEST).exists():
            found = load_manifest(place)
            wider = {
                name: "float32"
                for name, spec in found.activations.items()
                if spec.dtype == "float32"
                and name in manifest.activations
                and manifest.activations[name].dtype == "float16"
            }
            return StoreWriter.resume(place, _with_dtypes(manifest, wider))
        return StoreWriter.create(place, manifest, overwrite=overwrite)

    def _units(
        self, model: Model, plan: StorePlan, prompts: Prompts, writer: StoreWriter, label: str
    ) -> None:
        missing = writer.missing_units()
        batches = {u.id: -(-len(u.prompts) // plan.batch_size) for u in plan.units}
        with self.progress.stage(label, sum(batches.values())) as step:
            step(sum(batches.values()) - sum(batches[u.id] for u in missing))
            for unit in missing:
                capture_unit(model, plan, unit, prompts, writer, self.statistics, step)


def _manifest(
    plan: StorePlan, model: Model, prompts: Prompts, *, seed: int, command: Sequence[str]
) -> Manifest:
    facts = model.facts
    layers = list(range(facts.n_layers) if plan.layers is None else plan.layers)
    heads = {
        None: None,
        "head": None if plan.heads is None else list(plan.heads),
        "kv_head": None if plan.heads is None else list(kv_heads(facts, plan.heads)),
    }
    return Manifest(
        schema=SCHEMA,
        model=facts.to_json(),
        corpus=prompts.to_json(),
        prompts=PromptsSpec(
            n=len(prompts),
            hash=prompts.hash,
            lengths=list(prompts.lengths),
            period=prompts.period,
        ),
        activations={
            name: ActivationSpec(
                dtype=dtype,
                layers=layers,
                heads=heads[ACTIVATIONS[name].head_dim],
                positions=None if plan.positions is None else list(plan.positions),
            )
            for name, dtype in plan.activations.items()
        },
        statistics=list(plan.statistics),
        layers=None if plan.layers is None else layers,
        heads=heads["head"],
        units=list(plan.units),
        batch_size=plan.batch_size,
        lean=plan.lean,
        seed=seed,
        versions={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _VERSIONS},
        },
        command=list(command),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        notes=[*model.notes, *prompts.notes, *_lean_notes(plan)],
    )


def _lean_notes(plan: StorePlan) -> list[str]:
    notes = ["captured lean: the model ran without attention matrices"] if plan.lean else []
    if plan.not_lean:
        notes.append(f"captured with attention matrices, not lean: {plan.not_lean}")
    if plan.derived:
        notes.append(f"{' and '.join(plan.derived)}: computed from q_rot and k_rot on reading")
    return notes


def _with_dtypes(manifest: Manifest, dtypes: Mapping[str, str]) -> Manifest:
    activations = dict(manifest.activations)
    for name, dtype in dtypes.items():
        activations[name] = activations[name].model_copy(update={"dtype": dtype})
    return manifest.model_copy(update={"activations": activations})
