"""``attnlens analyze``: analyses on a store that was captured earlier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from attnlens.cli import console, options
from attnlens.cli.run import conclude


@console.guarded
def command(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store, or a run's folder.")],
    plugins: options.Plugins = None,
    option: options.Assignments = None,
    config: options.Config = None,
    no_plugin: options.NoPlugin = None,
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
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Run analyses on a store and write a report. The model is not needed.

    For example:

        attnlens analyze gpt2.attn --plugins spectrum
    """
    console.configure_logging(quiet=quiet, verbose=verbose)
    from attnlens import runner

    with console.progress(quiet=quiet) as progress:
        finished = runner.analyze(
            store,
            options.names(plugins),
            options=options.plugin_options(option, config),
            disabled=no_plugin or (),
            out=out,
            overwrite=overwrite,
            command=["attnlens", *sys.argv[1:]],
            progress=progress,
        )
    conclude(finished, quiet=quiet)
