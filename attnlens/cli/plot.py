"""``attnlens plot``: the figures of a run again, from its saved results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnlens.cli import console, options
from attnlens.cli.run import conclude


@console.guarded
def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Draw the figures and the report of a run again. Neither model nor store is needed."""
    console.configure_logging(quiet=quiet, verbose=verbose)
    from attnlens.runs import redraw

    with console.progress(quiet=quiet) as progress, progress.stage("drawing"):
        finished = redraw(run)
    conclude(finished, quiet=quiet)
