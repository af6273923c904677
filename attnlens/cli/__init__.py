"""The command line: one module for each command, and nothing heavy imported before it is needed."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from attnlens.cli import analyze, capture, doctor, plot, plugins, run, store, track

app = typer.Typer(
    name="attnlens",
    help="An algebraic health check for transformer attention.\n\n"
    "Capture activations once, run analyses on them, read the report:\n\n"
    "    attnlens run --plugins cp,spectrum demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.command)
app.command("capture")(capture.command)
app.command("analyze")(analyze.command)
app.command("plot")(plot.command)
app.command("track")(track.track)
app.command("compare")(track.compare)
app.command("doctor")(doctor.command)
app.add_typer(plugins.app, name="plugins")
app.add_typer(store.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"attnlens {version('attnlens')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Hold the options that stand before every command."""


def main() -> None:
    """Entry point of the ``attnlens`` command."""
    # Figures are only ever written to files here, whatever the environment says.
    os.environ["MPLBACKEND"] = "Agg"
    app()
