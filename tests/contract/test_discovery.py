"""Plugins: found without being imported, loaded one by one, told apart by their distribution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnlens.errors import (
    BrokenPluginError,
    PluginConflictError,
    PluginVersionError,
    UnknownPluginError,
)
from attnlens.plugins import discover, enabled, find, load_analysis
from attnlens.selection import select

BROKEN = ["broken_import", "broken_syntax", "broken_exit", "misspelt"]


def test_discovery_imports_nothing(install) -> None:
    install("lookback", *BROKEN)
    names = {p.name for p in discover()}
    assert {"lookback", "broken-import", "broken-syntax", "broken-exit", "misspelt"} <= names
    assert {"cp", "spectrum"} <= names
    assert "attnlens_lookback" not in sys.modules


def test_a_good_plugin_loads_with_its_version(install) -> None:
    install("lookback")
    plugin = find("lookback", discover())
    assert (plugin.distribution, plugin.version) == ("attnlens-lookback", "1.2.0")
    assert load_analysis(plugin).name == "lookback"


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("broken_import", "broken-import", "ModuleNotFoundError"),
        ("broken_syntax", "broken-syntax", "SyntaxError"),
        ("broken_exit", "broken-exit", "SystemExit"),
        ("misspelt", "misspelt", "attnlens_register_analisys"),
    ],
)
def test_a_broken_plugin_is_named_with_its_package_and_the_reason(
    install, folder: str, name: str, said: str
) -> None:
    install(folder)
    with pytest.raises(BrokenPluginError) as caught:
        load_analysis(find(name, discover()))
    message = str(caught.value)
    assert said in message
    assert f"attnlens-{name}" in message


def test_broken_plugins_do_not_touch_the_one_that_was_chosen(install) -> None:
    install("lookback", *BROKEN, "too_new")
    (chosen,) = select(["lookback"])
    assert chosen.distribution == "attnlens-lookback"


def test_a_plugin_for_a_newer_interface_is_refused(install) -> None:
    install("too_new")
    with pytest.raises(PluginVersionError, match=r"version 99"):
        load_analysis(find("too-new", discover()))


def test_two_packages_with_one_name_are_both_named_and_can_be_told_apart(install) -> None:
    install("lookback", "clashing")
    with pytest.raises(PluginConflictError) as caught:
        find("lookback", discover())
    message = str(caught.value)
    assert "attnlens-lookback 1.2.0" in message
    assert "attnlens-clashing 9.0.0" in message
    (first,) = select(["attnlens-lookback:lookback"])
    (second,) = select(["attnlens-clashing:lookback"])
    assert type(first.analysis).__name__ == "LookBack"
    assert type(second.analysis).__name__ == "OtherLookBack"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownPluginError, match=r"spectrom") as caught:
        find("spectrom", discover())
    assert "'spectrum'" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "disabled", "left"),
    [
        (None, (), {"cp", "spectrum", "lookback"}),
        (None, ("lookback",), {"cp", "spectrum"}),
        ("lookback", (), {"lookback"}),
        ("-lookback", (), {"cp", "spectrum"}),
        ("attnlens-lookback:lookback", (), {"lookback"}),
        ("", (), set()),
    ],
)
def test_plugins_are_disabled_by_flag_and_by_environment(
    install, monkeypatch: pytest.MonkeyPatch, setting: str | None, disabled, left: set[str]
) -> None:
    install("lookback")
    if setting is None:
        monkeypatch.delenv("ATTNLENS_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("ATTNLENS_PLUGINS", setting)
    found = {p.name for p in enabled(discover(), disabled)}
    assert found & {"cp", "spectrum", "lookback"} == left


def test_a_disabled_plugin_is_said_to_be_disabled(install, monkeypatch) -> None:
    install("lookback")
    with pytest.raises(UnknownPluginError, match="disabled"):
        find("lookback", enabled(discover(), ["lookback"]))


def test_the_printed_plugin_installs_from_its_own_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    source = Path(__file__).parents[1] / "distributions" / "lookback"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--target", tmp_path, source],
        check=True,
        capture_output=True,
    )  # fmt: skip
    listed = subprocess.run(
        [sys.executable, "-m", "attnlens", "plugins"],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    ).stdout
    assert "attnlens-lookback" in listed
