"""Options: read from strings, refused before anything runs."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

import attnlens
from attnlens.errors import OptionError
from attnlens.selection import read_assignments, read_config


class Sized(attnlens.Options):
    rank: int | Literal["auto"] = Field("auto", description="How many components.")
    share: float = Field(0.9, gt=0, lt=1)
    names: tuple[str, ...] = ()
    numbers: list[int] = []
    flag: bool = False
    note: str = ""


@pytest.mark.parametrize(
    ("given_value", "field", "expected"),
    [
        ("8", "rank", 8),
        ("auto", "rank", "auto"),
        ("0.5", "share", 0.5),
        ("a,b", "names", ("a", "b")),
        ("a", "names", ("a",)),
        ("1,2,3", "numbers", [1, 2, 3]),
        ("[4, 5]", "numbers", [4, 5]),
        ("true", "flag", True),
        ("yes", "flag", True),
        ("0", "flag", False),
        ("8", "note", "8"),
    ],
)
def test_strings_are_read_as_the_field_wants_them(
    given_value: str, field: str, expected: object
) -> None:
    assert getattr(Sized.read({field: given_value}), field) == expected


@given(st.integers(), st.floats(0.01, 0.99), st.booleans())
def test_typed_values_survive_a_round_trip_as_strings(rank: int, share: float, flag: bool) -> None:
    before = Sized(rank=rank, share=share, flag=flag)
    after = Sized.read({"rank": str(rank), "share": repr(share), "flag": str(flag).lower()})
    assert after == before


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"cp\.rnak") as caught:
        Sized.read({"rnak": "3"}, prefix="cp")
    assert "'rank'" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", ["many", "1.5", "[]"])
def test_a_bad_value_is_refused_with_what_the_option_is(value: str) -> None:
    with pytest.raises(OptionError) as caught:
        Sized.read({"rank": value}, prefix="cp")
    assert value in str(caught.value)
    assert "How many components." in str(caught.value)


def test_bounds_are_kept() -> None:
    with pytest.raises(OptionError, match=r"share"):
        Sized.read({"share": "1.5"})


class Worded(attnlens.Options):
    flag: bool = False
    count: int = 1
    rank: int | Literal["auto"] = "auto"
    share: float = Field(0.5, gt=0, le=1)
    mode: Literal["fast", "exact"] = "fast"
    numbers: tuple[int, ...] = ()
    pair: tuple[int, ...] = Field((1, 2), min_length=2)
    word: str = Field("a", pattern="^[a-z]+$")
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("flag", "maybe", "write true or false"),
        ("flag", 7, "write true or false"),
        ("count", "many", "write a whole number"),
        ("count", 1.5, "write a whole number"),
        ("rank", "many", "write a whole number or 'auto'"),
        ("share", "half", "write a number"),
        ("share", "0", "write a number above 0.0"),
        ("share", "1.5", "write a number of at most 1.0"),
        ("mode", "slow", "write 'fast' or 'exact'"),
        ("numbers", "1,b,c", "write a whole number"),
        ("numbers", 3, "write values separated by commas"),
        ("pair", "1", "write 2 values or more"),
        ("word", "A", "write text of the form ^[a-z]+$"),
        ("word", 3, "write text"),
        ("even", "3", "3 is odd"),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(name: str, value: object, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        Worded.read({name: value}, prefix="one")
    assert str(caught.value).splitlines()[0] == f"one.{name}={value!r} is not valid: {said}."


def test_assignments_name_plugin_option_and_value() -> None:
    read = read_assignments(["cp.rank=8", "cp.note=a=b", "dist:cp.rank=2"])
    assert read == {"cp": {"rank": "8", "note": "a=b"}, "dist:cp": {"rank": "2"}}
    for wrong in ("cp.rank", "rank=8", "=8", "cp.=8"):
        with pytest.raises(OptionError, match=r"PLUGIN\.OPTION=VALUE"):
            read_assignments([wrong])


def test_a_configuration_file_has_a_table_for_each_analysis(tmp_path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("[cp]\nrank = 3\n")
    assert read_config(file) == {"cp": {"rank": 3}}
    file.write_text("rank = 3\n")
    with pytest.raises(OptionError, match="outside a table"):
        read_config(file)
    file.write_text("[cp\n")
    with pytest.raises(OptionError, match="not valid TOML"):
        read_config(file)
    with pytest.raises(OptionError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_a_finding_shows_itself_escaped_in_a_notebook() -> None:
    finding = attnlens.Finding(claim="x", holds=True, text="<script>alert(1)</script>")
    assert "<script>" not in finding._repr_html_()
    assert "✓" in finding._repr_html_()
    assert "<table" not in finding._repr_html_()


def test_a_finding_shows_its_numbers_beside_those_of_chance() -> None:
    finding = attnlens.Finding(
        claim="x", holds=True, text="t", evidence={"mean_share": 0.51234567, "heads": ["0.1<"]},
        null={"mean_share": 1.5e-7},
    )  # fmt: skip
    shown = finding._repr_html_()
    assert "<th scope='row'>mean share</th><td>0.5123</td><td>1.5\u00a0×\u00a010⁻⁷</td>" in shown
    assert "<th scope='row'>heads</th><td>0.1&lt;</td><td>–</td>" in shown
