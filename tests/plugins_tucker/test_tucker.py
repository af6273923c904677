"""tucker on stores whose multilinear ranks are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attnlens_plugins.tucker import Tucker, telling

import attnlens
from tests.plugins_cp.planted import attention, chance, planted


def held(analysis: Tucker, result: Any) -> set[str]:
    return {f.claim for f in analysis.findings(result) if f.holds}


def test_multilinear_ranks_of_three_groups_of_heads() -> None:
    result = Tucker(energy=0.999999).compute(planted())
    assert [int(result[f"rank_{m}"]) for m in ("head", "token", "d_model")] == [3, 3, 3]
    assert result.attrs["core_sizes"] == [3, 3, 3]
    assert result.attrs["error"] < 1e-5
    np.testing.assert_allclose((result["core"].values ** 2).sum(), 12, rtol=1e-5)
    np.testing.assert_allclose(result.attrs["explained"], 1, atol=1e-6)


def test_claims_only_beyond_the_twins() -> None:
    analysis = Tucker()
    found = analysis.compute(planted(noise=0.05, twins=[chance(k) for k in range(3)]))
    assert "few-head-directions" in held(analysis, found)
    for seed in range(3):
        own = chance(seed)
        store = attnlens.Store.from_arrays(
            z=own["z"].values,
            weights={"W_O": own.weights["W_O"].values},
            twins=[chance(50 + 10 * seed + k) for k in range(3)],
        )
        assert not held(analysis, analysis.compute(store))


def test_more_directions_than_the_twins_have_are_set_beside_theirs() -> None:
    analysis = Tucker()
    result = analysis.compute(planted(noise=0.05, twins=[chance(k) for k in range(3)]))
    for count in (92, 12):
        result["rank_token"], result["rank_token_twin"] = count, ("twin", [12, 13, 12])
        told = {f.claim: f.text for f in analysis.findings(result)}["few-token-directions"]
        assert told.startswith(f"{count} of ")
        assert told.endswith("of the tokens; twins 12 to 13.")


def test_spectra_are_those_of_the_unfoldings() -> None:
    store = planted(noise=0.3)
    result = Tucker(scale="none", exclude_bos=False).compute(store)
    tensor = store["result"].values  # prompt, layer, pos, head, d_model
    rows = np.moveaxis(tensor, (1, 3), (0, 1)).reshape(12, -1, tensor.shape[-1])
    for mode, name in enumerate(("head", "token", "d_model")):
        flat = np.moveaxis(rows, mode, 0).reshape(rows.shape[mode], -1)
        sigma = np.linalg.svd(flat, compute_uv=False) ** 2
        expected = np.zeros(rows.shape[mode])
        expected[: len(sigma)] = sigma / sigma.sum()
        np.testing.assert_allclose(result[f"energy_{name}"], expected, atol=1e-6)


def test_core_is_in_normal_form() -> None:
    core = Tucker(ranks="4,5,3").compute(planted(noise=0.5))["core"].values
    assert core.shape == (4, 5, 3)
    for mode in range(3):
        flat = np.moveaxis(core, mode, 0).reshape(core.shape[mode], -1)
        gram = flat @ flat.T
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-6 * gram.max())
        assert (np.diff(np.diag(gram)) <= 1e-9).all()


@pytest.mark.parametrize("tensor", ["result", "second_moment"])
def test_gauge_changes_leave_it_unchanged(tensor: str) -> None:
    one, two = (
        Tucker(tensor=tensor, scale="none").compute(planted(gauge=g)) for g in (False, True)
    )
    np.testing.assert_allclose(two["energy_head"], one["energy_head"], atol=1e-5)
    np.testing.assert_allclose(two["share"][:3], one["share"][:3], atol=1e-5)


def test_every_interaction_is_told() -> None:
    analysis = Tucker(interactions=4)
    result = analysis.compute(planted())
    sentences = [str(s) for s in result["sentence"].values]
    assert all("ead" in s and "of the energy" in s and "raises" in s for s in sentences)
    table = analysis.tabulate("interactions", result)
    assert list(table["in words"]) == sentences
    assert (np.diff(table["share of energy"]) <= 0).all()


def test_patterns() -> None:
    kinds = ["previous", "uniform", "previous", "uniform"]
    pattern = np.stack([attention(k, 10) for k in kinds])[None, None]
    store = attnlens.Store.from_arrays(pattern=pattern, weights={"W_O": np.ones((1, 4, 2, 4))})
    result = Tucker(tensor="pattern", energy=0.999).compute(store)
    assert int(result["rank_head"]) == 2
    assert "position" in str(result["sentence"].values[0])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("4,5,7", "4,5,7"),
        ([4, 5, 7], "4,5,7"),
        ("6", 6),
        (6, 6),
        ("0.95", 0.95),
        ("all", "all"),
        ("0.9,3,0.5", "0.9,3,0.5"),
    ],
)
def test_ranks_are_read(given: Any, kept: Any) -> None:
    assert Tucker(ranks=given).options.ranks == kept
    # The options of a run are written as JSON and read again.
    again = Tucker(**Tucker(ranks=given).options.model_dump(mode="json"))
    assert again.options.ranks == kept


@pytest.mark.parametrize("wrong", ["2,2", "0", "1.5", "many", -1, "2,2,x"])
def test_wrong_ranks_are_refused(wrong: Any) -> None:
    with pytest.raises(attnlens.errors.OptionError, match=r"tucker\.ranks"):
        Tucker(ranks=wrong)


def test_ranks_beyond_the_tensor() -> None:
    with pytest.raises(attnlens.errors.DecompositionError, match=r"20 is above .* of mode 'head'"):
        Tucker(ranks="20,3,3").compute(planted())
    with pytest.warns(UserWarning, match="capped"):
        result = Tucker(ranks=20).compute(planted(noise=0.1))
    assert result.attrs["core_sizes"][0] == 12


@pytest.mark.parametrize("tensor", ["qk", "ov", "pattern", "second_moment"])
def test_tensors_without_tokens_have_nothing_to_centre(tensor: str) -> None:
    with pytest.raises(attnlens.errors.OptionError, match=f"{tensor} has no tokens"):
        Tucker(tensor=tensor, center=True)


def test_sentences_join_what_is_read_and_written() -> None:
    directions = np.array([[["a", "b"], ["c", "d"]]])
    read = telling.describe_directions(directions, "on reading a direction along {} and against {}")
    told = telling.sentence(["heads 0.1, 0.2", read[0], "a direction"], 0.25, 1.0)
    assert told == (
        "Heads 0.1, 0.2, on reading a direction along “a” “b” and against “c” “d”: a direction; "
        "25.0% of the energy."
    )


def test_tokens_of_opposite_sign_are_told_apart() -> None:
    factor = np.array([[3.0], [-2.0], [2.5], [-1.0]])
    told = telling.describe_tokens(factor, ["a", "b", "c", "d"])
    assert told == ["tokens such as “a” “c” against “b” “d”"]


def test_a_symmetric_tensor_is_judged_once() -> None:
    analysis = Tucker(tensor="second_moment")
    claims = [f.claim for f in analysis.findings(analysis.compute(planted()))]
    assert len(claims) == len(set(claims))


def test_tokens_that_are_left_out_are_said(tmp_path: Any) -> None:
    run = attnlens.analyze(planted(), [Tucker(max_tokens=8)], out=tmp_path / "run")
    (note,) = [n for n in run.record["analyses"][0]["notes"] if "left out" in n]
    assert "tokens were left out; -o tucker.max_tokens=" in note


def test_figures_and_tables_of_a_reloaded_result(tmp_path: Any) -> None:
    analysis = Tucker()
    run = attnlens.analyze(planted(noise=0.1, twins=[chance(0)]), [analysis], out=tmp_path / "run")
    assert not run.errors
    assert {"tucker.ranks", "tucker.core", "tucker.strongest"} <= set(run.figures)
    assert len(run.tables) == 2


def test_more_tokens_than_are_held_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = planted()
    width = 12 * store["result"].sizes["d_model"]
    monkeypatch.setattr("attnlens_plugins.tucker.tensor._MOST", 20 * width)
    with pytest.warns(UserWarning, match="at most 20 tokens were taken, not 1,024"):
        result = Tucker().compute(store)
    assert result.attrs["n_tokens"] <= 20
    facts = SimpleNamespace(n_layers=3, n_heads=4, d_head=4, d_model=width // 12)
    assert Tucker().memory(facts, 10**9) == 12 * 20 * width
