"""What is stored instead of patterns, and when no matrix is made at all: from facts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnlens.corpora import Prompts
from attnlens.errors import OptionError, UnsupportedModelError
from attnlens.models import ModelFacts
from attnlens.needs import Request
from attnlens.plan import Plan, make_plan
from attnlens.plan.derivation import LEAN_LENGTH, Abilities
from attnlens.plan.machine import readable_bytes
from attnlens.plan.storeplan import StorePlan

MODEL = ModelFacts(
    name="m", source="m", revision=None, architecture="LlamaForCausalLM", n_layers=2, n_heads=8,
    n_kv_heads=8, d_model=512, d_head=64, d_vocab=100, n_ctx=8192, positions="rotary", causal=True,
    windows=(None, None), soft_cap=None, scales=(0.125, 0.125), qk_norm=False, dtype="float32",
    device="cpu", mode="raw", n_params=1000, weights_hash=None, config={},
)  # fmt: skip

#: A causal pattern costs a byte per cell on the disk, a query or key 4 bytes per dimension.
BREAK_EVEN = 8 * 64


def plan_of(length: int, *names: str, facts: ModelFacts = MODEL, **how: Any) -> Plan:
    tokens = (np.zeros(length, dtype=np.int32),)
    given = Prompts(corpus="tokens", tokens=tokens, bos="as given", notes=(), seed=0)
    activations = {n for n in names if "." not in n}
    request = Request(activations, {n for n in names if "." in n})
    return make_plan(facts, {"": given}, {"": request}, **how)


def store(length: int, *names: str, **how: Any) -> StorePlan:
    return plan_of(length, *names, **how).main


def test_what_is_smaller_on_the_disk_is_stored() -> None:
    assert store(BREAK_EVEN, "pattern").activations == {"pattern": "float16"}
    assert store(BREAK_EVEN, "pattern").derived == ()
    longer = store(BREAK_EVEN + 1, "pattern")
    assert longer.activations == {"q_rot": "float32", "k_rot": "float32"}
    assert longer.derived == ("pattern",) and not longer.lean
    assert longer.captured == {"pattern": "float16"}
    assert longer.as_captured().activations == {"pattern": "float16"}
    # Two key-value heads for eight heads: queries and keys take five eighths.
    grouped = replace(MODEL, n_kv_heads=2)
    assert store(BREAK_EVEN * 5 // 8, "pattern", facts=grouped).derived == ()
    assert store(BREAK_EVEN * 5 // 8 + 1, "pattern", facts=grouped).derived == ("pattern",)
    # Without masked cells a pattern does not compress to a half.
    both = replace(MODEL, causal=False)
    assert store(BREAK_EVEN // 2 + 1, "pattern", facts=both).derived == ("pattern",)


def test_queries_and_keys_that_are_stored_anyway_are_enough() -> None:
    assert store(16, "pattern", "q_rot", "k_rot").derived == ("pattern",)


def test_lean_from_a_length_on() -> None:
    assert not store(LEAN_LENGTH - 1, "z").lean
    assert store(LEAN_LENGTH, "z").lean
    long = store(LEAN_LENGTH, "pattern", "scores", "pattern.entropy", "v.mean")
    assert long.lean and long.derived == ("scores", "pattern") and long.captured == {}
    assert store(8, "pattern", lean=True).derived == ("pattern",)
    assert not store(LEAN_LENGTH, "pattern", lean=False).lean


def test_a_lean_pass_needs_no_memory_for_matrices() -> None:
    lean, eager = plan_of(8192, "z"), plan_of(8192, "z", lean=False)
    assert eager.peak_memory_bytes > 8 * 8192**2 * 4 > 2 * lean.peak_memory_bytes


@pytest.mark.parametrize(
    ("names", "how", "reason"),
    [
        (("pattern",), {"positions": "last"}, "positions"),
        (("pattern",), {"dtypes": {"pattern": "float32"}}, "to be stored as float32"),
        (("pattern", "q_rot"), {"dtypes": {"q_rot": "float16"}}, "too coarse"),
        (("pattern",), {"facts": replace(MODEL, sinks=True)}, "not made of queries and keys"),
        (("pattern.max",), {"facts": replace(MODEL, positions="relative")}, "not made of"),
        (
            ("scores",),
            {"facts": replace(MODEL, positions="alibi", alibi_slopes=(0.5,) * 8)},
            "ALiBi",
        ),
        (
            ("pattern.mine",),
            {"abilities": Abilities(sources={"pattern.mine": "scores"})},
            "statistic of the scores",
        ),
        (("pattern",), {"abilities": Abilities(frozenset({"pattern"}))}, "does not give q_rot"),
    ],
)
def test_what_needs_matrices_is_captured_with_them(
    names: tuple[str, ...], how: dict[str, Any], reason: str
) -> None:
    plan = plan_of(LEAN_LENGTH, *names, **how)
    assert not plan.main.lean and plan.main.derived == ()
    assert any("not lean" in note and reason in note for note in plan.notes)
    with pytest.raises(OptionError, match=reason):
        plan_of(LEAN_LENGTH, *names, lean=True, **how)


def test_a_model_that_cannot_run_lean_runs_eagerly_with_a_note() -> None:
    abilities = Abilities(lean_problem=lambda: "it has a mind of its own")
    plan = plan_of(LEAN_LENGTH, "pattern", abilities=abilities)
    assert not plan.main.lean and plan.main.derived == ("pattern",)
    assert any("a mind of its own" in note for note in plan.notes)
    assert plan.main.not_lean == "it has a mind of its own"


def test_a_model_that_cannot_run_lean_is_refused_where_lean_was_asked_for() -> None:
    abilities = Abilities(lean_problem=lambda: "it has a mind of its own")
    with pytest.raises(UnsupportedModelError, match="cannot run lean: it has a mind of its own"):
        plan_of(16, "pattern", lean=True, abilities=abilities)


def test_before_a_model_is_loaded_lean_is_a_hope() -> None:
    plan = plan_of(8192, "z")
    eager = plan_of(8192, "z", lean=False).peak_memory_bytes
    assert any("tried when it is loaded" in note for note in plan.notes)
    assert any(readable_bytes(eager) in note for note in plan.notes)
    loaded = plan_of(8192, "z", abilities=Abilities(lean_problem=lambda: None))
    assert loaded.notes == ("Lean: the model runs without attention matrices.",)


def test_half_precision_keeps_the_patterns_that_the_model_has() -> None:
    half = replace(MODEL, dtype="bfloat16")
    assert store(LEAN_LENGTH, "pattern", facts=half, lean=False).derived == ()
    assert store(LEAN_LENGTH, "pattern", facts=half).derived == ("pattern",)


def test_the_plan_says_which() -> None:
    text = str(plan_of(LEAN_LENGTH, "pattern"))
    assert "from q_rot and k_rot" in text and "without attention matrices" in text
    saved = plan_of(LEAN_LENGTH, "pattern").to_json()["stores"][0]
    assert saved["lean"] is True and saved["derived"] == ["pattern"]


def test_nothing_to_capture_is_not_lean() -> None:
    assert not store(LEAN_LENGTH).lean
