"""Write the parts of the documentation that the code decides.

``python docs/generate.py`` writes them; ``--check`` lists the pages that are out of date and fails
if there are any. Whole pages are generated below ``reference/``; elsewhere what stands between
``<!-- generated: WHAT -->`` and ``<!-- end -->`` is.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

import attnlens
from attnlens.activations import ACTIVATIONS
from attnlens.cli import app
from attnlens.plugins import Plugin, discover, load_analysis
from attnlens.statistics import STATISTICS
from attnlens.store import schema

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py; do not edit. -->\n\n"

#: What a reader of the file itself, in the repository, should know.
UNBUILT = (
    "> In the repository, this page lists names. The site, which `make docs` builds, shows each\n"
    "> with its documentation; in Python, `help` does.\n"
)

#: Modules with a page of their own in the reference, and what stands above their names.
API = {
    "attnlens": "The names that notebooks, scripts and plugins use. `import attnlens` is quick: "
    "each name is fetched when it is first used.",
    "attnlens.view": "What `compute` is given: a store, narrowed to what the analysis declared.",
    "attnlens.hookspecs": "The hooks that plugins implement.",
    "attnlens.store": "The labelled tensor store, on disk or in memory.",
    "attnlens.attention": "One handle over a head's attention, whether a pattern is there or only "
    "queries and keys.",
    "attnlens.statistics": "Statistics accumulated over activations while they stream past.",
    "attnlens.decomposition": "CP and Tucker decompositions of labelled tensors.",
    "attnlens.nulls": "What a number would be by chance.",
    "attnlens.figures": "Drawing without pyplot.",
    "attnlens.models": "Models and their facts, as analyses see them.",
    "attnlens.tracking": "Several runs side by side.",
    "attnlens.testing": "The kit for authors of analyses.",
    "attnlens.errors": "Every error that attnlens raises. The message says what is wrong, `hint` "
    "what to do.",
}

#: Constants without a ``#:`` comment.
CONSTANTS = {
    "attnlens.figures.DIVERGING": "Colour map with a middle, for values that have a sign.",
    "attnlens.figures.PALETTE": "Colours that colour-blind eyes tell apart too, as hex strings.",
    "attnlens.figures.SEQUENTIAL": "Colour map from little to much.",
    "attnlens.figures.STYLE": "Settings of matplotlib that figures are drawn under; your own are "
    "left as they are.",
}


# -- tables -------------------------------------------------------------------------------------


def cell(text: object) -> str:
    """Escape what would end a table's cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def make_table(head: list[str], rows: list[list[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *[[cell(c) for c in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def type_name(annotation: Any) -> str:
    """Write a type as people do."""
    origin, given = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{v}`" for v in given)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in given)
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        inner = [type_name(a) for a in given if a is not Ellipsis]
        return f"{name} of {', '.join(inner)}" if inner else name
    if annotation is type(None):
        return "none"
    words = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}
    name = getattr(annotation, "__name__", str(annotation))
    return words.get(name, name)


# -- analyses -----------------------------------------------------------------------------------


def built_in() -> list[Plugin]:
    """Return the analyses that come with attnlens."""
    return [p for p in discover() if p.distribution == "attnlens"]


def markdown(docstring: str | None) -> str:
    """Turn a docstring's double backticks and roles into Markdown."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def describe(kind: type[attnlens.Analysis], name: str) -> str:
    """Return what the class says of itself, and what it reads."""
    title, _, rest = markdown(kind.__doc__).partition("\n")
    reads = ", ".join(f"`{n}`" for n in kind().requires)
    return f"*{title.strip()}*\n\n{rest.strip()}\n\nIt reads, with its default options: {reads}.\n"


def options(kind: type[attnlens.Analysis], name: str) -> str:
    """Return the table of options."""
    rows: list[list[object]] = []
    for field, info in kind.Options.model_fields.items():
        default = "required" if info.is_required() else info.get_default(call_default_factory=True)
        rows.append(
            [
                f"`{name}.{field}`",
                type_name(info.annotation),
                f"`{default}`",
                info.description or "",
            ]
        )
    if not rows:
        return "It has no options.\n"
    return make_table(["option", "type", "default", "what"], rows)


def shows(kind: type[attnlens.Analysis], name: str) -> str:
    """Return the table of figures, tables and highlighted texts."""
    rows: list[list[object]] = [
        [f"`{d.name}`", what, d.title]
        for what in ("figure", "table", "highlight")
        for d in kind.drawings(what)
    ]
    return make_table(["name", "kind", "title"], rows)


BLOCKS: dict[str, Callable[[type[attnlens.Analysis], str], str]] = {
    "description": describe,
    "options": options,
    "shows": shows,
}


def skeleton(name: str) -> str:
    """Return the page of an analysis of which nothing has been written by hand."""
    parts = [f"# {name}\n"]
    for title, block in (("", "description"), ("What it shows", "shows"), ("Options", "options")):
        parts.append(
            (f"## {title}\n\n" if title else "") + f"<!-- generated: {block} -->\n<!-- end -->\n"
        )
    return "\n".join(parts)


def filled(text: str, make: Callable[[str], str]) -> str:
    """Return a page with its generated blocks filled in."""
    return re.sub(
        r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda m: m[1] + make(m[2]) + m[3],
        text,
        flags=re.DOTALL,
    )


# -- activations and the store ------------------------------------------------------------------


def activations(_: str = "") -> str:
    """Return the page of activations and statistics."""
    rows: list[list[object]] = []
    for one in ACTIVATIONS.values():
        hook = (
            f"`{one.hook}`" if one.hook else f"from {', '.join(f'`{d}`' for d in one.derived_from)}"
        )
        rows.append([f"`{one.name}`", ", ".join(one.dims), hook, one.dtype, one.what])
    statistics: list[list[object]] = [
        [f"`{s.name}`", ", ".join(s.dims), f"`{s.of}`", markdown(s.__doc__).partition("\n\n")[0]]
        for s in STATISTICS.values()
    ]
    return (
        make_table(["activation", "dimensions", "hook point", "stored as", "what"], rows)
        + "\n## Statistics\n\nAccumulated in float64 while the model runs; nothing raw is kept for "
        "them. Partial sums are stored for each unit and merged on reading.\n\n"
        + make_table(["statistic", "dimensions", "of", "what"], statistics)
    )


def manifest(_: str = "") -> str:
    """Return the tables of the manifest's fields."""
    parts = []
    for model in (schema.Manifest, schema.PromptsSpec, schema.ActivationSpec, schema.UnitSpec):
        said = attributes(model)
        rows: list[list[object]] = []
        for name, info in model.model_fields.items():
            kind, what = said.get(name, (type_name(info.annotation), ""))
            rows.append([f"`{info.alias or name}`", kind, what])
        title = markdown(model.__doc__).partition("\n")[0]
        parts.append(
            f"**`{model.__name__}`**: {title}\n\n" + make_table(["field", "type", "what"], rows)
        )
    return "\n".join(parts)


def attributes(kind: type) -> dict[str, tuple[str, str]]:
    """Read the Attributes section of a numpydoc docstring: name to type and description."""
    text = markdown(kind.__doc__).partition("Attributes\n----------\n")[2]
    found: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for line in text.splitlines():
        head = re.fullmatch(r"([\w, ]+) : (.+)|(\w+)", line)
        if head and not line.startswith(" "):
            names = [n.strip() for n in (head[1] or head[3]).split(",")]
            found |= {n: ((head[2] or "").strip(), "") for n in names}
        elif line.startswith("    "):
            for name in names:
                kind_, what = found[name]
                found[name] = (kind_, f"{what} {line.strip()}".strip())
    return found


# -- the command line ---------------------------------------------------------------------------


def command_line() -> str:
    """Return the page of the command line."""
    root = typer.main.get_command(app)
    parts = [
        "# The command line\n",
        "Exit codes: 0 all well; 1 something failed (an analysis, or the model could not be had); "
        "2 a mistake on the command line; 130 interrupted.\n",
    ]
    for path, command in commands(root, ()):
        parts.append(of_command(("attnlens", *path), command))
    return "\n".join(parts)


def commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its path."""
    for name, command in group.commands.items():
        here = (*path, name)
        yield here, command
        if hasattr(command, "commands"):
            yield from commands(command, here)


def of_command(path: tuple[str, ...], command: Any) -> str:
    """Return one command's section: what it does, its arguments and options."""
    given = [p for p in command.params if p.param_type_name == "argument"]
    chosen = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join([*path, *(argument_name(p) for p in given)])
    text = inspect.cleandoc(command.help or command.callback.__doc__ or "")
    prose, examples = [], []
    for paragraph in text.split("\n\n"):
        (examples if paragraph.strip().startswith("attnlens ") else prose).append(paragraph)
    if examples:  # which "For example:" announces
        prose = [p for p in prose if p.strip() != "For example:"]
    parts = [f"## {' '.join(path)}\n", f"`{usage}{' [OPTIONS]' if chosen else ''}`\n"]
    parts += [" ".join(p.split()) + "\n" for p in prose]
    if examples:
        parts.append("```sh\n" + "\n".join(e.strip() for e in examples) + "\n```\n")
    rows: list[list[object]] = [
        [f"`{argument_name(p)}`", getattr(p, "help", None) or ""] for p in given
    ]
    for option in chosen:
        names = ", ".join(f"`{o}`" for o in [*option.opts, *option.secondary_opts])
        if option.metavar:
            names += f" `{option.metavar}`"
        elif not option.is_flag:
            names += f" `{placeholder(command, option.name)}`"
        rows.append([names, option.help or ""])
    if rows:
        parts.append(make_table(["argument or option", "what"], rows))
    return "\n".join(parts)


def placeholder(command: Any, name: str) -> str:
    """Return what stands for an option's value, by the type of the function's argument."""
    annotation = typing.get_type_hints(inspect.unwrap(command.callback)).get(name)
    kinds = [a for a in typing.get_args(annotation) if a is not type(None)] or [annotation]
    kind = (
        (typing.get_args(kinds[0]) or kinds)[0] if typing.get_origin(kinds[0]) is list else kinds[0]
    )
    if typing.get_origin(kind) is typing.Literal:
        return "/".join(map(str, typing.get_args(kind)))
    words = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "Path": "PATH"}
    return words.get(getattr(kind, "__name__", ""), name.upper())


def argument_name(param: Any) -> str:
    """Return what the usage line calls an argument."""
    return str(param.metavar or param.name.upper())


# -- the reference ------------------------------------------------------------------------------


def public(module: str) -> list[str]:
    """Return a module's public names: its ``__all__``, or what it defines itself."""
    loaded = importlib.import_module(module)
    named = getattr(loaded, "__all__", None)
    if named is None:
        named = [
            n
            for n, v in vars(loaded).items()
            if not n.startswith("_")
            and (getattr(v, "__module__", None) == module or n in comments(module))
            and not isinstance(v, types.ModuleType)
        ]
    return sorted(named, key=lambda n: (n.lower(), n))


def comments(module: str) -> dict[str, str]:
    """Return the ``#:`` comments above a module's assignments."""
    source = inspect.getsource(importlib.import_module(module)).splitlines()
    found = {}
    for node in ast.parse("\n".join(source)).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            lines: list[str] = []
            at = node.lineno - 2
            while at >= 0 and source[at].startswith("#:"):
                lines.insert(0, source[at][2:].strip())
                at -= 1
            if isinstance(target, ast.Name) and lines:
                found[target.id] = " ".join(lines)
    return found


def home(module: str, name: str) -> tuple[str, str]:
    """Return where a public name is defined (dotted path), and its comment if it is a constant."""
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    defined = getattr(value, "__module__", None)
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{defined}.{value.__qualname__}", ""
    for place in [module, *submodules(module)]:
        said = comments(place)
        if name in said:
            return f"{place}.{name}", said[name]
    path = f"{module}.{name}"
    return path, CONSTANTS.get(path, "")


def submodules(module: str) -> list[str]:
    """Return a package's own modules."""
    loaded = importlib.import_module(module)
    if module == "attnlens":
        return [f"attnlens.{m}" for m in ("hookspecs", "analysis")]
    return [
        f"{module}.{p.stem}"
        for folder in getattr(loaded, "__path__", [])
        for p in sorted(Path(folder).glob("*.py"))
        if p.stem != "__init__"
    ]


def reference(module: str, what: str) -> str:
    """Return the page of one module."""
    parts = [f"# {module}\n", what + "\n", UNBUILT]
    for name in public(module):
        path, comment = home(module, name)
        owner = owner_of(path, name)
        if path in API:
            parts.append(f"## {name}\n\nA module: see [{path}]({page_of(path)}).\n")
        elif owner != module:
            parts.append(f"## {name}\n\nSee [{owner}.{name}]({page_of(owner)}#{path}).\n")
        elif comment:
            parts.append(f"## {name} {{ #{path} }}\n\n`{module}.{name}`\n\n{markdown(comment)}\n")
        else:
            parts.append(f"::: {path}\n")
    return "\n".join(parts)


def owner_of(path: str, name: str) -> str:
    """Return the module whose page shows what is defined at `path`: the most specific one."""
    owners = [m for m in API if path.startswith(f"{m}.") and name in public(m)]
    return max(owners, key=len)


def page_of(module: str) -> str:
    """Return the file of a module's page."""
    return f"{module.removeprefix('attnlens.') if module != 'attnlens' else 'index'}.md"


# -- everything ---------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Return every page that is generated, or has generated parts, with its text."""
    found = {
        DOCS / "reference" / "command-line.md": NOTE + command_line(),
        **{
            DOCS / "reference" / "api" / page_of(module): NOTE + reference(module, what)
            for module, what in API.items()
        },
    }
    single = {"activations": activations, "manifest": manifest}
    for file in [DOCS / "reference" / "activations.md", DOCS / "reference" / "store.md"]:
        found[file] = filled(file.read_text(encoding="utf-8"), lambda what: single[what]())
    for plugin in built_in():
        file = DOCS / "analyses" / f"{plugin.name}.md"
        text = file.read_text(encoding="utf-8") if file.exists() else skeleton(plugin.name)
        kind = load_analysis(plugin)

        def block(what: str, kind: type = kind, name: str = plugin.name) -> str:
            return BLOCKS[what](kind, name)

        found[file] = filled(text, block)
    return found


def main() -> int:
    """Write the pages, or with ``--check`` list those that are out of date."""
    stale = []
    for file, text in pages().items():
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(file)
        if "--check" not in sys.argv:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    for file in stale:
        sys.stdout.write(f"{file.relative_to(DOCS.parent)}\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
