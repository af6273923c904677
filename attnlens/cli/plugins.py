"""``attnlens plugins``: what is installed, what it takes, whether it loads."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlens.cli import console, options
from attnlens.errors import AttnlensError

app = typer.Typer(
    help="List, explain and check the installed analyses.",
    invoke_without_command=True,
    no_args_is_help=False,
)


@app.callback()
@console.guarded
def _list(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Load each plugin and say what is wrong with it.")
    ] = False,
    no_plugin: options.NoPlugin = None,
    debug: options.Debug = False,
) -> None:
    """List the installed analyses and observers. Nothing is imported without --check."""
    if context.invoked_subcommand is not None:
        return
    from attnlens.hookspecs import OBSERVERS
    from attnlens.plugins import check_disabled, discover, enabled

    check_disabled(no_plugin or ())
    analyses, observers = discover(), discover(OBSERVERS)
    allowed = set(enabled([*analyses, *observers], no_plugin or ()))
    names = Counter(p.name for p in analyses if p in allowed)
    rows: list[list[Any]] = []
    failures = 0
    for plugin in [*analyses, *observers]:
        kind = "observer" if plugin.group == OBSERVERS else "analysis"
        if plugin not in allowed:
            status = "disabled"
        elif kind == "analysis" and names[plugin.name] > 1:
            status = f"conflict: choose {plugin.qualified}"
        else:
            status = "enabled"
        if check and plugin in allowed:
            verdict = _verdict(plugin)
            failures += verdict is not None
            status = "ok" if verdict is None and status == "enabled" else verdict or status
        rows.append([plugin.name, kind, plugin.version, plugin.distribution, status])
    console.print_table(["name", "kind", "version", "distribution", "status"], rows)
    if failures:
        raise typer.Exit(1)


def _verdict(plugin: Any) -> str | None:
    """Return what is wrong with a plugin, or None."""
    from attnlens.hookspecs import OBSERVERS
    from attnlens.plugins import load_analysis, load_observer

    try:
        load_observer(plugin) if plugin.group == OBSERVERS else load_analysis(plugin)
    except AttnlensError as error:
        return str(error)
    return None


@app.command()
@console.guarded
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="Its name, or distribution:name.",
            autocompletion=options.complete_plugins,
        ),
    ],
    debug: options.Debug = False,
) -> None:
    """Explain an analysis: what it does, reads and draws, and its options; or an observer."""
    from attnlens.hookspecs import OBSERVERS
    from attnlens.plugins import discover, enabled, find

    analyses, observers = enabled(discover()), enabled(discover(OBSERVERS))
    observes = any(name in (p.name, p.qualified) for p in observers)
    if observes and not any(name in (p.name, p.qualified) for p in analyses):
        _show_observer(find(name, observers))
    else:
        _show_analysis(find(name, analyses))


def _show_observer(plugin: Any) -> None:
    from attnlens.plugins import load_observer

    manager = load_observer(plugin)
    (module,) = manager.get_plugins()
    typer.echo(f"{plugin.name} ({plugin.distribution} {plugin.version}), an observer\n")
    if module.__doc__:
        typer.echo(inspect.cleandoc(module.__doc__) + "\n")
    hooks = [caller.name for caller in manager.get_hookcallers(module) or ()]
    typer.echo("It is told about every run, through " + (", ".join(hooks) or "no hook") + ".")
    typer.echo(f"Leave it out with --no-plugin {plugin.name}.")


def _show_analysis(plugin: Any) -> None:
    from attnlens.plugins import load_analysis

    kind = load_analysis(plugin)
    typer.echo(f"{plugin.name} ({plugin.distribution} {plugin.version})\n")
    if kind.__doc__:
        typer.echo(inspect.cleandoc(kind.__doc__) + "\n")
    typer.echo("Reads: " + (", ".join(kind().requires) or "nothing") + "\n")
    fields = kind.Options.model_fields
    if fields:
        rows = [
            [
                f"{plugin.name}.{field_name}",
                _type_name(field.annotation),
                "required"
                if field.is_required()
                else str(field.get_default(call_default_factory=True)),
                field.description or "",
            ]
            for field_name, field in fields.items()
        ]
        console.print_table(["option", "type", "default", "what"], rows)
    else:
        typer.echo("It has no options.")
    for what in ("figure", "table", "highlight"):
        drawings = kind.drawings(what)
        if drawings:
            typer.echo(f"\n{what.capitalize()}s:")
            for drawing in drawings:
                typer.echo(f"  {drawing.name}: {drawing.title}")


@app.command()
@console.guarded
def new(
    name: Annotated[str, typer.Argument(help="The analysis's name, as in head-distance.")],
    folder: Annotated[Path, typer.Option("--in", help="Where the package's folder goes.")] = Path(),
    debug: options.Debug = False,
) -> None:
    """Write a complete package for an analysis of your own, with its test."""
    from attnlens.cli.scaffold import write_package
    from attnlens.errors import UsageError
    from attnlens.plugins import discover

    if any(p.name == name for p in discover()):
        raise UsageError(
            f"There is an analysis {name!r} already.", hint="Choose another name for yours."
        )
    package = write_package(name, folder)
    typer.echo(package)
    console.say("Try it:")
    console.say(
        f"  pip install -e './{package}[dev]'"
        if not package.is_absolute()
        else f"  pip install -e '{package}[dev]'"
    )
    console.say(f"  attnlens run --plugins {name} demo")
    console.say(f"  pytest {package}")


def _type_name(annotation: Any) -> str:
    text = inspect.formatannotation(annotation)
    return text.replace("typing.", "").replace("Literal", "one of ")
