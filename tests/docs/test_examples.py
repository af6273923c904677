"""Every example of the documentation and of the README runs; every command exists."""

from __future__ import annotations

import inspect
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlens

from .conftest import PAGES, ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRITTEN = [*PAGES, ROOT / "README.md", *ROOT.glob("examples/*/README.md"), ROOT / "CONTRIBUTING.md"]


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text("utf-8")) if kind == language]


def identify(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=identify)
def test_the_examples_of_a_page_run_in_order(page: Path, small: None) -> None:
    namespace: dict[str, Any] = {"__name__": "example", "attnlens": attnlens}
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{identify(page)}, block {number}", "exec"), namespace)


def test_the_examples_of_the_readme_run(small: None) -> None:
    pattern = np.tril(np.ones((1, 1, 2, 6, 6)))
    names = {"my_array": pattern / pattern.sum(-1, keepdims=True)}
    import pandas as pd
    import xarray as xr

    namespace = {"__name__": "example", "attnlens": attnlens, "xr": xr, "pd": pd, **names}
    for number, code in enumerate(blocks(ROOT / "README.md", "python"), 1):
        exec(compile(code, f"README.md, block {number}", "exec"), namespace)


def commands(page: Path) -> list[list[str]]:
    """Return the attnlens commands in a page's shell blocks, as words."""
    found = []
    for code in blocks(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["attnlens"]:
                found.append(words[1:])
    return found


@pytest.mark.parametrize("page", WRITTEN, ids=identify)
def test_every_command_and_its_options_exist(page: Path) -> None:
    import typer.main

    from attnlens.cli import app

    for words in commands(page):
        command: Any = typer.main.get_command(app)
        rest = list(words)
        while hasattr(command, "commands") and rest and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        assert command.name in words, f"there is no command in: attnlens {shlex.join(words)}"
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        used = [w.partition("=")[0] for w in rest if re.match(r"--?[a-z]", w)]
        assert set(used) <= known, f"unknown option in: attnlens {shlex.join(words)}"


def test_plugins_named_in_commands_exist(generate: Any) -> None:
    known = {p.name for p in generate.built_in()} | {"distance", "head-distance", "tensorboard"}
    for page in WRITTEN:
        for words in commands(page):
            for flag, value in itertools.pairwise(words):
                if flag in ("--plugins", "-p"):
                    assert set(value.split(",")) <= known, shlex.join(words)
                if flag in ("-o", "--option"):
                    plugin, _, option = value.partition("=")[0].partition(".")
                    kind = _options(plugin, generate)
                    assert kind is None or option in kind, shlex.join(words)


def _options(name: str, generate: Any) -> set[str] | None:
    for plugin in generate.built_in():
        if plugin.name == name:
            return set(generate.load_analysis(plugin).Options.model_fields)
    return None


def test_the_docstring_of_the_package_is_the_readme_s_example() -> None:
    assert "attnlens.run(" in inspect.getdoc(attnlens)
