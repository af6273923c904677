"""Interrupts, kills and full disks: what is there is whole, and resuming gives the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens.corpora import as_corpus, load_prompts
from attnlens.errors import IncompleteStoreError, OutputError, StoreError
from attnlens.models import Model, load_model
from attnlens.needs import Request
from attnlens.plan import make_plan
from attnlens.recorder import capture, record, twin_seed
from attnlens.store import Store, open_store

OPTIONS: dict[str, Any] = {
    "activations": ["pattern", "z"],
    "statistics": ["pattern.received", "z.second_moment"],
    "batch_size": 2,
}


def many() -> np.ndarray:
    # Four units: a unit is 16 batches.
    return np.random.default_rng(2).integers(1, 50, size=(128, 6))


def contents(store: Path) -> dict[str, str]:
    """Hash every file; of the manifests, all but when they were made and by which command."""
    found = {}
    for file in sorted(p for p in store.rglob("*") if p.is_file()):
        data = file.read_bytes()
        if file.name == "manifest.json":
            manifest = json.loads(data)
            # The checksum is of all the rest, these two included.
            manifest["created"] = manifest["command"] = manifest["checksum"] = None
            data = json.dumps(manifest).encode()
        found[str(file.relative_to(store))] = hashlib.sha256(data).hexdigest()
    return found


@contextlib.contextmanager
def at_pass(model: Model, number: int, act: Callable[[], Any]) -> Iterator[None]:
    """Do something in the middle of a forward pass."""
    passes = 0

    def hook(value: Any, hook: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == number:
            act()

    with model.hooks([("blocks.1.attn.hook_q", hook)]):
        yield


def test_an_interrupt_leaves_whole_units_and_resuming_finishes_to_the_same_bytes(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    capture(model, many(), out=tmp_path / "whole.attn", **OPTIONS)
    path = tmp_path / "s.attn"
    # Ctrl-C in the second of four units.
    with (
        pytest.raises(KeyboardInterrupt),
        at_pass(model, 20, lambda: signal.raise_signal(signal.SIGINT)),
    ):
        capture(model, many(), out=path, **OPTIONS)
    assert [p.name for p in (path / "units").iterdir()] == ["000000"]
    with pytest.raises(IncompleteStoreError, match="1 of 4"):
        open_store(path)
    with pytest.raises(OutputError, match="already"):
        capture(model, many(), out=path, **OPTIONS)
    capture(model, many(), out=path, resume=True, **OPTIONS)
    assert contents(path) == contents(tmp_path / "whole.attn")


def test_a_kill_leaves_whole_units_and_resuming_finishes_to_the_same_bytes(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    np.save(tmp_path / "ids.npy", many())
    script = f"""
        import os, signal, sys
        from pathlib import Path
        import numpy as np
        from attnlens.models import load_model
        from attnlens.recorder import capture

        model = load_model({str(folder("gpt2"))!r})
        passes = 0

        def kill(value, hook):
            global passes
            passes += 1
            if passes == 40:
                os.kill(os.getpid(), signal.SIGKILL)

        model.bridge.add_hook("blocks.1.attn.hook_q", kill)
        capture(model, np.load({str(tmp_path / "ids.npy")!r}), out={str(tmp_path / "s.attn")!r},
                **{OPTIONS!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -signal.SIGKILL
    left = sorted(p.name for p in (tmp_path / "s.attn" / "units").iterdir())
    assert [name for name in left if not name.startswith(".")] == ["000000", "000001"]
    model = load_model(folder("gpt2"))
    capture(model, many(), out=tmp_path / "s.attn", resume=True, **OPTIONS)
    capture(model, many(), out=tmp_path / "whole.attn", **OPTIONS)
    assert contents(tmp_path / "s.attn") == contents(tmp_path / "whole.attn")


def test_resuming_with_other_settings_is_refused(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    path = tmp_path / "s.attn"
    with pytest.raises(KeyboardInterrupt), at_pass(model, 20, _interrupt):
        capture(model, many(), out=path, **OPTIONS)
    with pytest.raises(StoreError, match="batch_size was 2, now 4"):
        capture(model, many(), out=path, resume=True, **(OPTIONS | {"batch_size": 4}))


def test_resuming_after_float32_was_chosen_keeps_it(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    model.bridge.add_hook("blocks.0.attn.hook_z", lambda z, hook: z * 1e7)
    capture(model, many(), out=tmp_path / "whole.attn", **OPTIONS)
    path = tmp_path / "s.attn"
    with pytest.raises(KeyboardInterrupt), at_pass(model, 30, _interrupt):
        capture(model, many(), out=path, **OPTIONS)
    assert (path / "units" / "000000").exists()
    store = capture(model, many(), out=path, resume=True, **OPTIONS)
    assert store.manifest.activations["z"].dtype == "float32"
    assert contents(path) == contents(tmp_path / "whole.attn")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _everything(model: Model, out: Path, **options: Any) -> Store:
    """A run with another corpus and two twins."""
    own = load_prompts(as_corpus(many()), tokenizer=None, facts=model.facts)
    other = load_prompts(
        as_corpus("repeated-random", samples=4, length=8), tokenizer=None, facts=model.facts
    )
    prompts = {"": own, "repeated-random": other}
    wanted = {
        "": Request({"z"}, {"pattern.entropy"}),
        "repeated-random": Request(statistics={"pattern.by_offset"}),
    }
    plan = make_plan(model.facts, prompts, wanted, wanted, n_twins=2, batch_size=8)
    return record(plan, model, prompts, out, seed=5, **options)


def test_corpora_and_twins_lie_inside_the_store(
    folder: Callable[..., Path], tmp_path: Path, everything: dict[str, str]
) -> None:
    model = load_model(folder("llama"))
    store = _everything(model, tmp_path / "s.attn")
    assert [t.path.name for t in store.twins if t.path] == ["000", "001"]
    for part in (store, *store.twins):
        assert part["z"].shape == (128, 2, 6, 4, 4)
        assert part.corpus("repeated-random")["pattern.by_offset"].sizes["offset"] == 8
        np.testing.assert_array_equal(part.tokens, store.tokens)
    one, two = store.twins
    assert not np.allclose(one["z"], two["z"])
    assert one.manifest.model["weights_hash"] == model.twin(twin_seed(5, 0)).facts.weights_hash
    assert contents(tmp_path / "s.attn") == everything


@pytest.fixture(scope="module")
def everything(
    folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What an uninterrupted run of `_everything` leaves."""
    out = tmp_path_factory.mktemp("whole") / "s.attn"
    _everything(load_model(folder("llama")), out)
    return contents(out)


# 16 batches of the run's own corpus, 1 of the other, then the same of each twin.
@pytest.mark.parametrize("number", [17, 20, 51])
def test_twins_and_corpora_resume_to_the_same_bytes(
    number: int,
    folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    everything: dict[str, str],
) -> None:
    model = load_model(folder("llama"))
    real, passes = Model.forward, 0

    def forward(self: Model, tokens: Any) -> Any:
        nonlocal passes
        # The twins' own probes run the model too; they are not passes of the capture.
        if len(tokens) > 2:
            passes += 1
            if passes == number:
                raise KeyboardInterrupt
        return real(self, tokens)

    monkeypatch.setattr(Model, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        _everything(model, tmp_path / "s.attn")
    monkeypatch.undo()
    with pytest.raises(StoreError):
        open_store(tmp_path / "s.attn")
    _everything(model, tmp_path / "s.attn", resume=True)
    assert contents(tmp_path / "s.attn") == everything


def test_a_full_disk_is_one_clear_message_and_no_short_file(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    path = tmp_path / "s.attn"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = OPTIONS | {"dtypes": {"z": "float32"}}
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot be written: File too large"):
            capture(model, many(), out=path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((path / "units").iterdir()) == []
    capture(model, many(), out=path, resume=True, **options)
    capture(model, many(), out=tmp_path / "whole.attn", **options)
    assert contents(path) == contents(tmp_path / "whole.attn")


def test_a_store_that_is_there_is_kept_unless_told_otherwise(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    capture(model, tokens, out=tmp_path / "s.attn")
    before = contents(tmp_path / "s.attn")
    with pytest.raises(OutputError):
        capture(model, tokens, activations=["z"], out=tmp_path / "s.attn")
    assert contents(tmp_path / "s.attn") == before
    # Resuming what is finished changes nothing.
    capture(model, tokens, out=tmp_path / "s.attn", resume=True)
    assert contents(tmp_path / "s.attn") == before
    capture(model, tokens, activations=["z"], out=tmp_path / "s.attn", overwrite=True)
    assert "pattern" not in open_store(tmp_path / "s.attn")
