"""Writers that are interrupted, doubled, out of disk, or misused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from attnlens.errors import (
    IncompleteStoreError,
    OutputError,
    StoreError,
    StoreLockedError,
)
from attnlens.store import ActivationSpec, StoreWriter, open_store, verify

from .making import Recipe, files

RECIPE = Recipe(lengths=[5, 7, 5, 7, 7, 6, 6, 6, 6], statistics=["pattern.rows"])
#: Units small and many, so that a kill hits between them too.
PLAIN = Recipe(lengths=[9] * 24, unit_size=2, batch_size=1)


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin(folder: Path, recipe: Recipe, units: int) -> None:
    """Write some units and stop, as an interrupted capture does."""
    with StoreWriter.create(folder, recipe.manifest) as writer:
        for unit in writer.missing_units()[:units]:
            with writer.unit(unit) as out:
                recipe.fill(out)


# ---- committing and resuming -----------------------------------------------------------------


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_resumed_store_has_the_same_bytes(tmp_path: Path, done: int) -> None:
    recipe = Recipe(**{**vars(RECIPE), "weights": True, "vocabulary": ["a", "é"]})
    recipe.write(tmp_path / "straight.attn")
    begin(tmp_path / "broken.attn", recipe, done)
    with StoreWriter.resume(tmp_path / "broken.attn", recipe.manifest) as writer:
        assert len(writer.missing_units()) == len(recipe.manifest.units) - done
        recipe.finish(writer)
    assert files(tmp_path / "broken.attn") == files(tmp_path / "straight.attn")


def test_the_time_of_writing_changes_no_byte(tmp_path: Path) -> None:
    RECIPE.write(tmp_path / "a.attn")
    time.sleep(1.1)
    RECIPE.write(tmp_path / "elsewhere" / "b.attn")
    assert files(tmp_path / "a.attn") == files(tmp_path / "elsewhere" / "b.attn")


def test_resuming_begins_where_there_is_nothing(tmp_path: Path) -> None:
    with StoreWriter.resume(tmp_path / "x.attn", RECIPE.manifest) as writer:
        RECIPE.finish(writer)
    assert verify(tmp_path / "x.attn", deep=True) == []


def test_resuming_a_finished_store_changes_nothing(tmp_path: Path) -> None:
    RECIPE.write(tmp_path / "x.attn")
    before = files(tmp_path / "x.attn")
    with StoreWriter.resume(tmp_path / "x.attn", RECIPE.manifest) as writer:
        assert writer.missing_units() == []
        writer.seal()
    assert files(tmp_path / "x.attn") == before


def test_what_may_differ_when_resuming(tmp_path: Path) -> None:
    begin(tmp_path / "x.attn", RECIPE, 1)
    later = RECIPE.manifest.model_copy(update={"command": ["again"], "created": "tomorrow"})
    with StoreWriter.resume(tmp_path / "x.attn", later) as writer:
        assert writer.manifest.command == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 3}, "seed was 0, now 3"),
        ({"batch_size": 5}, "batch_size was 2, now 5"),
        ({"model": {"name": "other"}}, "model.name was None, now 'other'"),
        ({"statistics": []}, "statistics"),
        ({"versions": {"attnlens": "9"}}, "versions.attnlens was '0.1.0', now '9'"),
        ({"activations": {}}, "activations.pattern"),
    ],
)
def test_another_capture_is_not_resumed(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    begin(tmp_path / "x.attn", RECIPE, 1)
    before = files(tmp_path / "x.attn")
    with pytest.raises(StoreError) as caught:
        StoreWriter.resume(tmp_path / "x.attn", RECIPE.manifest.model_copy(update=change))
    assert named in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert files(tmp_path / "x.attn") == before
    # The lock is free again.
    StoreWriter.resume(tmp_path / "x.attn", RECIPE.manifest).close()


def test_a_failed_unit_leaves_nothing(tmp_path: Path) -> None:
    writer = StoreWriter.create(tmp_path / "x.attn", RECIPE.manifest)
    unit = writer.missing_units()[0]
    for error in (ValueError, KeyboardInterrupt, OSError):
        # What fails in the block passes as it is: it is not about writing.
        with pytest.raises(error), writer.unit(unit) as out:
            RECIPE.fill(out)
            raise error("stop")
        assert list((tmp_path / "x.attn/units").iterdir()) == []
    with writer.unit(unit) as out:
        RECIPE.fill(out)
    assert len(writer.missing_units()) == len(RECIPE.manifest.units) - 1
    writer.close()


def test_strays_are_swept(tmp_path: Path) -> None:
    begin(tmp_path / "x.attn", RECIPE, 1)
    stray = tmp_path / "x.attn/units/.writing-000001"
    stray.mkdir()
    (stray / "junk").write_text("half")
    with StoreWriter.resume(tmp_path / "x.attn", RECIPE.manifest) as writer:
        assert not stray.exists()
        RECIPE.finish(writer)
    RECIPE.write(tmp_path / "y.attn")
    assert files(tmp_path / "x.attn") == files(tmp_path / "y.attn")


WRITE = """
    import sys
    from pathlib import Path
    from attnlens.store import StoreWriter
    from tests.store.test_writing import PLAIN
    with StoreWriter.resume(Path(sys.argv[1]), PLAIN.manifest) as writer:
        print("writing", flush=True)
        PLAIN.finish(writer)
"""


def test_killed_writers_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    """Killed without warning at any moment, again and again (CASES F11, G03)."""
    folder = tmp_path / "x.attn"
    PLAIN.write(tmp_path / "straight.attn")
    rng = random.Random(0)
    for _ in range(3):
        process = python(WRITE, folder)
        assert process.stdout is not None
        if process.stdout.readline() == "writing\n":
            time.sleep(rng.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (folder / "manifest.json").exists():
            damage = [str(p) for p in verify(folder, deep=True) if "not finished" not in p.what]
            assert damage == []
            if verify(folder):
                with pytest.raises(IncompleteStoreError):
                    open_store(folder)
    with StoreWriter.resume(folder, PLAIN.manifest) as writer:
        PLAIN.finish(writer)
    assert files(folder) == files(tmp_path / "straight.attn")


# ---- two writers -----------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    """CASES G04: whichever way it tries, in this process or in another."""
    folder = tmp_path / "x.attn"
    writer = StoreWriter.create(folder, PLAIN.manifest)
    with pytest.raises(StoreLockedError, match="Another process"):
        StoreWriter.create(folder, PLAIN.manifest, overwrite=True)
    with pytest.raises(StoreLockedError):
        StoreWriter.resume(folder, PLAIN.manifest)
    process = python(WRITE, folder)
    _, errors = process.communicate()
    assert "StoreLockedError" in errors
    PLAIN.finish(writer)
    PLAIN.write(tmp_path / "y.attn")
    assert files(folder) == files(tmp_path / "y.attn")


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "x.attn"
    process = python(
        """
        import os, sys
        from pathlib import Path
        from attnlens.store import StoreWriter
        from tests.store.test_writing import PLAIN
        writer = StoreWriter.create(Path(sys.argv[1]), PLAIN.manifest)
        os.kill(os.getpid(), 9)
        """,
        folder,
    )
    process.communicate()
    StoreWriter.resume(folder, PLAIN.manifest).close()


# ---- places ----------------------------------------------------------------------------------


def test_an_existing_store_is_kept_unless_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "x.attn"
    RECIPE.write(folder)
    before = files(folder)
    with pytest.raises(OutputError, match="--overwrite"):
        StoreWriter.create(folder, PLAIN.manifest)
    assert files(folder) == before
    (folder / "twins/000").mkdir(parents=True)
    PLAIN.write(folder, overwrite=True)
    PLAIN.write(tmp_path / "y.attn")
    assert files(folder) == files(tmp_path / "y.attn")
    assert not (folder / "twins").exists()


def test_nothing_else_is_ever_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="no store"):
        StoreWriter.create(tmp_path, RECIPE.manifest, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "x.attn"):
        with pytest.raises(OutputError, match="cannot be made"):
            StoreWriter.create(path, RECIPE.manifest)


@pytest.mark.parametrize("name", ["dir with space ü東", "שלום", "a#b?c%20"])
def test_any_path_will_do(tmp_path: Path, name: str) -> None:
    """CASES G07."""
    RECIPE.write(tmp_path / name / f"{name}.attn")
    store = open_store(tmp_path / name / f"{name}.attn")
    np.testing.assert_array_equal(store["z"].values, RECIPE.expected("z"))


# ---- a full disk -----------------------------------------------------------------------------


def test_a_full_disk_is_one_message_and_no_short_file(tmp_path: Path) -> None:
    """CASES F12: a limit on the size of files stands for the full disk."""
    process = python(
        """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from attnlens.errors import StoreError
        from attnlens.store import ActivationSpec, StoreWriter
        from tests.store.making import Recipe
        recipe = Recipe(
            lengths=[64] * 4,
            width=64,
            activations={"z": ActivationSpec(dtype="float16", layers=[0])},
            unit_size=2,
        )
        writer = StoreWriter.create(Path(sys.argv[1]), recipe.manifest)
        first, second = writer.missing_units()
        with writer.unit(first) as out:
            recipe.fill(out)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            with writer.unit(second) as out:
                recipe.fill(out)
        except StoreError as error:
            print(error)
        """,
        tmp_path / "x.attn",
    )
    output, errors = process.communicate()
    assert errors == ""
    assert "000001" in output
    assert "File too large" in output
    assert "--resume" in output
    assert sorted(p.name for p in (tmp_path / "x.attn/units").iterdir()) == ["000000"]
    with pytest.raises(IncompleteStoreError, match="1 of 2"):
        open_store(tmp_path / "x.attn")


def test_no_space_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StoreWriter.create(tmp_path / "x.attn", PLAIN.manifest)
    before = (tmp_path / "x.attn/manifest.json").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnlens.store.files.os.fsync", full)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        writer.vocabulary(["a"])
    assert "Free some space" in str(caught.value)
    assert (tmp_path / "x.attn/manifest.json").read_bytes() == before
    assert not (tmp_path / "x.attn/vocabulary.json").exists()


# ---- misuse ----------------------------------------------------------------------------------


def test_what_is_not_complete_is_not_committed(tmp_path: Path) -> None:
    recipe = Recipe(lengths=[5, 5], statistics=["pattern.rows"])
    writer = StoreWriter.create(tmp_path / "x.attn", recipe.manifest)
    (unit,) = writer.missing_units()
    z = np.stack([recipe.value("z", p, 0) for p in (0, 1)])
    pattern = np.stack([recipe.value("pattern", p, 0) for p in (0, 1)])
    with (
        pytest.raises(StoreError, match="pattern of layer 0, prompt 0 was never written"),
        writer.unit(unit) as out,
    ):
        out.write("z", 0, slice(0, 2), z)
    with (
        pytest.raises(StoreError, match="z of layer 1, prompt 0 was never written"),
        writer.unit(unit) as out,
    ):
        out.write("pattern", 0, slice(0, 2), pattern)
        out.write("pattern", 1, slice(0, 2), pattern)
        out.write("z", 0, slice(0, 2), z)
        out.write("z", 1, slice(1, 2), z[:1])
    with (
        pytest.raises(StoreError, match=r"pattern\.rows was never written"),
        writer.unit(unit) as out,
    ):
        for layer in (0, 1):
            out.write("pattern", layer, slice(0, 2), pattern)
            out.write("z", layer, slice(0, 2), z)
    with pytest.raises(StoreError, match="cannot be sealed"):
        writer.seal()
    writer.close()


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    recipe = Recipe(lengths=[5, 5])
    writer = StoreWriter.create(tmp_path / "x.attn", recipe.manifest)
    (unit,) = writer.missing_units()
    z = np.stack([recipe.value("z", p, 0) for p in (0, 1)])
    for message, arguments in {
        "layer 7 is not in": ("z", 7, slice(0, 2), z),
        "q of layer 0 is not in": ("q", 0, slice(0, 2), z),
        "expected float16 (2, 5, 4, 3)": ("z", 0, slice(0, 2), z[:1]),
        "float16 (5, 4, 3), expected float16 (2, 5, 4, 3) over [prompt, pos, head, d_head]": (
            "z",
            0,
            slice(0, 2),
            z[0],
        ),
        "is int64": ("z", 0, slice(0, 2), z.astype(int)),
        "written twice": ("z", 1, slice(1, 2), z[:1]),
    }.items():
        with pytest.raises(StoreError) as caught, writer.unit(unit) as out:
            out.write("z", 1, slice(0, 2), z)
            out.write(*arguments)
        assert message in str(caught.value)
    with pytest.raises(StoreError, match="object"), writer.unit(unit) as out:
        recipe.fill(out)
        out._statistics["x"] = {"y": np.array([object()])}
    with pytest.raises(StoreError, match="tokens have shape"), writer.unit(unit) as out:
        out.tokens(np.zeros((2, 6)))
    writer.close()


def test_units_are_written_once(tmp_path: Path) -> None:
    begin(tmp_path / "x.attn", RECIPE, 1)
    writer = StoreWriter.resume(tmp_path / "x.attn", RECIPE.manifest)
    with pytest.raises(StoreError, match="already"), writer.unit(writer.manifest.units[0]):
        pass
    writer.close()


@pytest.mark.parametrize(
    "change",
    [
        {"units": []},
        {"units": Recipe(lengths=[5, 5]).manifest.units * 2},
        {"prompts": {"n": 2, "lengths": [5]}},
        {"prompts": {"n": 2, "lengths": [5, 6]}},
        {"activations": {"z": {"dtype": "object", "layers": [0]}}},
        {"extra": 1},
    ],
)
def test_manifests_that_make_no_sense(change: dict[str, object]) -> None:
    from pydantic import ValidationError

    from attnlens.store import Manifest

    good = Recipe(lengths=[5, 5]).manifest.model_dump(by_alias=True)
    Manifest.model_validate(good)
    with pytest.raises(ValidationError):
        Manifest.model_validate({**good, **change})


def test_memory_does_not_grow_with_the_unit(tmp_path: Path) -> None:
    """A shard is appended to, not rewritten: each batch costs the same."""
    import tracemalloc

    recipe = Recipe(
        lengths=[32] * 64,
        width=64,
        unit_size=64,
        batch_size=2,
        activations={"z": ActivationSpec(dtype="float32", layers=[0])},
    )
    value = np.ones((2, 32, 4, 64), dtype=np.float32)
    with StoreWriter.create(tmp_path / "x.attn", recipe.manifest) as writer:
        (unit,) = writer.missing_units()
        with writer.unit(unit) as out:
            out.tokens(np.zeros((64, 32)))
            peaks = []
            tracemalloc.start()
            for start in range(0, 64, 2):
                tracemalloc.reset_peak()
                out.write("z", 0, slice(start, start + 2), value)
                peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[-1] < 2 * max(peaks[:8])
    assert peaks[-1] < 64 * 32 * 4 * 64 * 4 / 4
