"""What cp claims, and why it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attnlens_plugins.cp import CP
from attnlens_plugins.cp.claims import cluster_labels
from attnlens_plugins.cp.fitting import choose_rank

import attnlens

from .planted import HEADS, LAYERS, chance, planted, typed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAST: dict[str, Any] = {"n_restarts": 4, "n_splits": 2}


def finding(analysis: CP, result: Any, claim: str) -> attnlens.Finding:
    return next(f for f in analysis.findings(result) if f.claim == claim)


@pytest.fixture(scope="module")
def grouped() -> tuple[CP, Any]:
    analysis = CP(rank=3, **FAST)
    return analysis, analysis.compute(planted(noise=0.05, twins=[chance(k) for k in range(3)]))


def test_nothing_is_clustered_on_components_that_cancel() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (np.linalg.qr(rng.standard_normal((n, 2)))[0].T for n in (12, 80, 24))
    # Rank 3, and the limit of tensors of rank 2 whose components grow without bound.
    tensor = sum(
        np.einsum("h,t,f->htf", a[i], b[j], c[k]) for i, j, k in [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    )
    result = np.transpose(np.reshape(tensor, (2, 6, 8, 10, 24)), (2, 0, 3, 1, 4))
    store = attnlens.Store.from_arrays(result=result, twins=[chance(k) for k in range(3)])
    analysis = CP(rank=2, scale="none", exclude_bos=False, types=False)
    found = analysis.compute(store)
    assert found.attrs["degenerate"] == 1
    assert found.attrs["n_clusters"] == 0
    assert (found["cluster"] == -1).all()
    said = finding(analysis, found, "head-clusters")
    assert not said.holds and said.evidence["clusters"] == 0
    assert "cancel each other" in said.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group_quality": 0.4}, "under 0.5"),
        ({"quality_twin": 1.0}, "no more than twins"),
        ({"stable": 0}, "do not come back"),
        ({"cohesion": 0.1}, "in none of the 3 groups"),
    ],
)
def test_clusters_need_all_that_is_stated(
    grouped: tuple[CP, Any], changes: dict[str, float], reason: str
) -> None:
    analysis, result = grouped
    assert finding(analysis, result, "head-clusters").holds
    result = result.copy()
    for name, value in changes.items():
        if name in result:
            result[name] = 0 * result[name] + value
        else:
            result.attrs = result.attrs | {name: value}
    result["cluster"] = cluster_labels(result)
    assert (result["cluster"] == -1).all()
    said = finding(analysis, result, "head-clusters")
    assert not said.holds and reason in said.text


def test_layers_alone_are_no_clusters() -> None:
    analysis = CP(rank=3, layers="each", **FAST)
    result = analysis.compute(planted(noise=0.05, twins=[chance(k) for k in range(3)]))
    assert (result["group"] == -1).all()
    said = finding(analysis, result, "head-clusters")
    assert not said.holds and "each alone" in said.text


def test_a_rank_that_comes_back_by_luck_is_not_chosen() -> None:
    table = np.array(
        [[0.95, 0.0, 0.9], [0.9, 0.1, 0.2], [0.9, 0.0, 0.8], [0.8, 0.2, 0.9], [0.9] * 3]
    )
    chosen = choose_rank([1, 2, 3], table, "prompt")
    assert (chosen.rank, chosen.stable) == (3, True)  # in four of five
    table[4, 2] = 0.3
    chosen = choose_rank([1, 2, 3], table, "prompt")
    assert (chosen.rank, chosen.stable, chosen.confidence) == (1, True, 1.0)
    assert "5 of 5" in chosen.reason
    table[:, 0] = 0.1
    chosen = choose_rank([1, 2, 3], table, "prompt")
    assert (chosen.rank, chosen.stable) == (1, False)
    assert "at rank 3" in chosen.reason and "Rank 1, the smallest tried, is shown" in chosen.reason


def test_stability_of_a_rank_does_not_depend_on_the_others() -> None:
    store = planted(noise=1.0)
    short, long = (CP(rank=r, **FAST).compute(store) for r in ("2..3", "1..6"))
    np.testing.assert_allclose(
        long["scan_stability"].sel(rank=[2, 3]), short["scan_stability"], rtol=1e-6
    )


def test_low_core_consistency_is_said(grouped: tuple[CP, Any]) -> None:
    analysis, result = grouped
    assert "Core consistency" not in finding(analysis, result, "rank").text
    low = result.assign(scan_core_consistency=0 * result["scan_core_consistency"] - 35)
    assert "Core consistency is -35%" in finding(analysis, low, "rank").text


def test_the_reason_given_is_the_reason() -> None:
    twins = [typed(["uniform"] * 4, seed=k) for k in range(1, 4)]
    analysis = CP(rank=2, types=False, clusters=99, **FAST)
    result = analysis.compute(typed(["previous", "sink", "uniform", "uniform"], twins=twins))
    assert "not asked for" in finding(analysis, result, "induction-heads").text
    assert "99 groups were asked for, of 4 heads" in finding(analysis, result, "head-clusters").text


@pytest.mark.parametrize(
    "options",
    [
        {"tensor": "qk", "center": True},
        {"tensor": "pattern", "tokens": "pooled"},
        {"tensor": "result", "nonnegative": True},
    ],
)
def test_options_that_cannot_act_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(attnlens.errors.OptionError, match="is for"):
        CP(**options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("cp", {"tensor": "pattern"}), ("tucker", {"tensor": "pattern"}), ("embedding", {})],
)
def test_patterns_alone_can_be_analysed(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    pattern = np.tril(np.random.default_rng(0).random((6, LAYERS, HEADS, 9, 9)) + 0.01)
    store = attnlens.Store.from_arrays(pattern=pattern / pattern.sum(-1, keepdims=True))
    given = {name: options}
    run = attnlens.analyze(store, plugins=[name], options=given, out=tmp_path / "run")
    assert not run.errors
    assert run.findings and not [f for f in run.findings if f.holds]


def test_the_error_is_of_the_tensor_and_nearly_least() -> None:
    store = chance(0, length=40)
    found = CP(rank=3, n_restarts=4, n_splits=1, types=False).compute(store)
    values = store["result"].values[:, :, 1:].transpose(1, 3, 0, 2, 4)
    tensor = values.reshape(LAYERS * HEADS, -1, values.shape[-1]).astype(float)
    tensor /= np.linalg.norm(tensor, axis=(1, 2), keepdims=True)
    a = found["loadings"].values.reshape(-1, 3) * found["weights"].values
    b, c = found["token_loadings"].values, found["factor_d_model"].values
    norm = np.linalg.norm(tensor)

    def error(a: Any, b: Any, c: Any) -> float:
        return float(np.linalg.norm(tensor - np.einsum("hr,tr,fr->htf", a, b, c)) / norm)

    assert found.attrs["error"] == pytest.approx(error(a, b, c), abs=1e-6)
    products = np.einsum("htf,hr,fr->tr", tensor, a, c)
    better = products @ np.linalg.inv((a.T @ a) * (c.T @ c))
    assert error(a, better, c) > found.attrs["error"] - 1e-4


def words_of(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(t.get_text() for t in figure.findobj(Text))


def test_the_figure_of_ranks_says_what_was_chosen() -> None:
    analysis = CP(rank="1..3", types=False, **FAST)
    result = analysis.compute(chance(0))
    assert not result.attrs["stable"]
    low = result.assign(scan_core_consistency=0 * result["scan_core_consistency"] - 500)
    figure = analysis.draw("rank_selection", low)
    assert "No rank is stable" in words_of(figure)
    assert "under -20" in words_of(figure)


def test_a_head_of_two_types_is_named_by_both(grouped: tuple[CP, Any]) -> None:
    analysis, result = grouped
    high, low = 0 * result["cohesion"] + 0.9, 0 * result["cohesion_twin"]
    result = result.assign(sink=high, induction=high, sink_twin=low, induction_twin=low)
    assert "sink and induction" in words_of(analysis.draw("head_clusters", result))
