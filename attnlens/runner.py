"""Declare, plan, one pass, analyse, report: the whole of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.analysis import Analysis, plain
from attnlens.execution import Executor
from attnlens.folders import (
    RUN_FILE,
    STORE,
    default_folder,
    prepare,
    write_json,
)
from attnlens.needs import MAIN, requests
from attnlens.plugins import Observers
from attnlens.progress import Progress, Silent
from attnlens.report import write_report
from attnlens.runs import Run
from attnlens.selection import Selected, default_names, select

if TYPE_CHECKING:
    from attnlens.corpora import CorpusSpec, Prompts
    from attnlens.models import Model
    from attnlens.plan import Plan
    from attnlens.store import Store

#: Distributions whose versions a run records.
_RECORDED = (
    "attnlens", "torch", "transformers", "transformer-lens", "numpy", "scipy", "scikit-learn",
    "tensorly", "xarray", "zarr", "matplotlib", "pluggy",
)  # fmt: skip

#: Up to how many parameters several twins are made; a larger model gets one.
_SMALL_MODEL = 50_000_000


def versions() -> dict[str, str]:
    """Return the versions of Python and of the distributions that decide a run's numbers."""
    found = {"python": sys.version.split()[0]}
    for name in _RECORDED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Selection:
    """Which part of the model to capture, and how: see :func:`attnlens.plan.make_plan`."""

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    positions: str | Sequence[int] | None = None
    batch_size: int | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)


def number_of_twins(n_params: int) -> int:
    """Return how many twins are made unless told otherwise: three, or one of a large model."""
    return 3 if n_params <= _SMALL_MODEL else 1


def _corpus(value: Any, *, seed: int, **fields: Any) -> CorpusSpec | Prompts:
    """Make a spec of whatever a person passes as a corpus; prompts stay as they are."""
    from attnlens.corpora import CorpusSpec, Prompts, as_corpus

    if isinstance(value, Prompts):
        return value
    fields = {name: field for name, field in fields.items() if field is not None}
    if not isinstance(value, CorpusSpec):
        fields["seed"] = seed
    return as_corpus(value, **fields)


def gather_prompts(
    corpora: Iterable[str], spec: CorpusSpec | Prompts, model: Model
) -> dict[str, Prompts]:
    """Load the prompts of the run's own corpus, named ``""``, and of every other one asked for."""
    from attnlens.corpora import Prompts, load_prompts

    own = (
        spec
        if isinstance(spec, Prompts)
        else load_prompts(spec, tokenizer=model.tokenizer, facts=model.facts)
    )
    prompts = {MAIN: own}
    for name in corpora:
        if name != MAIN:
            prompts[name] = load_prompts(
                _other_corpus(name, spec, own), tokenizer=model.tokenizer, facts=model.facts
            )
    return prompts


def _other_corpus(name: str, spec: CorpusSpec | Prompts, own: Prompts) -> CorpusSpec:
    """Describe a corpus that an analysis asks for: as many tokens as the run's own, about."""
    from attnlens.corpora import CorpusSpec

    longest = max(len(t) for t in own.tokens)
    return CorpusSpec(
        name=name,
        samples=min(len(own.tokens), 16),
        length=max(longest, 16),
        seed=getattr(spec, "seed", own.seed),
    )


def plan_run(
    selected: Sequence[Selected],
    model: Model,
    spec: CorpusSpec | Prompts,
    *,
    twins: int | None,
    what: Selection,
    out: Path | None,
) -> tuple[Plan, dict[str, Prompts]]:
    """Turn the needs of the analyses into a plan for one pass over each corpus."""
    from attnlens.plan import make_plan

    wanted, of_twins = requests(s.needs for s in selected)
    prompts = gather_prompts([*wanted, *of_twins], spec, model)
    n_twins = number_of_twins(model.facts.n_params) if twins is None else twins
    plan = make_plan(
        model.facts,
        prompts,
        wanted,
        of_twins if n_twins else {},
        n_twins=n_twins if of_twins else 0,
        batch_size=what.batch_size,
        layers=what.layers,
        heads=what.heads,
        positions=what.positions,
        dtypes=dict(what.dtypes) or None,
        out=out,
    )
    return plan, prompts


def run(
    model: Any = "demo",
    plugins: Sequence[str | Analysis | type[Analysis]] | None = None,
    *,
    corpus: Any = "default",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    disabled: Iterable[str] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
    twins: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: str | Sequence[int] | None = None,
    batch_size: int | None = None,
    dtypes: Mapping[str, str] | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    on_plan: Any = None,
) -> Run:
    """Capture what the analyses need in one pass, run them, and write the report.

    Parameters
    ----------
    model : str, pathlib.Path, TransformerBridge, PreTrainedModel or Model
        A hub name or alias (``"gpt2-small"``, ``"pythia-160m@step1000"``), a Hugging Face folder,
        ``"demo"``, or a live model.
    plugins : sequence of str, Analysis or type, optional
        Analyses by name, class or instance; the built-in ones by default.
    corpus : str, CorpusSpec, Prompts, list of str or array of int
        ``"default"`` (a public-domain text), ``"repeated-random"``, or the prompts themselves.
    options : mapping from analysis name to options, optional
    disabled : iterable of str
        Plugins that must not be used.
    out : str or pathlib.Path, optional
        The run's folder; one below ``attnlens-runs`` by default.
    overwrite, resume : bool
        What to do with an earlier run in that folder: replace it, or finish it.
    samples, length : int, optional
        Number of prompts, and tokens of each.
    seed : int
    twins : int, optional
        How many models with fresh random weights tell what the numbers are by chance.
    layers, heads : sequence of int, optional
    positions : {"last"} or sequence of int, optional
    batch_size : int, optional
    dtypes : mapping from activation to dtype, optional
        How activations are stored.
    revision, device, dtype, device_map, trust_remote_code
        Passed on to the model's loading.
    command : sequence of str
        The command line, for the report.
    progress : Progress, optional
        Told how far the work is.
    on_plan : callable, optional
        Called with the :class:`attnlens.plan.Plan` before anything heavy starts.

    Returns
    -------
    Run
        A mapping from the names of the analyses to their results. Analyses that failed are in
        ``run.errors``.

    Raises
    ------
    AttnlensError
        If nothing could be captured. A failing analysis does not raise.
    """
    from attnlens.models import load_model
    from attnlens.recorder import record as record_store

    progress = progress or Silent()
    selected = select(plugins or default_names(disabled), options, disabled)
    observers = Observers(disabled)
    spec = _corpus(corpus, samples=samples, length=length, seed=seed)
    folder = prepare(
        Path(out) if out is not None else default_folder(_name_of(model)),
        overwrite=overwrite,
        resume=resume,
    )
    started = time.perf_counter()
    with progress.stage("loading the model"):
        live = load_model(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
        )
    what = Selection(layers, heads, positions, batch_size, dtypes or {})
    plan, prompts = plan_run(selected, live, spec, twins=twins, what=what, out=folder / STORE)
    if on_plan is not None:
        on_plan(plan)
    plan.check()
    own_statistics = {s.name: s for one in selected for s in one.analysis.statistics}
    store = record_store(
        plan,
        live,
        prompts,
        folder / STORE,
        seed=seed,
        resume=resume and (folder / STORE).exists(),
        command=list(command),
        progress=progress,
        statistics=own_statistics,
    )
    notes = [*live.notes, *plan.notes, *prompts[MAIN].notes, *observers.notes]
    return _analyse(
        store,
        selected,
        folder,
        base={
            "command": list(command),
            "store": STORE,
            "plan": plan.to_json(),
            "notes": list(dict.fromkeys(notes)),
        },
        observers=observers,
        model=live,
        started=started,
        progress=progress,
    )


def analyze(
    store: str | Path | Store,
    plugins: Sequence[str | Analysis | type[Analysis]] | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    disabled: Iterable[str] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Run:
    """Run analyses on a store that was captured earlier.

    Parameters
    ----------
    store : str, pathlib.Path or Store
        The store, or a run's folder.
    plugins, options, disabled, out, overwrite, command, progress
        As for :func:`run`.

    Returns
    -------
    Run

    Raises
    ------
    StoreError
        If the store is unfinished, damaged or of another version.
    """
    from attnlens.store import Store, open_store

    selected = select(plugins or default_names(disabled), options, disabled)
    observers = Observers(disabled)
    own_statistics = {s.name: s for one in selected for s in one.analysis.statistics}
    if not isinstance(store, Store):
        path = Path(store)
        if (path / STORE).is_dir():
            path = path / STORE
        store = open_store(path, statistics=own_statistics)
    where = str(store.path.resolve()) if store.path else ""
    name = (store.manifest.model or {}).get("name") or "store"
    folder = prepare(
        Path(out) if out is not None else default_folder(str(name)), overwrite=overwrite
    )
    return _analyse(
        store,
        selected,
        folder,
        base={"command": list(command), "store": where, "plan": {}, "notes": observers.notes},
        observers=observers,
        model=None,
        started=time.perf_counter(),
        progress=progress or Silent(),
    )


def _analyse(
    store: Store,
    selected: Sequence[Selected],
    folder: Path,
    *,
    base: Mapping[str, Any],
    observers: Observers,
    model: Model | None,
    started: float,
    progress: Progress,
) -> Run:
    """Run the analyses, keeping the record on disk true after each of them."""
    manifest = store.manifest
    used = versions()
    record: dict[str, Any] = {
        "schema": "attnlens-run/1",
        "attnlens": used["attnlens"],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "model": manifest.model or {},
        "corpus": manifest.corpus,
        "seed": manifest.seed,
        "versions": used,
        **base,
        "analyses": [],
        "findings": [],
    }
    executor = Executor(
        store,
        folder,
        origin={
            "attnlens": used["attnlens"],
            "model": (manifest.model or {}).get("name"),
            "revision": (manifest.model or {}).get("revision"),
            "weights_hash": (manifest.model or {}).get("weights_hash"),
            "prompts_hash": manifest.prompts.hash,
            "seed": manifest.seed,
        },
        observers=observers,
        model=model,
    )

    def save() -> None:
        record["seconds"] = round(time.perf_counter() - started, 3)
        record["analyses"] = executor.records
        record["findings"] = executor.listed_findings()
        write_json(folder / RUN_FILE, plain(record))

    save()
    try:
        with progress.stage("analysing", len(selected)) as advance:
            for one in selected:
                with progress.stage(one.name):
                    entry = executor.execute(one)
                if entry["error"]:
                    progress.note(f"{one.name} failed: {entry['error']['message']}")
                save()
                advance(1)
    finally:
        record["notes"] = list(dict.fromkeys([*record["notes"], *observers.notes]))
        save()
    with progress.stage("writing the report"):
        write_report(folder)
    return Run(folder, {s.name: s.analysis for s in selected})


def _name_of(model: Any) -> str:
    if isinstance(model, (str, Path)):
        return str(model).partition("@")[0]
    return type(model).__name__
