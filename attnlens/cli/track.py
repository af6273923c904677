"""``attnlens track`` and ``attnlens compare``: several runs side by side."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlens.cli import console, options
from attnlens.errors import UsageError

if TYPE_CHECKING:
    from attnlens.runs import Run

_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where the result goes; a new folder below attnlens-runs by default.",
        rich_help_panel="Output",
        show_default=False,
    ),
]


#: Options of `track` that do not bear on the single run.
_OF_THE_WHOLE = {"models", "revisions", "out", "overwrite", "resume", "quiet", "verbose", "debug"}


@console.guarded
def track(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="One model with --revisions, or the folders of several checkpoints, or of "
            "finished runs.",
        ),
    ],
    revisions: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="Revisions of the one model: step1,step1000.", show_default=False
        ),
    ] = None,
    plugins: options.Plugins = None,
    option: options.Assignments = None,
    config: options.Config = None,
    no_plugin: options.NoPlugin = None,
    corpus: options.Corpus = None,
    text: options.Text = None,
    text_file: options.TextFile = None,
    chunk: options.Chunk = None,
    dataset: options.Dataset = None,
    tokens: options.Tokens = None,
    bos: options.Bos = None,
    samples: options.Samples = None,
    length: options.Length = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    verify_device: options.VerifyDevice = False,
    twins: options.Twins = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    positions: options.Positions = None,
    batch_size: options.BatchSize = None,
    store_dtype: options.StoreDtypes = None,
    lean: options.Lean = None,
    out: _Out = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Run analyses on each checkpoint and draw every quantity over training.

    Sudden changes are marked and dated. Checkpoints whose run is finished are not run again with
    --resume.

    For example:

        attnlens track pythia-160m --revisions step1,step512,step1000 --plugins spectrum

        attnlens track checkpoints/step* --plugins cp
    """
    given = {name: value for name, value in locals().items() if name != "context"}
    settings = options.settings({**given, "revision": None})
    console.configure_logging(quiet=quiet, verbose=verbose)
    from attnlens import runner
    from attnlens.folders import RUN_FILE, clear, prepare, slug
    from attnlens.runs import open_run
    from attnlens.tracking import track_runs

    started = time.perf_counter()
    settings["plugins"] = options.names(plugins)
    named = _checkpoints(models, revisions)
    finished = [label for label, model in named.items() if (Path(model) / RUN_FILE).is_file()]
    if finished:
        _tell_what_is_fixed(context, finished, everything=len(finished) == len(named))
    folder = prepare(out or runner.new_folder(f"track-{Path(models[0]).name}"),
                     overwrite=overwrite, resume=resume)  # fmt: skip
    if overwrite:
        clear(folder, reading=[Path(m) for m in named.values() if Path(m).exists()])
    runs: dict[str, Run] = {}
    with (
        console.progress(quiet=quiet) as progress,
        progress.stage("checkpoints", len(named)) as advance,
    ):
        for label, model in named.items():
            place = folder / "checkpoints" / slug(label)
            if label in finished:
                runs[label] = open_run(model)
            elif resume and (place / "report.html").is_file():
                runs[label] = open_run(place)
            else:
                runs[label] = _one(runner.run, model, place, resume, progress, settings)
            advance(1)
    _, report = track_runs(runs, folder, command=["attnlens", *sys.argv[1:]], started=started)
    if not quiet:
        console.tell(open_run(folder).findings)
    typer.echo(report)


def _tell_what_is_fixed(context: typer.Context, finished: list[str], *, everything: bool) -> None:
    """Refuse, or note, options that cannot bear on runs that are finished."""
    fixed = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in _OF_THE_WHOLE
        and getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE"
    ]
    if not fixed:
        return
    if everything:
        raise UsageError(
            f"{', '.join(fixed)}: all that is named are finished runs, and these stay as they are.",
            hint="Leave the options out, or name models to run anew.",
        )
    console.say(f"{', '.join(fixed)}: without effect on finished runs ({', '.join(finished)}).")


def _one(run: Any, model: str, place: Path, resume: bool, progress: Any, settings: Any) -> Run:
    with progress.stage(model):
        finished: Run = run(model, out=place, resume=resume, progress=progress, **settings)
    for name, message in finished.errors.items():
        progress.note(f"{model}: {name} failed: {message}")
    return finished


def _checkpoints(models: list[str], revisions: str | None) -> dict[str, str]:
    """Name what is tracked: label to model."""
    if len(set(models)) < len(models):
        raise UsageError(
            f"{next(m for m in models if models.count(m) > 1)} was named twice.",
        )
    if revisions is None:
        if len(models) < 2:
            raise UsageError(
                "There is only one model to track.",
                hint="Give --revisions step1,step1000, or the folders of several checkpoints.",
            )
        labels = [Path(m).name or m for m in models]
        if len(set(labels)) < len(labels):
            labels = models
        return dict(zip(labels, models, strict=True))
    if len(models) > 1:
        raise UsageError("--revisions are of one model, and several were given.")
    named = [r.strip() for r in revisions.split(",") if r.strip()]
    if len(named) < 2:
        raise UsageError(f"--revisions {revisions!r} names fewer than two revisions.")
    return {revision: f"{models[0]}@{revision}" for revision in named}


@console.guarded
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of at least two runs.")
    ],
    out: _Out = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Line up finished runs: which quantities stay, and which move.

    For each quantity: its coefficient of variation over the runs, and how far its heads keep
    their order (Spearman). Runs that read identical weights are named.

    For example:

        attnlens compare attnlens-runs/demo-a attnlens-runs/demo-b
    """
    console.configure_logging(quiet=quiet, verbose=verbose)
    from attnlens import runner
    from attnlens.folders import clear, prepare
    from attnlens.runs import open_run
    from attnlens.tracking import compare_runs

    labels = [p.name for p in runs]
    if len(set(labels)) < len(labels):
        labels = [str(p) for p in runs]
    if len(set(labels)) < len(labels):
        raise UsageError("One run was named twice.")
    opened = {label: open_run(path) for label, path in zip(labels, runs, strict=True)}
    folder = prepare(out or runner.new_folder("compare"), overwrite=overwrite)
    if overwrite:
        clear(folder, reading=runs)
    table, report = compare_runs(opened, folder, command=["attnlens", *sys.argv[1:]])
    if not quiet:
        rows = [
            [r["quantity"], f"{r['variation']:.3f}", f"{r['rank_correlation']:.2f}",
             "stays" if r["stays"] else "moves"]
            for r in table.to_dict("records")
        ]  # fmt: skip
        console.print_table(["quantity", "variation", "rank correlation", ""], rows, err=True)
        console.tell(open_run(folder).findings)
    typer.echo(report)
