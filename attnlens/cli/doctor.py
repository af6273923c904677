"""``attnlens doctor``: what works here, and what to do about what does not."""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Literal

import typer

from attnlens.cli import console, options

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at.

    Attributes
    ----------
    what : str
    state : {"ok", "note", "problem"}
        A note limits what can be done; a problem stops it.
    text : str
        What was seen.
    advice : str
        What to do about it.
    """

    what: str
    state: State
    text: str
    advice: str = ""


@console.guarded
def command(debug: options.Debug = False) -> None:
    """Look at versions, devices, folders, the hub and plugins, and run a self-test.

    Exit code 1 if something stops attnlens from working.
    """
    found = list(diagnose())
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    console.print_table(["", "what", "seen"], [[marks[d.state], d.what, d.text] for d in found])
    for one in found:
        if one.advice:
            typer.echo(f"\n{one.what}: {one.advice}")
    if any(d.state == "problem" for d in found):
        raise typer.Exit(1)


def diagnose() -> Iterator[Diagnosis]:
    """Look at everything, each apart from the others."""
    # Whatever else loads matplotlib, it is heard first.
    looks = (
        _python, _figures, _versions, _devices, _memory, _folders, _hub, _plugins, _self_test,
    )  # fmt: skip
    for look in looks:
        try:
            yield from look()
        except Exception as error:
            yield Diagnosis(look.__name__.strip("_"), "problem", f"{type(error).__name__}: {error}")


def _python() -> Iterator[Diagnosis]:
    fits = sys.version_info[:2] >= (3, 11)
    yield Diagnosis(
        "Python",
        "ok" if fits else "problem",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "" if fits else "attnlens needs Python 3.11 or newer.",
    )


def _figures() -> Iterator[Diagnosis]:
    """Hear what matplotlib says of its folder, which it would write past this table."""
    log, heard = logging.getLogger("matplotlib"), BufferingHandler(capacity=100)
    log.addHandler(heard)
    try:
        import matplotlib

        folder = matplotlib.get_configdir()
        matplotlib.get_cachedir()
    finally:
        log.removeHandler(heard)
    if heard.buffer:
        wanted = os.environ.get("MPLCONFIGDIR") or "matplotlib's folder"
        yield Diagnosis(
            "figures", "note", f"{wanted} cannot be written; {folder} serves for now",
            "Set MPLCONFIGDIR to a writable folder: matplotlib lists the fonts anew each time.",
        )  # fmt: skip
    else:
        yield Diagnosis("figures", "ok", f"matplotlib keeps its fonts in {folder}")


def _versions() -> Iterator[Diagnosis]:
    from attnlens.runner import versions

    for name, version in versions().items():
        if name != "python":
            yield Diagnosis(name, "ok", version)


def _devices() -> Iterator[Diagnosis]:
    import torch

    names = [f"cpu ({torch.get_num_threads()} threads)"]
    names += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    yield Diagnosis("devices", "ok", ", ".join(names))


def _memory() -> Iterator[Diagnosis]:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    little = free < 2
    yield Diagnosis(
        "memory",
        "note" if little else "ok",
        f"{free:.1f} GiB free",
        "Close other programs, or use fewer and shorter prompts." if little else "",
    )


def _folders() -> Iterator[Diagnosis]:
    places = {"this folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    for what, place in places.items():
        reason = _unwritable(place)
        if reason:
            advice = "Use --out." if what == "this folder" else "Set TMPDIR to a writable folder."
            yield Diagnosis(what, "problem", f"{place}: {reason}", advice)
        else:
            yield Diagnosis(what, "ok", f"{place} can be written")


def _unwritable(folder: Path) -> str:
    """Say why nothing can be written in a folder, which need not be there yet; "" if it can."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _hub() -> Iterator[Diagnosis]:
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    reason = _unwritable(cache)
    yield Diagnosis(
        "hub cache",
        "note" if reason else "ok",
        f"{cache}: {models} models" + (f"; it cannot be written: {reason}" if reason else ""),
        "No model can be downloaded: set HF_HOME to a writable folder." if reason else "",
    )
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE"):
        yield Diagnosis(
            "hub", "note", "offline by HF_HUB_OFFLINE",
            "Models in the cache and in folders can be used; unset it to download others.",
        )  # fmt: skip
        return
    try:
        import httpx

        answer = httpx.head(constants.ENDPOINT, timeout=3.0, follow_redirects=True)
        reached = answer.status_code < 500
        text = f"reached, {'logged in' if get_token() else 'not logged in'}"
    except Exception as error:
        reached, text = False, f"not reached ({type(error).__name__})"
    yield Diagnosis(
        "hub",
        "ok" if reached else "note",
        text,
        ""
        if reached
        else "Models in the cache and in folders can be used. For the hub, look at "
        "the network and the proxy settings.",
    )


def _plugins() -> Iterator[Diagnosis]:
    from attnlens.errors import AttnlensError
    from attnlens.hookspecs import ANALYSES, OBSERVERS
    from attnlens.plugins import discover, enabled, load_analysis, load_observer

    loaders: dict[str, Callable[..., object]] = {
        ANALYSES: load_analysis,
        OBSERVERS: load_observer,
    }
    for group, load in loaders.items():
        for plugin in enabled(discover(group)):
            try:
                load(plugin)
            except AttnlensError as error:
                yield Diagnosis(f"plugin {plugin.name}", "note", error.message, error.hint or "")
            else:
                yield Diagnosis(f"plugin {plugin.name}", "ok", plugin.distribution)


def _self_test() -> Iterator[Diagnosis]:
    """Capture from the bundled model and compare with what its patterns must be."""
    import numpy as np

    from attnlens.recorder import capture

    store = capture(
        "demo", np.arange(1, 9)[None], activations=["pattern"], statistics=["pattern.entropy"]
    )
    rows = store["pattern"].sum("key_pos").values
    fits = bool(np.allclose(rows, 1.0, atol=2e-3)) and bool((store["pattern.entropy"] > 0).all())
    yield Diagnosis(
        "self-test",
        "ok" if fits else "problem",
        "captured the demo model; rows of attention sum to 1"
        if fits
        else "rows of the demo model's attention do not sum to 1",
        "" if fits else "Reinstall attnlens and torch.",
    )
