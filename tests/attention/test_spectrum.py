"""Singular values and sums over them, of matrices too large to be decomposed whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnlens.attention import Attention, krylov
from attnlens.errors import NonFiniteError, UsageError
from tests.attention.oracle import Case

N = 540  # just beyond what is decomposed whole


class Matrix:
    """A dense matrix as the Krylov methods see it."""

    def __init__(self, a: Tensor) -> None:
        self.a, self.n, self.dtype, self.device = a, len(a), a.dtype, a.device

    def matmul(self, x: Tensor) -> Tensor:
        return self.a @ x

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.a.mT @ y


def spectra() -> dict[str, Tensor]:
    i = torch.arange(1, N + 1, dtype=torch.float64)
    rows = torch.arange(N)
    previous = torch.zeros(N, N, dtype=torch.float64)
    previous[rows, (rows - 1).clamp_min(0)] = 1
    return {
        "random": Case(1, 1, 1, n=N, d=16, spread=1.5).pattern[0, 0],
        "uniform": torch.ones(N, N, dtype=torch.float64).tril() / i[:, None],
        "previous": previous,
        "window": Case(1, 1, 1, n=N, d=16, window=9).pattern[0, 0],
    }


@pytest.fixture(scope="module")
def matrices() -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (a, torch.linalg.svdvals(a)) for name, a in spectra().items()}


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["random", "uniform", "previous", "window"])
def test_error_bars_hold(name: str, matrices: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Meant for 95 of 100 trials: of 40 bars on one matrix, one may miss."""
    a, s = matrices[name]
    nuclear = s.sum()
    rank = torch.special.entr(s / nuclear).sum().exp()
    shares = (s**2).cumsum(0) / (s**2).sum()
    ks = torch.tensor([1, 8, 30, 200, 500])
    missed = []
    for seed in range(10):
        g = gen(seed)
        top = krylov.leading(Matrix(a), 12, 2, g)
        missed.append(bool(((top.s - s[:12]).abs() > top.error).any()))
        assert (top.s <= s[:12] + 1e-12).all()
        q = krylov.quadrature(
            Matrix(a), float((s**2).sum()), n_probes=24, n_steps=16, n_deflate=12, generator=g
        )
        for (value, error), want in (
            (q.sum(lambda x: x), nuclear),
            (krylov.effective_rank(q), rank),
        ):
            missed.append(abs(value - float(want)) > error + 1e-9)
        value, error = krylov.top_share(q, ks, 2.0)
        missed.append(bool(((value - shares[ks - 1]).abs() > error + 1e-9).any()))
    assert sum(missed) <= 1


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_energy_of_a_flat_spectrum_is_known_well(power: float) -> None:
    shuffled = torch.eye(N, dtype=torch.float64)[torch.randperm(N, generator=gen(0))]
    before = torch.zeros(N, N, dtype=torch.float64)
    before[torch.arange(N), (torch.arange(N) - 1).clamp_min(0)] = 1.0
    for matrix in (shuffled, before):
        s = torch.linalg.svdvals(matrix) ** power
        ks = [5, 20, N // 4, N - 1, N]
        value, error = Attention.from_pattern(matrix[None]).energy(ks, power=power)
        wanted = torch.tensor([float(s[:k].sum() / s.sum()) for k in ks], dtype=torch.float64)
        assert ((value[0] - wanted).abs() <= error[0] + 1e-9).all()
        assert float(error.max()) < 0.02


def test_sums_of_squares_are_exact(matrices: dict[str, tuple[Tensor, Tensor]]) -> None:
    a, s = matrices["random"]
    total = float((s**2).sum())
    q = krylov.quadrature(Matrix(a), total, n_probes=8, n_steps=6, n_deflate=8, generator=gen(0))
    value, error = q.sum(lambda x: x**2)
    assert value == pytest.approx(total, rel=1e-9)
    assert error < 1e-3 * total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leading_triplets_from_q_and_k(dtype: torch.dtype) -> None:
    case = Case(1, 2, 1, n=N, d=16, dtype=dtype, seed=4)
    a, p = case.attention, case.pattern
    s = torch.linalg.svdvals(p)
    got = a.svd(6, n_iter=3, seed=1)
    assert got.U.shape == (1, 2, N, 6) and got.V.shape == (1, 2, N, 6)
    assert ((got.S - s[..., :6]).abs() <= 0.03 * s[..., :1]).all()
    assert ((got.S - s[..., :6]).abs() <= got.error).all()
    eye = torch.eye(6, dtype=dtype).expand(1, 2, 6, 6)
    torch.testing.assert_close(got.U.mT @ got.U, eye, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.V.mT @ got.V, eye, rtol=0, atol=1e-4)
    # A^T u = s v holds by construction, and the leading pair has converged.
    product = (a.T @ got.U).double()
    torch.testing.assert_close(product, got.V.double() * got.S[..., None, :], rtol=0, atol=1e-4)
    assert (got.V.gather(-2, got.V.abs().argmax(-2, keepdim=True)) > 0).all()
    again = a.svd(6, n_iter=3, seed=1)
    assert torch.equal(again.S, got.S) and torch.equal(again.U, got.U)
    torch.testing.assert_close(a.singular_values(6, n_iter=3, seed=1), got.S)
    want = (s**2).sum(-1) / s[..., 0] ** 2
    torch.testing.assert_close(a.stable_rank(), want, rtol=1e-4, atol=0)


def test_estimates_of_both_backings_and_their_bars() -> None:
    case = Case(1, 1, 1, n=N, d=16, seed=5)
    s = torch.linalg.svdvals(case.pattern)[0, 0]
    for a in (case.attention, Attention.from_pattern(case.pattern)):
        value, error = a.spectral_sum(lambda x: x, n_probes=16, n_steps=12)
        assert value.shape == (1, 1)
        assert abs(float(value) - float(s.sum())) <= float(error) < 0.2 * float(s.sum())
        value, error = a.energy([5, 100], n_probes=16, n_steps=12)
        want = (s**2).cumsum(0)[[4, 99]] / (s**2).sum()
        assert ((value[0, 0] - want).abs() <= error[0, 0]).all()
        value, error = a.effective_rank(n_probes=16, n_steps=12)
        want = torch.special.entr(s / s.sum()).sum().exp()
        assert abs(float(value) - float(want)) <= float(error)


def test_small_matrices_are_decomposed_whole() -> None:
    case = Case(n=30, lengths=[30, 11])
    a, p = case.attention, case.pattern
    s = torch.linalg.svdvals(p)
    torch.testing.assert_close(a.singular_values(), s)
    got = a.svd(100)
    torch.testing.assert_close(got.U * got.S[..., None, :] @ got.V.mT, p)
    value, error = a.spectral_sum(lambda x: x**3)
    torch.testing.assert_close(value, (s**3).sum(-1))
    assert (error == 0).all()
    torch.testing.assert_close(a.stable_rank(), (s**2).sum(-1) / s[..., 0] ** 2)
    empty = Attention.from_pattern(torch.zeros(1, 4, 4))
    assert empty.stable_rank().isnan().all() and empty.energy([1]).value.isnan().all()
    assert float(empty.effective_rank().value) == 0


def test_one_position() -> None:
    a = Attention.from_pattern(torch.ones(1, 1, 1))
    assert a.singular_values().tolist() == [[1.0]]
    assert a.svd(3).S.tolist() == [[1.0]]


def test_the_other_driver_is_tried_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Case(n=8).pattern
    want = torch.linalg.svdvals(p)

    def fails(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svdvals", fails)
    monkeypatch.setattr(torch.linalg, "svd", fails)
    torch.testing.assert_close(Attention.from_pattern(p).singular_values(), want)
    got = Attention.from_pattern(p).svd(8)
    torch.testing.assert_close(got.U * got.S[..., None, :] @ got.V.mT, p)


def test_what_cannot_be_decomposed_is_said_first() -> None:
    p = torch.eye(6)[None].clone()
    p[0, 2, 1] = math.nan
    with pytest.raises(NonFiniteError, match=r"\[0, 0, 2, 1\]"):
        Attention.from_pattern(p).singular_values()
    large = torch.zeros(1, 40_000, 1)
    with pytest.raises(UsageError, match="12 GiB"):
        Attention.from_qk(large, large, scale=1.0).singular_values()
    with pytest.raises(UsageError, match="probes"):
        Attention.from_qk(large[:, :N], large[:, :N], scale=1.0).spectral_sum(
            lambda x: x, n_probes=2
        )
