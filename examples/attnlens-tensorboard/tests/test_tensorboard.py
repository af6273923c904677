"""What is written, seen by a stand-in for the writer; and by the real one where there is one."""

import importlib.util
import json

import attnlens_tensorboard
import numpy as np
import pytest
import xarray as xr
from attnlens_tensorboard import writing


class Writer:
    """Stands in for SummaryWriter: keeps what it is given."""

    def __init__(self, folder):
        self.folder = folder
        self.scalars, self.histograms, self.images, self.texts = {}, {}, {}, {}
        self.closed = False

    def add_scalar(self, tag, value, step):
        self.scalars[tag] = (value, step)

    def add_histogram(self, tag, values, step):
        self.histograms[tag] = (values, step)

    def add_image(self, tag, pixels, step, dataformats):
        assert dataformats == "HWC"
        self.images[tag] = (pixels, step)

    def add_text(self, tag, text, step):
        self.texts[tag] = (text, step)

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch, tmp_path):
    made = []

    def make(folder):
        made.append(Writer(folder))
        return made[-1]

    monkeypatch.setattr(writing, "make_writer", make)
    monkeypatch.setenv(writing.FOLDER_VARIABLE, str(tmp_path))
    return made


def a_result(**origin):
    values = np.arange(6.0).reshape(2, 3)
    return xr.Dataset(
        {
            "entropy": (("layer", "head"), values),
            "entropy_twin": (("twin", "layer", "head"), np.stack([values, values + 1])),
            "curve": (("layer", "head", "k"), np.zeros((2, 3, 4))),
            "error": ((), 0.25),
            "word": (("layer",), ["a", "b"]),
            "hole": (("layer", "head"), np.full((2, 3), np.nan)),
        },
        coords={"layer": [0, 5]},
        attrs={"attnlens": json.dumps(origin)},
    )


def test_numbers_become_scalars_and_heads_become_histograms(writers):
    attnlens_tensorboard.attnlens_after_analysis("thing", a_result(model="gpt2"))
    (writer,) = writers
    assert writer.scalars == {
        "thing/entropy": (2.5, 0),
        "thing/entropy/layer00": (1.0, 0),
        "thing/entropy/layer05": (4.0, 0),
        "thing/entropy_twin": (3.0, 0),
        "thing/error": (0.25, 0),
    }
    assert list(writer.histograms) == ["thing/entropy"]
    assert writer.folder.name == "gpt2"
    assert writer.closed


@pytest.mark.parametrize(
    ("origin", "step", "folder"),
    [
        ({"model": "EleutherAI/pythia-70m", "revision": "step512"}, 512, "pythia-70m"),
        ({"model": "pythia-70m@step1000"}, 1000, "pythia-70m"),
        ({"model": "/models/mine-step40", "revision": None}, 40, "mine"),
        ({"model": "gpt2"}, 0, "gpt2"),
        ({}, 0, "unknown"),
    ],
)
def test_checkpoints_of_one_training_share_a_folder_and_differ_in_step(
    writers, origin, step, folder
):
    writing.write_result("thing", a_result(**origin))
    assert writers[0].scalars["thing/error"][1] == step
    assert writers[0].folder.name == folder


def test_figures_of_an_installed_analysis_become_images(writers):
    from attnlens.plugins import discover, find, load_analysis
    from attnlens.testing import compute, make_store

    name = "spectrum"
    if name not in {p.name for p in discover()}:
        pytest.skip("the analysis spectrum is not installed")
    analysis = load_analysis(find(name, discover()))(prompts=2)
    result = compute(analysis, make_store(length=8))
    origin = json.dumps({"model": "demo", "options": {"prompts": 2}})
    writing.write_result(name, result.assign_attrs(attnlens=origin))
    pixels, _ = writers[0].images["spectrum/entropy_grid"]
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert pixels.std() > 0


def test_figures_can_be_switched_off(writers, monkeypatch):
    monkeypatch.setenv(writing.FIGURES_VARIABLE, "0")
    writing.write_result("spectrum", a_result(model="demo"))
    assert not writers[0].images


def test_a_failure_is_written(writers):
    attnlens_tensorboard.attnlens_analysis_failed("thing", ValueError("too small"))
    assert writers[0].texts == {"thing/error": ("ValueError: too small", 0)}


def test_without_a_writer_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        writing.make_writer(tmp_path)


def test_the_real_writer_takes_it_all(monkeypatch, tmp_path):
    if not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        pytest.skip("neither tensorboard nor tensorboardX is installed")
    monkeypatch.setenv(writing.FOLDER_VARIABLE, str(tmp_path))
    writing.write_result("thing", a_result(model="gpt2"))
    assert list((tmp_path / "gpt2").glob("events.out.tfevents*"))
