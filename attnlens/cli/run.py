"""``attnlens run``: from a model to a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnlens.cli import console, options
from attnlens.errors import AttnlensError
from attnlens.wording import shell

if TYPE_CHECKING:
    from attnlens.runs import Run


@console.guarded
def command(
    model: options.ModelName,
    plugins: options.Plugins = None,
    option: options.Assignments = None,
    config: options.Config = None,
    no_plugin: options.NoPlugin = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Pairs of texts with one meaning, a pair a line, separated by a tab: the same as "
            "-o equivariance.pairs=FILE.",
            rich_help_panel="Prompts",
            show_default=False,
        ),
    ] = None,
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
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    verify_device: options.VerifyDevice = False,
    twins: options.Twins = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    positions: options.Positions = None,
    batch_size: options.BatchSize = None,
    store_dtype: options.StoreDtypes = None,
    lean: options.Lean = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where the run goes; a new folder below attnlens-runs by default.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Capture what the analyses need, run them, and write a report.

    Prints the report's path. Exit code: 0 if all went well, 1 if an analysis failed or the model
    could not be had, 2 for a mistake on the command line, 130 after Ctrl-C.

    For example:

        attnlens run demo

        attnlens run --plugins cp,spectrum -o cp.rank=8 gpt2-small

        attnlens run --plugins spectrum --text-file prompts.txt --samples 64 ./my-model
    """
    settings = options.settings(locals())
    console.configure_logging(quiet=quiet, verbose=verbose)
    from attnlens import capturing, runner

    settings["plugins"] = options.names(plugins)
    if pairs is not None:
        settings["options"].setdefault("equivariance", {})["pairs"] = str(pairs)
    if dry_run:
        typer.echo(str(capturing.plan_only(model, out=out, **settings)))
        return
    folder = out or runner.new_folder(model)
    with console.progress(quiet=quiet) as progress:
        try:
            finished = runner.run(
                model,
                out=folder,
                overwrite=overwrite,
                resume=resume,
                command=["attnlens", *sys.argv[1:]],
                progress=progress,
                on_plan=lambda plan: None if quiet else console.say(str(plan)),
                **settings,
            )
        except KeyboardInterrupt:
            _tell_how_to_resume(folder)
            raise
    conclude(finished, quiet=quiet)


def _tell_how_to_resume(folder: Path) -> None:
    if any(folder.glob("*.attn")):
        given = [a for a in sys.argv[1:] if a not in ("--resume", "--overwrite")]
        if "--out" not in given:
            given += ["--out", str(folder)]
        console.say(f"Finish it with: {shell(['attnlens', *given, '--resume'])}")


def conclude(run: Run, *, quiet: bool) -> None:
    """Print what was found and where it lies; fail if an analysis did."""
    if not quiet:
        for entry in run.record["analyses"]:
            if entry["status"] == "skipped":
                console.say(f"{entry['name']} was skipped: {'; '.join(entry['notes'])}")
                continue
            for note in entry["notes"]:
                console.say(f"{typer.style('!', fg='yellow')} {entry['name']}: {note}")
        console.tell(run.findings)
    for entry in run.record["analyses"]:
        if entry.get("error"):
            trace = f"The traceback is in {run.path / entry['name'] / 'traceback.txt'}."
            hint = entry["error"].get("hint")
            message = f"{entry['name']}: {entry['error']['message']}"
            console.complain(AttnlensError(message, hint=f"{hint} {trace}" if hint else trace))
    typer.echo(run.report)
    if run.errors:
        raise typer.Exit(1)
