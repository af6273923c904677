"""What an analysis sees of a store: what it declared, and what the documentation names."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest

import attnlens.view
from attnlens.errors import UndeclaredNeedError
from attnlens.needs import Need
from attnlens.testing import make_store
from attnlens.view import UnitView, View


def view(*requires: str, **shape) -> View:
    return View(make_store(**shape), [Need.parse(text) for text in requires], analysis="one")


def test_a_unit_shows_what_was_declared_and_no_more() -> None:
    whole = make_store(lengths=[3, 12, 3, 5])
    units = list(view("z", lengths=[3, 12, 3, 5]).units())
    assert sorted(unit.length for unit in units) == [3, 5, 12]
    for unit in units:
        assert unit.tokens.dims == ("prompt", "pos")
        np.testing.assert_array_equal(unit.tokens["prompt"], unit.prompt_ids)
        np.testing.assert_array_equal(
            unit.tokens, whole.tokens.sel(prompt=unit.prompt_ids).isel(pos=slice(unit.length))
        )
        assert "z" in unit
        assert "pattern" not in unit
        with pytest.raises(UndeclaredNeedError, match="'pattern'"):
            unit["pattern"]
        for way_round in ("lazy", "blocks", "state", "spec"):
            assert not hasattr(unit, way_round)


def test_there_are_no_twins_where_none_were_made() -> None:
    assert view("twin", twins=0).twins == []


def test_what_was_refused_is_remembered_over_twins_and_corpora() -> None:
    seen = view("pattern@repeated-random", "twin")
    for read in (
        lambda: seen["z"],
        lambda: seen.weights,
        lambda: seen.twins[0]["v"],
        lambda: seen.corpus("repeated-random")["q"],
        lambda: seen.corpus("repeated-random")["pattern"],
        lambda: "k" in seen,
    ):
        with contextlib.suppress(UndeclaredNeedError):
            read()
    assert seen.refused == ["z", "weights", "v", "q@repeated-random"]


@pytest.mark.parametrize("kind", [View, UnitView])
def test_all_that_is_public_is_described(kind: type) -> None:
    described = inspect.getdoc(kind) or ""
    for name in list(inspect.signature(kind).parameters):
        assert f"\n{name} : " in described, name
    for name, member in vars(kind).items():
        if not name.startswith("_"):
            assert inspect.getdoc(member), name
    assert "__getattr__" not in vars(kind)
    assert attnlens.view.__doc__
