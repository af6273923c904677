"""cp where there is little or nothing to decompose, and options as people write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnlens_plugins.cp import CP
from attnlens_plugins.cp.clusters import cohesion, group, silhouettes
from attnlens_plugins.cp.sample import choose
from attnlens_plugins.cp.tensors import head_outputs

import attnlens

from .planted import D_MODEL, chance, planted

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def arrays(layers: int, heads: int, prompts: int = 4, length: int = 6, *, fill: Any = None) -> Any:
    rng = np.random.default_rng(0)
    shape = (prompts, layers, length, heads, 3)
    z = rng.standard_normal(shape) if fill is None else np.full(shape, float(fill))
    return attnlens.Store.from_arrays(
        z=z, weights={"W_O": rng.standard_normal((layers, heads, 3, 8))}
    )


def show(result: Any, folder: Path, analysis: CP) -> None:
    """Draw everything that there is; what there is not is skipped with a reason."""
    for kind, draw in (("figure", analysis.draw), ("table", analysis.tabulate)):
        for drawing in analysis.drawings(kind):
            try:
                draw(drawing.name, result)
            except attnlens.Skip as reason:
                assert str(reason)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 2), (3, 1)])
def test_very_few_heads(layers: int, heads: int, tmp_path: Path) -> None:
    analysis = CP(n_restarts=2, n_splits=1)
    result = analysis.compute(arrays(layers, heads))
    assert result["loadings"].sizes["layer"] == layers
    assert not [f for f in analysis.findings(result) if f.holds]
    show(result, tmp_path, analysis)


@pytest.mark.parametrize("fill", [0, 1])
def test_zero_and_constant_tensors(fill: int, tmp_path: Path) -> None:
    analysis = CP(rank=2, n_restarts=2, n_splits=1)
    result = analysis.compute(arrays(2, 4, fill=fill))
    assert np.isfinite(result["weights"]).all()
    assert np.isfinite(result.attrs["error"])
    if not fill:
        assert (result["weights"] == 0).all()
        assert result["rebuild_error"].isnull().all()
    show(result, tmp_path, analysis)


def test_one_prompt_of_one_token(tmp_path: Path) -> None:
    analysis = CP(rank=1, n_restarts=2)
    result = analysis.compute(arrays(1, 3, prompts=1, length=1))
    assert result.sizes["token"] == 1
    assert result.attrs["stable"] == 0
    assert "too few" in result.attrs["reason"]
    show(result, tmp_path, analysis)


def test_prompts_of_unequal_length_give_their_tokens() -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 9, 1, 6]
    z = rng.standard_normal((4, 1, 9, 3, 4))
    store = attnlens.Store.from_arrays(
        z=z, lengths=lengths, weights={"W_O": rng.standard_normal((1, 3, 4, 8))}
    )
    result = CP(rank=1, n_restarts=2).compute(store)
    found = list(zip(result["token_prompt"].values, result["token_pos"].values, strict=True))
    # A prompt of one token keeps it: it has no other.
    expected = [(p, i) for p, n in enumerate(lengths) for i in range(1 if n > 1 else 0, n)]
    assert found == expected
    pooled = CP(rank=1, n_restarts=2, tokens="pooled").compute(store)
    assert list(pooled["prompt"].values) == [0, 1, 2, 3]


def test_the_tensor_is_read_in_blocks_and_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = planted(noise=0.2)
    sample = choose(store, "result", most=10_000, seed=0, exclude_first=True)
    how: dict[str, Any] = {
        "pooled": False, "scaled": True, "center": True, "max_rank": 3, "seed": 0,
    }  # fmt: skip
    one = head_outputs(store, "result", sample, **how)
    monkeypatch.setattr("attnlens_plugins.cp.tensors.BLOCK", 1)
    monkeypatch.setattr("attnlens_plugins.cp.tensors.READ_AT_ONCE", 0)
    largest = []
    real = attnlens.Store.units

    def units(self: Any) -> Any:
        for unit in real(self):
            yield _Watch(unit, largest)

    monkeypatch.setattr(attnlens.Store, "units", units)
    two = head_outputs(store, "result", sample, **how)
    assert max(largest) == 12 * 11 * D_MODEL  # one prompt
    np.testing.assert_allclose(two.gram, one.gram, rtol=1e-5, atol=1e-4)
    assert two.bases is not None and one.bases is not None
    rebuilt = [np.einsum("hab,ta,db->htd", t.core, *t.bases) for t in (one, two)]
    np.testing.assert_allclose(rebuilt[1], rebuilt[0], atol=1e-4)


class _Watch:
    """A unit that notes how much is read at once."""

    def __init__(self, unit: Any, largest: list[int]) -> None:
        self._unit, self._largest = unit, largest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)

    def __getitem__(self, name: str) -> Any:
        return _Lazy(self._unit[name], self._largest)


class _Lazy:
    def __init__(self, data: Any, largest: list[int]) -> None:
        self._data, self._largest = data, largest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def __getitem__(self, key: Any) -> Any:
        return self._data[key]

    def isel(self, **which: Any) -> Any:
        part = self._data.isel(**which)
        self._largest.append(int(np.prod(part.shape)))
        return part


def test_range_finder_agrees_with_the_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    wide = np.einsum("plnhr,rd->plnhd", rng.standard_normal((4, 1, 9, 4, 5)), rng.random((5, 300)))
    store = attnlens.Store.from_arrays(result=wide, weights={"W_O": np.ones((1, 4, 2, 300))})
    exact = CP(rank=3, n_restarts=2).compute(store)
    monkeypatch.setattr("attnlens_plugins.cp.tensors._OVERSAMPLE", 1000)
    found = CP(rank=3, n_restarts=2).compute(store)
    assert found.attrs["error"] == pytest.approx(exact.attrs["error"], abs=1e-4)
    np.testing.assert_allclose(found["weights"], exact["weights"], rtol=0.01)


@pytest.mark.parametrize(
    ("given", "kept", "ranks"),
    [
        ("auto", "auto", list(range(1, 9))),
        ("1..3", "1..3", [1, 2, 3]),
        ("2,4,8", "2,4,8", [2, 4, 8]),
        ([2, 4], "2,4", [2, 4]),
        (range(1, 4), "1,2,3", [1, 2, 3]),
        ("6", 6, [6]),
        (6, 6, [6]),
    ],
)
def test_ranks_are_read(given: Any, kept: Any, ranks: list[int]) -> None:
    options = CP(rank=given).options
    assert options.rank == kept
    assert options.ranks(8) == ranks
    assert CP(**options.model_dump(mode="json")).options == options


@pytest.mark.parametrize("wrong", ["0", "3..1", "few", -2, 1.5, True, "1..", ""])
def test_wrong_ranks_are_refused(wrong: Any) -> None:
    with pytest.raises(attnlens.errors.OptionError, match=r"cp\.rank"):
        CP(rank=wrong)


@pytest.mark.parametrize("tensor", ["result", "pattern", "second_moment", "qk", "ov", "z"])
def test_needs_follow_the_tensor(tensor: str) -> None:
    needs = CP(tensor=tensor).requires
    assert "twin" in needs
    assert ("pattern" in needs) == (tensor == "pattern")
    assert ("result" in needs) == (tensor == "result")
    assert not {"z", "result"} & set(needs) or tensor not in ("qk", "ov", "pattern")


def test_non_finite_tensors_are_refused() -> None:
    store = planted(noise=0.1)
    values = store["result"].values.copy()
    values[2, 1, 3, 4, 5] = np.inf
    with pytest.raises(attnlens.errors.AttnlensError):
        CP(rank=2).compute(
            attnlens.Store.from_arrays(result=values, weights={"W_O": np.ones((2, 6, 2, D_MODEL))})
        )


def test_random_loadings_have_silhouettes_but_no_cohesion() -> None:
    rng = np.random.default_rng(0)
    found = group(rng.standard_normal((24, 2)))
    assert found.best > 0.5  # directions in the plane always fall into groups
    rows = rng.standard_normal((24, 500))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.nanmax(cohesion(rows @ rows.T, found.label)) < 0.2


def test_silhouettes_are_scikit_learns() -> None:
    from sklearn.metrics import silhouette_samples

    rng = np.random.default_rng(0)
    points = rng.random((15, 2))
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    label = np.array([0] * 5 + [1] * 6 + [2] * 3 + [3])
    np.testing.assert_allclose(
        silhouettes(distance, label), silhouette_samples(distance, label, metric="precomputed")
    )


def test_figures_are_drawn_again_without_torch(tmp_path: Path) -> None:
    store = planted(noise=0.1, twins=[chance(0)])
    run = attnlens.analyze(
        store, [CP(rank="1..3", n_restarts=2, n_splits=1, types=False)], out=tmp_path / "run"
    )
    assert not run.errors
    names = {f.split(".")[1] for f in run.figures}
    assert names == {
        "head_loadings", "rank_selection", "head_clusters", "token_loadings", "vocabulary",
        "positions",
    }  # fmt: skip
    assert len(run.record["analyses"][0]["highlights"]) == 1
    code = (
        "import sys; from attnlens.runs import redraw;"
        f"run = redraw({str(tmp_path / 'run')!r}); assert not run.errors;"
        "assert not {'torch', 'sklearn'} & set(sys.modules), 'too much was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("tensor", ["result", "z", "second_moment", "qk", "ov"])
def test_tensors_with_signs_have_no_nonnegative_factors(tensor: str) -> None:
    with pytest.raises(attnlens.errors.OptionError, match=f"{tensor} has entries of both signs"):
        CP(tensor=tensor, nonnegative=True)
