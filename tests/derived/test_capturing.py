"""Captures that keep queries and keys instead of patterns, against plain Hugging Face."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import attnlens
from attnlens.errors import UnsupportedModelError
from attnlens.models import Model
from attnlens.recorder import capture
from attnlens.store import Store, open_store
from tests.modelzoo import FAMILIES

STATISTICS = ["entropy", "entropy_share", "max", "received", "by_offset"]
LEAN = [f for f in FAMILIES if f != "bloom"]


class Notes:
    """Progress that keeps the notes."""

    def __init__(self) -> None:
        from attnlens.progress import Silent

        self._silent = Silent()
        self.kept: list[str] = []

    def stage(self, *args: Any) -> Any:
        return self._silent.stage(*args)

    def note(self, text: str) -> None:
        self.kept.append(text)


def held(store: Store) -> set[str]:
    """Return the activations that lie on the disk."""
    assert store.path is not None
    return {p.name for p in store.path.glob("units/000000/*") if p.is_dir()} - {"statistics"}


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_are_computed_on_reading(
    family: str,
    loaded: Callable[[str], Model],
    attentions: Callable[[str, Tensor], Tensor],
    tokens: Tensor,
) -> None:
    # q_rot and k_rot are asked for, so that the pattern costs nothing more.
    store = capture(loaded(family), tokens, activations=["pattern", "q_rot", "k_rot"])
    assert set(store.manifest.activations) == {"q_rot", "k_rot"} and not store.manifest.lean
    assert "pattern" not in held(store)
    reference = attentions(family, tokens).numpy()
    np.testing.assert_allclose(store["pattern"].values, reference, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        store.attention(1).to_dense().numpy(), reference[:, 1], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("family", LEAN)
def test_lean_capture_gives_all_that_eager_capture_gives(
    family: str,
    loaded: Callable[[str], Model],
    attentions: Callable[[str, Tensor], Tensor],
    tokens: Tensor,
) -> None:
    model = loaded(family)
    wanted: dict[str, Any] = {
        "activations": ["q", "k", "v", "z", "pattern", "resid_pre", "attn_out"],
        "statistics": [f"pattern.{s}" for s in STATISTICS] + ["z.second_moment"],
        "batch_size": 2,
        "dtypes": dict.fromkeys(["q", "k", "v", "z", "resid_pre", "attn_out"], "float32"),
    }
    lean = capture(model, tokens, lean=True, **wanted)
    eager = capture(model, tokens, lean=False, **wanted)
    assert lean.manifest.lean and not eager.manifest.lean
    assert "pattern" in held(eager) and "pattern" not in held(lean)
    assert any("lean" in note for note in lean.manifest.notes)
    reference = attentions(family, tokens).numpy()
    np.testing.assert_allclose(lean["pattern"].values, reference, rtol=1e-4, atol=1e-6)
    for name in ("q", "k", "v", "z", "resid_pre", "attn_out"):
        np.testing.assert_allclose(
            lean[name].values, eager[name].values, rtol=1e-3, atol=1e-4, err_msg=name
        )
    for name in wanted["statistics"]:
        assert lean[name].dims == eager[name].dims
        np.testing.assert_allclose(
            lean[name].values, eager[name].values, rtol=1e-3, atol=1e-4, err_msg=name
        )


def test_chosen_heads_in_groups_that_are_not_whole(
    loaded: Callable[[str], Model], attentions: Callable[[str, Tensor], Tensor], tokens: Tensor
) -> None:
    store = capture(
        loaded("gemma2"),
        tokens,
        activations=["pattern"],
        statistics=["pattern.max"],
        heads=[0, 2, 3],
        layers=[1],
        lean=True,
    )
    reference = attentions("gemma2", tokens).numpy()[:, [1]][:, :, [0, 2, 3]]
    np.testing.assert_allclose(store["pattern"].values, reference, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        store["pattern.max"].values, reference.max(-1).mean(-1), rtol=1e-4, atol=1e-6
    )


def test_prompts_of_different_lengths(
    loaded: Callable[[str], Model], attentions: Callable[[str, Tensor], Tensor]
) -> None:
    prompts = [list(range(1, 1 + n)) for n in (5, 12, 5, 9)]
    ids = [torch.tensor([p]) for p in prompts]
    from attnlens.corpora import Prompts

    given = Prompts(
        corpus="tokens",
        tokens=tuple(np.asarray(p, dtype=np.int32) for p in prompts),
        bos="as given",
        notes=(),
        seed=0,
    )
    store = capture(loaded("llama"), given, activations=["pattern"], lean=True)
    values = store["pattern"].values
    for i, one in enumerate(ids):
        n = one.shape[1]
        wanted = attentions("llama", one).numpy()[0]
        np.testing.assert_allclose(values[i, ..., :n, :n], wanted, rtol=1e-4, atol=1e-6)
        assert np.isnan(values[i, ..., n:, :]).all() and np.isnan(values[i, ..., n:]).all()


def test_a_rule_that_does_not_hold_is_found_out_by_the_first_batch(
    loaded: Callable[[str], Model],
    attentions: Callable[[str, Tensor], Tensor],
    tokens: Tensor,
    tmp_path: Path,
) -> None:
    model = loaded("mistral")
    facts = model.facts
    model.facts = dataclasses.replace(facts, windows=(2, 3))
    notes = Notes()
    wanted: dict[str, Any] = {"activations": ["pattern", "q_rot"], "out": tmp_path / "a.attn"}
    try:
        store = capture(model, tokens, progress=notes, **wanted)
        assert set(store.manifest.activations) == {"pattern", "q_rot"}
        assert any("layer 1" in note and "stored as captured" in note for note in notes.kept)
        reference = attentions("mistral", tokens).numpy()
        np.testing.assert_allclose(store["pattern"].values, reference, atol=5e-4)
        # Resumed, it knows.
        assert len(capture(model, tokens, resume=True, **wanted).names()) == len(store.names())
    finally:
        model.facts = facts


def test_what_cannot_run_lean_runs_as_ever(
    loaded: Callable[[str], Model],
    attentions: Callable[[str, Tensor], Tensor],
    tokens: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attnlens.plan.derivation.LEAN_LENGTH", tokens.shape[1])
    store = capture(loaded("bloom"), tokens, activations=["pattern"], statistics=["pattern.max"])
    assert not store.manifest.lean
    (note,) = [n for n in store.manifest.notes if "not lean" in n]
    assert "works on the matrix of scores" in note and "Lazy" not in note and "Error" not in note
    np.testing.assert_allclose(
        store["pattern"].values, attentions("bloom", tokens).numpy(), atol=5e-4
    )


def test_what_cannot_run_lean_is_refused_where_that_was_asked_for(
    loaded: Callable[[str], Model], tokens: Tensor, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot run lean: its attention works on"):
        capture(
            loaded("bloom"), tokens, activations=["pattern"], lean=True, out=tmp_path / "s.attn"
        )
    assert not (tmp_path / "s.attn").exists()


def test_twins_are_captured_the_same_way(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    store = capture(loaded("gpt2"), tokens, activations=["pattern"], twins=1, lean=True)
    (twin,) = store.twins
    assert twin.manifest.lean and "pattern" in twin
    np.testing.assert_allclose(twin["pattern"].sum("key_pos").values, 1.0, rtol=1e-5)


def test_interrupted_and_resumed_a_lean_store_has_the_same_bytes(
    loaded: Callable[[str], Model], tokens: Tensor, tmp_path: Path
) -> None:
    whole = capture(loaded("llama"), tokens, lean=True, out=tmp_path / "whole.attn")
    with (
        pytest.raises(ZeroDivisionError),
        loaded("llama").hooks([("blocks.1.attn.hook_z", lambda value, hook: 1 / 0)]),
    ):
        capture(
            loaded("llama"),
            tokens,
            activations=["pattern", "z"],
            lean=True,
            out=tmp_path / "part.attn",
        )
    part = capture(
        loaded("llama"),
        tokens,
        activations=["pattern", "z"],
        lean=True,
        out=tmp_path / "part.attn",
        resume=True,
    )
    np.testing.assert_array_equal(part["pattern"].values, whole["pattern"].values)
    again = open_store(tmp_path / "part.attn")
    assert again.manifest.lean


@pytest.mark.parametrize("agreeing", [True, False])
def test_a_run_says_which_it_was(
    agreeing: bool, loaded: Callable[[str], Model], tokens: Tensor, tmp_path: Path
) -> None:
    class Reads(attnlens.Analysis):
        """Reads patterns and queries."""

        name = "reads"
        requires = ("pattern", "q_rot", "k_rot")

        def compute(self, store: Any) -> xr.Dataset:
            return xr.Dataset({"most": store["pattern"].max()})

    model = loaded("mistral")
    facts = model.facts
    if not agreeing:
        model.facts = dataclasses.replace(facts, windows=(2, 3))
    try:
        run = attnlens.run(model, [Reads], corpus=tokens.numpy(), twins=0, out=tmp_path / "run")
    finally:
        model.facts = facts
    (said,) = [note for note in run.record["notes"] if note.startswith("pattern: ")]
    assert said == (
        "pattern: computed from q_rot and k_rot on reading, which agree with what the model gives."
        if agreeing
        else "pattern: stored, for q_rot and k_rot give other weights than the model."
    )
