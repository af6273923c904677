"""``attnlens capture``: a store without analyses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from attnlens.cli import console, options
from attnlens.errors import UsageError


@console.guarded
def command(
    model: options.ModelName,
    activations: Annotated[
        str | None,
        typer.Option(
            "--activations",
            "-a",
            metavar="A,B",
            help="What to capture: activations (q, k, v, z, scores, pattern, result, resid_pre, "
            "attn_out), statistics (pattern.entropy, z.second_moment, ...) and weights.",
            show_default=False,
        ),
    ] = None,
    plugins: Annotated[
        str | None,
        typer.Option(
            "--plugins",
            "-p",
            metavar="A,B",
            help="Capture what these analyses need, for `attnlens analyze` later.",
            autocompletion=options.complete_plugins,
            show_default=False,
        ),
    ] = None,
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
            metavar="STORE",
            help="Where the store goes; a new one below attnlens-runs by default.",
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
    """Capture activations and statistics into a store, in one pass.

    Prints the store's path. Without --activations or --plugins, the patterns are captured.

    For example:

        attnlens capture -a z,pattern.entropy --samples 64 --out gpt2.attn gpt2-small

        attnlens analyze gpt2.attn --plugins spectrum
    """
    settings = options.settings(locals())
    console.configure_logging(quiet=quiet, verbose=verbose)
    from attnlens import capturing, runner

    wanted = options.names(plugins) or []
    needs = [word.strip() for word in (activations or "").split(",") if word.strip()]
    if activations is not None and not needs:
        raise UsageError("--activations names nothing.", hint="For example -a z,pattern.")
    settings["plugins"] = wanted
    settings["needs"] = needs or ([] if wanted else ["pattern"])
    if dry_run:
        typer.echo(str(capturing.plan_only(model, out=out, **settings)))
        return
    place = out or runner.new_folder(model, suffix=".attn")
    with console.progress(quiet=quiet) as progress:
        try:
            store = capturing.capture_needs(
                model,
                out=place,
                overwrite=overwrite,
                resume=resume,
                command=["attnlens", *sys.argv[1:]],
                progress=progress,
                on_plan=lambda plan: None if quiet else console.say(str(plan)),
                **settings,
            )
        except KeyboardInterrupt:
            console.say(f"Finish it with the same command and --resume --out {place}")
            raise
    typer.echo(store.path)
