"""Recording: a plan and a model become a store on the disk."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attnlens.corpora import Prompts, as_corpus, load_prompts
from attnlens.errors import NeedError, UsageError
from attnlens.models import Model, load_model
from attnlens.needs import MAIN, Need, Request
from attnlens.plan import Plan, make_plan
from attnlens.plan.derivation import Abilities, Lean
from attnlens.progress import Progress, Silent
from attnlens.recorder.recorder import Recorder
from attnlens.statistics import STATISTICS, Statistic
from attnlens.store import Store, open_store


def record(
    plan: Plan,
    model: Model,
    prompts: Mapping[str, Prompts],
    out: str | Path,
    *,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    attach_model: bool = False,
    statistics: Mapping[str, type[Statistic]] | None = None,
) -> Store:
    """Capture everything that is planned, and seal the store.

    Parameters
    ----------
    plan : Plan
    model : Model
        Left as it was found: device, dtype, mode, and hooks of the user's own.
    prompts : mapping from corpus name to Prompts
        ``""`` is the run's own corpus.
    out : path
        The store's folder. Other corpora go to ``out/corpora/NAME``, twins to ``out/twins/000``.
    seed : int, optional
        The twins' seeds follow from it (:func:`twin_seed`). Capturing itself is not random.
    resume : bool, optional
        Finish a store that was interrupted: the result has the same bytes as an uninterrupted one.
    overwrite : bool, optional
        Replace a store that is there.
    command : sequence of str, optional
        The command line, for the record.
    progress : Progress, optional
    attach_model : bool, optional
        Let ``store.model`` give the live model.
    statistics : mapping from name to class, optional
        Statistics that analyses bring; those of attnlens need not be named.

    Returns
    -------
    Store

    Raises
    ------
    CaptureError
        Non-finite values, an activation that never arrived.
    OutOfMemoryError
        If the model's device is too small for one batch.
    StoreError
        If the store cannot be written, or resumed with these settings.
    OutputError
        If `out` is taken.
    """
    recorder = Recorder(
        plan=plan,
        prompts=prompts,
        out=Path(out),
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        command=tuple(command),
        progress=progress or Silent(),
        statistics={**STATISTICS, **(statistics or {})},
    )
    recorder.run(model)
    # Opened once more, now that statistics of other authors are known by name.
    store = open_store(out, statistics=statistics)
    if attach_model:
        store.attach(model)
    return store


def capture(
    model: Any,
    corpus: Any = "default",
    *,
    activations: Iterable[str] = ("pattern",),
    statistics: Iterable[str | type[Statistic]] = (),
    weights: bool = False,
    twins: int = 0,
    out: str | Path | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | Literal["last"] | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    dtypes: Mapping[str, str] | None = None,
    lean: Lean = "auto",
    device: str | None = None,
    dtype: Any = None,
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Run a model over prompts and keep what was asked for.

    Parameters
    ----------
    model : str, path, TransformerBridge, PreTrainedModel or Model
        As :func:`attnlens.models.load_model` takes it.
    corpus : str, sequence of str, path, integer array, CorpusSpec or Prompts
        As :func:`attnlens.corpora.as_corpus` takes it: ``"default"``, ``"repeated-random"``,
        texts, a file, or token ids ``[prompt, pos]``; or prompts that were loaded already.
    activations : iterable of str, optional
        Names of :data:`attnlens.activations.ACTIVATIONS`, kept raw. ``"result"`` keeps what it is
        computed from.
    statistics : iterable of str or Statistic class, optional
        Accumulated while the activations stream past; nothing raw is kept for them.
    weights : bool, optional
        Keep the model's weights too.
    twins : int, optional
        Capture the same from so many models of the same configuration with random weights.
    out : path, optional
        The store's folder, by custom ending in ``.attn``. Without it the store lies in a
        temporary folder that goes when Python ends.
    layers, heads : iterable of int, optional
        All by default. Of keys and values the heads are kept that the chosen query heads read.
    positions : iterable of int, or "last", optional
        Positions of raw activations; statistics always see all.
    samples, length : int, optional
        Number of prompts, and tokens in each, where the corpus leaves them open.
    seed : int, optional
    batch_size : int, optional
    dtypes : mapping from str to {"float16", "float32", "float64"}, optional
        How to store an activation.
    lean : bool or "auto", optional
        Whether the model runs without attention matrices, which long prompts need; by default from
        1,024 tokens on, where everything can be had without. ``pattern`` and ``scores`` are then
        computed on reading, from ``q_rot`` and ``k_rot``. A model that cannot run so runs as ever,
        and a note, which the store keeps, says why; with True it is refused.
    device, dtype, device_map, revision, trust_remote_code : optional
        As :func:`attnlens.models.load_model` takes them.
    resume, overwrite : bool, optional
        What to do with a store that is there.
    progress : Progress, optional

    Returns
    -------
    Store
        With the live model attached as ``store.model``.

    Raises
    ------
    AttnlensError
        See :func:`record`, and :meth:`attnlens.plan.Plan.check` for what cannot fit.

    Examples
    --------
    >>> store = attnlens.capture("demo", statistics=["pattern.entropy"])  # doctest: +SKIP
    >>> store["pattern.entropy"].mean("prompt")  # doctest: +SKIP
    """
    names, brought = _statistic_names(statistics)
    wanted = [Need.parse(name, offered=["activation"]) for name in activations]
    for need in wanted:
        if need.kind != "activation" or need.corpus:
            raise NeedError(
                f"{need.name!r} is no activation.",
                hint="Statistics go to statistics=[...], weights to weights=True.",
            )
    request = Request(weights=weights)
    for need in [*wanted, *(Need.parse(name, brought, offered=["statistic"]) for name in names)]:
        request.add(need)
    if twins < 0:
        raise UsageError(f"twins is {twins}; it must be 0 or more.")

    loaded = load_model(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    prompts = (
        corpus if isinstance(corpus, Prompts) else _load(corpus, samples, length, seed, loaded)
    )
    place = Path(out) if out is not None else _temporary_store()
    plan = make_plan(
        loaded.facts,
        {MAIN: prompts},
        {MAIN: request},
        {MAIN: request} if twins else {},
        n_twins=twins,
        batch_size=batch_size,
        layers=layers,
        heads=heads,
        positions=positions,
        dtypes=dtypes,
        out=place,
        lean=lean,
        abilities=Abilities(
            loaded.available(), loaded.lean_problem, {n: s.of for n, s in brought.items()}
        ),
    )
    plan.check()
    return record(
        plan,
        loaded,
        {MAIN: prompts},
        place,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        command=("attnlens.capture",),
        progress=progress,
        attach_model=True,
        statistics=brought,
    )


def _load(corpus: Any, samples: int | None, length: int | None, seed: int, model: Model) -> Prompts:
    fields = {"samples": samples, "length": length, "seed": seed}
    given = {key: value for key, value in fields.items() if value}
    return load_prompts(as_corpus(corpus, **given), tokenizer=model.tokenizer, facts=model.facts)


def _statistic_names(
    statistics: Iterable[str | type[Statistic]],
) -> tuple[list[str], dict[str, type[Statistic]]]:
    names: list[str] = []
    brought: dict[str, type[Statistic]] = {}
    for item in [statistics] if isinstance(statistics, str) else statistics:
        if isinstance(item, str):
            names.append(item)
        else:
            names.append(item.name)
            brought[item.name] = item
    return names, brought


def _temporary_store() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="attnlens-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / "store.attn"
