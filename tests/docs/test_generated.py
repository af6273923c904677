"""What the code decides in the documentation is current, and complete."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest

import attnlens
from attnlens.activations import ACTIVATIONS
from attnlens.statistics import STATISTICS

from .conftest import DOCS

PUBLIC = [
    "attnlens", "attnlens.attention", "attnlens.decomposition", "attnlens.figures",
    "attnlens.store", "attnlens.testing",
]  # fmt: skip


def test_generated_pages_are_current(generate: Any) -> None:
    stale = [
        str(file.relative_to(DOCS.parent))
        for file, text in generate.pages().items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"out of date: {', '.join(stale)}; run: python docs/generate.py"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_docstring_and_a_place_in_the_reference(
    module: str, generate: Any
) -> None:
    page = (DOCS / "reference" / "api" / generate.page_of(module)).read_text()
    for name in importlib.import_module(module).__all__:
        value = getattr(importlib.import_module(module), name)
        path, comment = generate.home(module, name)
        if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
            assert (value.__doc__ or "").strip(), f"{module}.{name} has no docstring"
        else:
            assert comment, f"{module}.{name} has no #: comment"
        assert path in page, f"{module}.{name} is not in the reference"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_method_has_a_docstring(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if not inspect.isclass(value) or not value.__module__.startswith("attnlens"):
            continue
        for method, member in vars(value).items():
            if method.startswith("_") or not isinstance(
                member, (types.FunctionType, classmethod, staticmethod, property)
            ):
                continue
            assert inspect.getdoc(getattr(value, method)), f"{name}.{method} has no docstring"


def test_every_activation_and_statistic_is_listed() -> None:
    page = (DOCS / "reference" / "activations.md").read_text()
    for name in (*ACTIVATIONS, *STATISTICS):
        assert f"| `{name}` |" in page


def test_every_command_and_option_is_listed(generate: Any) -> None:
    page = (DOCS / "reference" / "command-line.md").read_text()
    for command in (
        "run",
        "capture",
        "analyze",
        "plot",
        "track",
        "compare",
        "doctor",
        "plugins new",
    ):
        assert f"## attnlens {command}\n" in page
    assert "`--plugins`, `-p` `A,B`" in page
    assert "`--seed` `NUMBER`" in page


def test_each_built_in_analysis_has_a_page_that_explains_its_figures(generate: Any) -> None:
    listed = (DOCS / "analyses" / "index.md").read_text()
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for plugin in generate.built_in():
        page = (DOCS / "analyses" / f"{plugin.name}.md").read_text()
        assert f"({plugin.name}.md)" in listed
        assert f"analyses/{plugin.name}.md" in navigation
        by_hand = generate.filled(page, lambda what: "")
        for drawing in generate.load_analysis(plugin).drawings("figure"):
            assert f"`{drawing.name}`" in by_hand, f"{plugin.name}.{drawing.name} is not explained"


def test_a_generated_block_is_filled_and_the_rest_is_left(generate: Any) -> None:
    page = "before\n<!-- generated: options -->\nold\n<!-- end -->\nafter\n"
    new = generate.filled(page, lambda what: f"new {what}\n")
    assert new == "before\n<!-- generated: options -->\nnew options\n<!-- end -->\nafter\n"


def test_types_are_written_for_people(generate: Any) -> None:
    from typing import Literal

    assert generate.type_name(int) == "whole number"
    assert generate.type_name(float | None) == "number or none"
    assert generate.type_name(bool | Literal["auto"]) == "true or false or `auto`"
    assert generate.type_name(tuple[str, ...]) == "tuple of text"


def test_reading_the_attributes_of_a_docstring(generate: Any) -> None:
    class Kind:
        """Title.

        Attributes
        ----------
        a, b : int
            Both of
            them.
        c : str
        """

    assert generate.attributes(Kind) == {
        "a": ("int", "Both of them."), "b": ("int", "Both of them."), "c": ("str", ""),
    }  # fmt: skip
    assert attnlens.__version__
