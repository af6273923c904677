"""Capturing without analysing: what analyses need, or what is named; or only the plan of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.errors import OutputError, UsageError
from attnlens.folders import prepare
from attnlens.preparation import Preparation, corpus_of, parse_needs
from attnlens.progress import Progress
from attnlens.selection import default_names, select
from attnlens.store import Store
from attnlens.store.schema import MANIFEST

if TYPE_CHECKING:
    from attnlens.models import Model
    from attnlens.plan import Plan

#: What decides how the model is loaded, among the settings of a run.
_LOADING = ("revision", "device", "dtype", "device_map", "trust_remote_code")


def load(
    model: Any, loading: Mapping[str, Any], *, progress: Progress, verify_device: bool = False
) -> Model:
    """Load the model, and hold its device against the CPU where that was asked for.

    Parameters
    ----------
    model, loading
        As :func:`attnlens.models.load_model` takes them.
    progress : Progress
        Told loudly if the device computes something else than the CPU.
    verify_device : bool, optional
        Always done on Apple's GPUs, which have been seen to give plausible but wrong numbers.

    Returns
    -------
    Model
    """
    from attnlens.models import load_model

    with progress.stage("loading the model"):
        live = load_model(model, **loading)
    device = live.facts.device
    if isinstance(model, (str, Path)) and (verify_device or device.startswith("mps")):
        from attnlens.models.verification import device_problem

        on_cpu = {**loading, "device": "cpu", "device_map": None}
        with progress.stage(f"comparing {device} with the CPU"):
            problem = device_problem(live, load_model(model, **on_cpu))
        if problem is not None:
            progress.note(f"WARNING: {problem}")
            live.notes.append(problem)
    return live


def capture_needs(
    model: Any,
    *,
    plugins: Sequence[str],
    needs: Sequence[str],
    out: Path,
    options: Mapping[str, Mapping[str, Any]],
    disabled: Iterable[str],
    corpus: Any,
    seed: int,
    overwrite: bool = False,
    resume: bool = False,
    command: Sequence[str] = (),
    progress: Progress,
    on_plan: Callable[[Plan], None],
    verify_device: bool = False,
    **settings: Any,
) -> Store:
    """Capture what analyses need, or what is named, without running an analysis.

    Parameters
    ----------
    model, plugins, options, disabled, corpus, seed, out, overwrite, resume, command, progress
        As for :func:`run`.
    needs : sequence of str
        Activations, statistics or ``"weights"``, each optionally ``@corpus``.
    on_plan : callable
        Called with the plan.
    **settings
        The remaining settings of :func:`run`.

    Returns
    -------
    Store
    """
    from attnlens.recorder import record as record_store

    loading = {name: settings.pop(name) for name in _LOADING}
    prepared = _prepared(plugins, needs, options, disabled, corpus, seed, settings)
    if overwrite and resume:
        raise UsageError(
            "--overwrite and --resume exclude each other.",
            hint="--overwrite replaces what is there, --resume finishes it.",
        )
    if (out / MANIFEST).exists() and not (overwrite or resume):
        raise OutputError(
            f"There is a store at {out} already.",
            hint="--overwrite replaces it, --resume finishes it.",
        )
    prepare(out.parent, resume=True)
    live = load(model, loading, progress=progress, verify_device=verify_device)
    plan, prompts = prepared.plan(
        live.facts, live.tokenizer, out, live.available(), live.lean_problem
    )
    on_plan(plan)
    plan.check()
    for note in live.notes:
        progress.note(note)
    return record_store(
        plan,
        live,
        prompts,
        out,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        command=command,
        progress=progress,
        statistics=prepared.statistics,
    )


def plan_only(
    model: str,
    *,
    plugins: Sequence[str] | None,
    options: Mapping[str, Mapping[str, Any]],
    disabled: Iterable[str],
    corpus: Any,
    seed: int,
    needs: Sequence[str] = (),
    out: Path | None = None,
    **settings: Any,
) -> Plan:
    """Plan a run or a capture without loading any weights.

    Parameters
    ----------
    model, plugins, options, disabled, corpus, seed, needs, out, **settings
        As for :func:`run` and :func:`capture_needs`.

    Returns
    -------
    Plan
    """
    from attnlens.models import describe_model, load_tokenizer

    loading = {name: settings.pop(name) for name in _LOADING}
    settings.pop("verify_device", None)
    chosen = default_names(disabled) if plugins is None else plugins
    prepared = _prepared(chosen, needs, options, disabled, corpus, seed, settings)
    facts = describe_model(model, **loading)
    tokenizer = load_tokenizer(
        model, revision=loading["revision"], trust_remote_code=loading["trust_remote_code"]
    )
    return prepared.plan(facts, tokenizer, out)[0]


def _prepared(
    plugins: Sequence[str],
    needs: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    disabled: Iterable[str],
    corpus: Any,
    seed: int,
    settings: Mapping[str, Any],
) -> Preparation:
    return Preparation(
        selected=select(plugins, options, disabled),
        needs=parse_needs(needs),
        spec=corpus_of(corpus, seed=seed),
        **settings,
    )
