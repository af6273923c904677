"""``attnlens store``: look into a store, check it, take an activation out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from attnlens.cli import console, options

app = typer.Typer(help="Look into a store, check it, export from it.", no_args_is_help=True)

StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="A store's folder.")]


@app.command()
@console.guarded
def info(
    store: StorePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print it for machines.")] = False,
    debug: options.Debug = False,
) -> None:
    """Tell what a store holds."""
    from attnlens.store import store_info

    found = store_info(store)
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    arrays = found.pop("arrays", [])
    for key, value in found.items():
        typer.echo(f"{key}: {value}")
    if arrays:
        typer.echo("")
        columns = list(arrays[0])
        console.print_table(columns, [[row[c] for c in columns] for row in arrays])


@app.command()
@console.guarded
def verify(
    store: StorePath,
    deep: Annotated[
        bool, typer.Option("--deep", help="Decode everything, not only look at sizes.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Check that a store is whole. Exit code 1 if it is not."""
    from attnlens.store import verify as check

    problems = check(store, deep=deep)
    for problem in problems:
        typer.echo(str(problem))
    if problems:
        raise typer.Exit(1)
    if deep:
        typer.echo(f"{store} is whole.")
    else:
        typer.echo(f"{store} is complete; --deep also looks for altered content.")


@app.command()
@console.guarded
def export(
    store: StorePath,
    name: Annotated[str, typer.Argument(metavar="ACTIVATION", help="An activation or statistic.")],
    to: Annotated[Path, typer.Argument(metavar="FILE", help="FILE.npy or FILE.safetensors.")],
    form: Annotated[
        Literal["npy", "safetensors"] | None,
        typer.Option("--format", help="Told by the file's ending by default.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Write one activation or statistic as .npy or safetensors."""
    from attnlens.store import export as write
    from attnlens.store import open_store

    typer.echo(write(open_store(store), name, to, form, overwrite=overwrite))
