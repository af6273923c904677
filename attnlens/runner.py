"""Declare, plan, one pass, analyse, report: the whole of a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.analysis import Analysis, plain
from attnlens.capturing import load
from attnlens.execution import Executor
from attnlens.folders import RUN_FILE, STORE, clear, default_folder, prepare, write_json
from attnlens.plan.derivation import Lean, settled
from attnlens.plugins import Observers
from attnlens.preparation import Preparation, corpus_of
from attnlens.progress import Progress, Silent
from attnlens.report import write_report
from attnlens.reproducing import again
from attnlens.runs import Run
from attnlens.selection import Selected, default_names, select
from attnlens.store import Store, open_store

if TYPE_CHECKING:
    from attnlens.models import Model
    from attnlens.plan import Plan

#: Distributions whose versions a run records, and `attnlens doctor` shows.
_RECORDED = (
    "attnlens", "torch", "transformers", "transformer-lens", "numpy", "scipy", "scikit-learn",
    "tensorly", "umap-learn", "xarray", "zarr", "pandas", "datasets", "safetensors",
    "huggingface-hub", "matplotlib", "pluggy", "pydantic", "typer",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of Python and of the distributions that decide a run's numbers."""
    found = {"python": sys.version.split()[0]}
    for name in _RECORDED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def new_folder(model: Any, suffix: str = "") -> Path:
    """Return a folder for a new run, named after the model."""
    name = str(model).partition("@")[0] if isinstance(model, (str, Path)) else type(model).__name__
    return default_folder(name, suffix)


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
    lean: Lean = "auto",
    verify_device: bool = False,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Run:
    """Capture what the analyses need in one pass, run them, and write the report.

    Parameters
    ----------
    model : str, pathlib.Path, TransformerBridge, PreTrainedModel or Model
        A hub name or alias (``"gpt2-small"``, ``"pythia-160m@step1000"``), a Hugging Face folder,
        ``"demo"``, or a live model. A live Hugging Face model is wrapped where it stands and does
        not come back as it was (names of its parameters, attention implementation, hooks): pass
        ``copy.deepcopy(model)`` to keep it.
    plugins : sequence of str, Analysis or type, optional
        Analyses by name, class or instance; the built-in ones by default.
    corpus : str, path, list of str, array of int, CorpusSpec or Prompts
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
        How many models with fresh random weights tell what the numbers are by chance; three by
        default, one of a large model.
    layers, heads : sequence of int, optional
        Capture these alone.
    positions : {"last"} or sequence of int, optional
    batch_size : int, optional
    dtypes : mapping from activation to dtype, optional
        How activations are stored.
    lean : bool or "auto", optional
        Whether the model runs without attention matrices; see :func:`attnlens.capture`.
    verify_device : bool, optional
        Compare the device with the CPU first; always done on Apple's GPUs.
    revision, device, dtype, device_map, trust_remote_code
        Passed on to the model's loading.
    command : sequence of str
        The command line, for the report; without one, the command or the call that does the same.
    progress : Progress, optional
        Told how far the work is.
    on_plan : callable, optional
        Called with the :class:`attnlens.plan.Plan` before the pass starts.

    Returns
    -------
    Run
        A mapping from the names of the analyses to their results. What failed is in
        ``run.errors``.

    Raises
    ------
    AttnlensError
        If nothing could be captured. A failing analysis does not raise.
    """
    from attnlens.recorder import record as record_store

    started = time.perf_counter()
    disabled = tuple(disabled)
    given = {**locals()}
    progress = progress or Silent()
    prepared = Preparation(
        selected=select(plugins or default_names(disabled), options, disabled),
        spec=corpus_of(corpus, samples=samples, length=length, seed=seed),
        twins=twins,
        layers=layers,
        heads=heads,
        positions=positions,
        batch_size=batch_size,
        dtypes=dtypes or {},
        lean=lean,
    )
    said = {"command": list(command)} if command else again(run, given)
    observers = Observers(disabled)
    folder = prepare(
        Path(out) if out is not None else new_folder(model), overwrite=overwrite, resume=resume
    )
    loading = {
        "revision": revision,
        "device": device,
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
    }
    try:
        live = load(model, loading, progress=progress, verify_device=verify_device)
        plan, prompts = prepared.plan(
            live.facts, live.tokenizer, folder / STORE, live.available(), live.lean_problem
        )
        if on_plan is not None:
            on_plan(plan)
        plan.check()
    except BaseException:
        # A folder that nothing was put into is not left behind.
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
    if overwrite:
        clear(folder)
    store = record_store(
        plan,
        live,
        prompts,
        folder / STORE,
        seed=seed,
        resume=resume and (folder / STORE).exists(),
        command=said["command"] or [said["call"]],
        progress=progress,
        statistics=prepared.statistics,
    )
    notes = [*live.notes, *settled(plan.notes, store.manifest.activations)]
    return _analyse(
        store,
        prepared.selected,
        folder,
        base={
            **said,
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
    disabled = tuple(disabled)
    given = {**locals()}
    selected = select(plugins or default_names(disabled), options, disabled)
    own_statistics = {s.name: s for one in selected for s in one.analysis.statistics}
    if not isinstance(store, Store):
        path = Path(store)
        inner = path / STORE
        store = open_store(inner if inner.is_dir() else path, statistics=own_statistics)
    name = (store.manifest.model or {}).get("name") or "store"
    folder = prepare(Path(out) if out is not None else new_folder(str(name)), overwrite=overwrite)
    if overwrite:
        clear(folder, reading=[store.path] if store.path else [])
    return _analyse(
        store,
        selected,
        folder,
        base={
            **({"command": list(command)} if command else again(analyze, given)),
            "store": str(store.path.resolve()) if store.path else "",
            "plan": {},
            "notes": [],
        },
        observers=Observers(disabled),
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
    facts = manifest.model or {}
    used = versions()
    record: dict[str, Any] = {
        "schema": "attnlens-run/1",
        "attnlens": used["attnlens"],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "model": facts,
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
            "model": facts.get("name"),
            "revision": facts.get("revision"),
            "weights_hash": facts.get("weights_hash"),
            "prompts_hash": manifest.prompts.hash,
            "seed": manifest.seed,
        },
        observers=observers,
        model=model,
    )

    def save() -> None:
        record["seconds"] = round(time.perf_counter() - started, 3)
        record["notes"] = list(dict.fromkeys([*base["notes"], *observers.notes]))
        record["analyses"] = executor.records
        record["findings"] = executor.listed_findings()
        write_json(folder / RUN_FILE, plain(record))

    save()
    with progress.stage("analysing", len(selected)) as advance:
        for one in selected:
            with progress.stage(one.name):
                entry = executor.execute(one)
            if entry["error"]:
                progress.note(f"{one.name} failed: {entry['error']['message']}")
            save()
            advance(1)
    with progress.stage("writing the report"):
        write_report(folder)
    return Run(folder, {s.name: s.analysis for s in selected})
