"""What a plan costs and what it refuses, from facts alone: no model, no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.corpora import Prompts
from attnlens.errors import NeedError, OptionError, PlanRefusedError
from attnlens.models import ModelFacts
from attnlens.needs import Request
from attnlens.plan import Plan, make_plan

GPT2_SMALL = ModelFacts(
    name="gpt2",
    source="gpt2",
    revision=None,
    architecture="GPT2LMHeadModel",
    n_layers=12,
    n_heads=12,
    n_kv_heads=12,
    d_model=768,
    d_head=64,
    d_vocab=50257,
    n_ctx=1024,
    positions="absolute",
    causal=True,
    windows=(None,) * 12,
    soft_cap=None,
    scales=(0.125,) * 12,
    qk_norm=False,
    dtype="float32",
    device="cpu",
    mode="raw",
    n_params=124_439_808,
    weights_hash=None,
    config={},
)
GROUPED = replace(GPT2_SMALL, n_heads=8, n_kv_heads=2, n_layers=4, windows=(None,) * 4)


def prompts(*lengths: int) -> Prompts:
    return Prompts("tokens", tuple(np.zeros(n, np.int32) for n in lengths), "as given")


def plan_of(
    facts: ModelFacts = GPT2_SMALL,
    given: Prompts | None = None,
    activations: set[str] | None = None,
    statistics: set[str] | None = None,
    **options: Any,
) -> Plan:
    request = Request(activations or set(), statistics or set())
    return make_plan(facts, {"": given or prompts(*[512] * 8)}, {"": request}, {}, **options)


def test_the_size_of_patterns_is_their_arithmetic_size() -> None:
    plan = plan_of(activations={"pattern", "z"})
    assert plan.main.sizes == {
        "pattern": 8 * 12 * 12 * 512 * 512 * 2,
        "z": 8 * 12 * 512 * 12 * 64 * 2,
    }
    # The half above the diagonal is zeros.
    assert plan.disk_bytes == plan.main.sizes["pattern"] // 2 + plan.main.sizes["z"]


def test_chosen_layers_heads_and_positions_shrink_the_size() -> None:
    plan = plan_of(
        GROUPED, activations={"k", "q", "pattern"}, layers=[1], heads=[0, 1, 5], positions="last"
    )
    assert plan.main.layers == (1,)
    # Heads 0 and 1 read key-value head 0, head 5 reads 1.
    assert plan.main.sizes == {
        "q": 8 * 1 * 3 * 64 * 2,
        "k": 8 * 1 * 2 * 64 * 2,
        "pattern": 8 * 3 * 1 * 512 * 2,
    }
    assert plan.main.positions == (511,)
    assert any("key-value heads" in note for note in plan.notes)


def test_the_last_position_stays_relative_where_prompts_differ_in_length() -> None:
    assert plan_of(given=prompts(4, 9), positions="last").main.positions == (-1,)
    assert plan_of(given=prompts(4, 9), positions=[0, -1]).main.positions == (0, -1)
    assert plan_of(given=prompts(9, 9), positions=[8, -1]).main.positions == (8,)


def test_only_statistics_keep_nothing_raw() -> None:
    plan = plan_of(statistics={"pattern.entropy", "z.mean"})
    assert plan.main.activations == {}
    assert plan.main.bytes == plan.disk_bytes == 0


def test_131072_tokens_are_refused_before_anything_is_allocated() -> None:
    facts = replace(GPT2_SMALL, n_ctx=131072)
    plan = plan_of(facts, prompts(131072), activations={"pattern"}, lean=False)
    assert plan.peak_memory_bytes > 12 * 131072**2 * 4
    with pytest.raises(PlanRefusedError, match=r"TiB of memory.*1 x 131072 tokens") as refused:
        plan.check()
    assert "--length" in str(refused.value)
    assert refused.value.exit_code == 1


def test_what_the_disk_cannot_hold_is_refused() -> None:
    plan = replace(plan_of(activations={"pattern"}), free_disk=1000)
    with pytest.raises(PlanRefusedError, match=r"pattern: 576.0 MiB.*1000 B are free"):
        plan.check()
    replace(plan, free_disk=None).check()


def test_memory_that_the_weights_take_already_is_not_asked_for_again() -> None:
    loaded = plan_of(replace(GPT2_SMALL, weights_hash="x"), activations={"z"})
    assert loaded.resident_bytes == 124_439_808 * 4
    replace(loaded, free_memory=loaded.peak_memory_bytes - loaded.resident_bytes).check()
    fresh = plan_of(activations={"z"})
    with pytest.raises(PlanRefusedError):
        replace(fresh, free_memory=fresh.peak_memory_bytes - 1).check()


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    batch_size=st.integers(1, 7),
)
def test_units_hold_every_prompt_once_in_equal_lengths(lengths: list[int], batch_size: int) -> None:
    plan = plan_of(given=prompts(*lengths), activations={"z"}, batch_size=batch_size)
    units = plan.main.units
    assert sorted(p for u in units for p in u.prompts) == list(range(len(lengths)))
    assert [u.id for u in units] == list(range(len(units)))
    for unit in units:
        assert {lengths[p] for p in unit.prompts} == {unit.length}
        last = unit is units[-1] or unit.length != units[unit.id + 1].length
        assert last or len(unit.prompts) % batch_size == 0


def test_a_unit_is_several_batches_but_not_the_whole_capture() -> None:
    plan = plan_of(given=prompts(*[512] * 64), activations={"pattern"}, batch_size=2)
    assert len(plan.main.units) > 4
    assert all(2 <= len(u.prompts) <= 32 for u in plan.main.units)
    assert plan.batches == 32


def test_the_batch_follows_from_model_and_length() -> None:
    assert plan_of().main.batch_size == 8
    assert plan_of(given=prompts(1024)).main.batch_size < 8
    assert plan_of(given=prompts(4)).main.batch_size == 32


def test_twins_and_corpora_have_their_places() -> None:
    own, other = prompts(5, 5), prompts(8)
    plan = make_plan(
        GPT2_SMALL,
        {"": own, "repeated-random": other},
        {"": Request({"z"}), "repeated-random": Request(statistics={"pattern.entropy"})},
        {"repeated-random": Request(statistics={"pattern.entropy"})},
        n_twins=2,
    )
    assert [s.where for s in plan.stores] == [
        "",
        "corpora/repeated-random",
        "twins/000",
        "twins/000/corpora/repeated-random",
        "twins/001",
        "twins/001/corpora/repeated-random",
    ]
    assert plan.stores[2].activations == {}
    # A twin is in memory beside the model.
    alone = make_plan(GPT2_SMALL, {"": own}, {"": Request({"z"})})
    assert plan.peak_memory_bytes > alone.peak_memory_bytes + 4 * 124_000_000


def test_no_twins_are_planned_where_nobody_asks() -> None:
    assert plan_of(activations={"z"}, n_twins=3).n_twins == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [12]}, "layer 12 does not exist"),
        ({"layers": []}, "No layer"),
        ({"heads": [-13]}, "head -13 does not exist"),
        ({"positions": [512]}, "position 512 does not exist in every prompt"),
        ({"positions": "first"}, "'first'"),
        ({"batch_size": 0}, "batch size 0"),
        ({"dtypes": {"z": "bfloat16"}}, "bfloat16"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan_of(activations={"z"}, **options)


def test_a_dtype_for_no_activation_names_the_nearest() -> None:
    with pytest.raises(NeedError, match="Did you mean 'pattern'"):
        plan_of(dtypes={"patern": "float32"})


def test_dtypes_are_those_of_the_vocabulary_unless_asked() -> None:
    plan = plan_of(
        activations={"z", "v", "q_rot", "pattern"}, dtypes={"v": "float32", "pattern": "float16"}
    )
    assert plan.main.activations == {
        "v": "float32",
        "q_rot": "float32",
        "z": "float16",
        "pattern": "float16",
    }


def test_it_can_be_read_and_saved() -> None:
    plan = plan_of(activations={"pattern"}, statistics={"z.mean"}, out=Path())
    text = str(plan)
    for word in ("pattern", "z.mean", "8 x 512 tokens", "float16", "576.0 MiB", "disk", "memory"):
        assert word in text
    assert json.loads(json.dumps(plan.to_json()))["stores"][0]["activations"] == {
        "pattern": "float16"
    }
    assert [row[1] for row in plan.rows()] == ["pattern", "z.mean"]


def test_negative_layers_count_from_the_end() -> None:
    assert plan_of(layers=[-1, 0]).main.layers == (0, 11)


def test_statistics_alone_take_little_of_the_disk() -> None:
    assert "disk: little" in str(plan_of(statistics={"pattern.entropy"}))
    assert "0 B" not in str(plan_of(statistics={"pattern.entropy"}))
