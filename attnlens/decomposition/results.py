"""What CP and Tucker return."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from attnlens.errors import DecompositionError

from .diagnostics import Degeneracy

if TYPE_CHECKING:
    from tensorly.cp_tensor import CPTensor
    from tensorly.tucker_tensor import TuckerTensor

    from .rank import RankSelection


@dataclass(frozen=True)
class CPFit:
    """One CP decomposition, ``tensor ~ sum_r weights[r] * outer(factors[0][:, r], ...)``.

    Unit-norm factors; weights at least 0, descending; in every mode but the last the entry of
    largest magnitude is positive.

    Attributes
    ----------
    weights : ndarray
        float64 ``[component]``.
    factors : tuple of ndarray
        float64 ``[n_k, component]`` per mode.
    dims : tuple of str
        Names of the modes.
    error : float
        Norm of the residual over the norm of the tensor, by subtraction.
    converged : bool
        Whether the fit has settled: its error on the whole tensor fell by less than 300 times `tol`
        per sweep (on the compressed tensor, and by `tol`, where no other was fitted: with
        ``polish_sweeps=0``, and of slices).
    n_sweeps : int
        Sweeps of the best restart, those on the whole tensor included.
    restart_errors : ndarray
        Relative error of each restart on the compressed tensor, before the polish. All but the best
        three stopped at a looser tolerance (1e-6 per sweep).
    degeneracy : Degeneracy
        Signs that components cancel.
    core_consistency : float
        Per cent; NaN where a component has no weight.
    rank : int
        Number of components asked for.
    nonnegative : bool
        Whether all factors were held non-negative.
    seed : int
        Seed of the restarts.
    notes : tuple of str
        What a reader should know about this fit.
    """

    weights: np.ndarray = field(repr=False)
    factors: tuple[np.ndarray, ...] = field(repr=False)
    dims: tuple[str, ...]
    error: float
    converged: bool
    n_sweeps: int
    restart_errors: np.ndarray = field(repr=False)
    degeneracy: Degeneracy
    core_consistency: float
    rank: int
    nonnegative: bool
    seed: int
    notes: tuple[str, ...] = ()
    coords: Mapping[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def cp_tensor(self) -> CPTensor:
        """The fit in tensorly's form, on numpy arrays whatever the backend."""
        import tensorly as tl
        from tensorly.cp_tensor import CPTensor

        with tl.backend_context("numpy", local_threadsafe=True):
            return CPTensor((self.weights.copy(), [f.copy() for f in self.factors]))

    @property
    def explained(self) -> float:
        """Share of the tensor's squared norm that the fit explains."""
        return 1.0 - self.error**2

    @cached_property
    def dataset(self) -> xr.Dataset:
        """``weights[component]``, ``factor_DIM[DIM, component]``; diagnostics as attributes."""
        data: dict[str, Any] = {"weights": ("component", self.weights)}
        for dim, factor in zip(self.dims, self.factors, strict=True):
            data[f"factor_{dim}"] = ((dim, "component"), factor)
        data["restart_errors"] = ("restart", self.restart_errors)
        coords = {**self.coords, "component": np.arange(self.rank)}
        return xr.Dataset(data, coords=coords, attrs=self.diagnostics())

    def diagnostics(self) -> dict[str, Any]:
        """Every diagnostic as a plain number or text; flags are 0 or 1."""
        return {
            "method": "cp",
            "modes": list(self.dims),
            "rank": self.rank,
            "nonnegative": int(self.nonnegative),
            "seed": self.seed,
            "error": self.error,
            "explained": self.explained,
            "converged": int(self.converged),
            "n_sweeps": self.n_sweeps,
            "restart_error_min": float(self.restart_errors.min()),
            "restart_error_max": float(self.restart_errors.max()),
            "degeneracy_min_cosine": self.degeneracy.min_cosine,
            "degeneracy_energy": self.degeneracy.energy,
            "degenerate": int(self.degeneracy.degenerate),
            "core_consistency": self.core_consistency,
            "notes": json.dumps(list(self.notes), ensure_ascii=False),
        }


@dataclass(frozen=True)
class CPScan(Mapping[int, CPFit]):
    """CP fits of several ranks: a mapping from rank to `CPFit`.

    `best`, and with it ``cp_tensor``, ``weights``, ``factors``, ``dataset`` and ``error``, is the
    fit of the rank that split-half reproducibility selected.

    Attributes
    ----------
    fits : dict
        `CPFit` by rank.
    selection : RankSelection or None
        None when no mode to split along was named.
    """

    fits: Mapping[int, CPFit]
    selection: RankSelection | None = None

    def __getitem__(self, rank: int) -> CPFit:
        return self.fits[rank]

    def __iter__(self) -> Any:
        return iter(self.fits)

    def __len__(self) -> int:
        return len(self.fits)

    @property
    def best(self) -> CPFit:
        """The fit of the selected rank.

        Raises
        ------
        DecompositionError
            No rank was selected because no mode to split along was named.
        """
        if self.selection is None:
            raise DecompositionError(
                f"No rank was selected among {list(self.fits)}: a scan selects only when it knows "
                "along which mode to split.",
                hint='Pass split="NAME OF A MODE" (or rank="auto"), or index the scan by a rank.',
            )
        return self.fits[self.selection.chosen]

    @property
    def cp_tensor(self) -> CPTensor:
        """The selected fit in tensorly's form."""
        return self.best.cp_tensor

    @property
    def weights(self) -> np.ndarray:
        """Weights of the selected fit."""
        return self.best.weights

    @property
    def factors(self) -> tuple[np.ndarray, ...]:
        """Factors of the selected fit."""
        return self.best.factors

    @property
    def error(self) -> float:
        """Relative error of the selected fit."""
        return self.best.error

    @property
    def converged(self) -> bool:
        """Whether the selected fit converged."""
        return self.best.converged

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the selected fit."""
        return self.best.notes

    @property
    def dataset(self) -> xr.Dataset:
        """The selected fit's dataset, the curves over ranks added (``scan_*[rank]``)."""
        best = self.best.dataset
        return best.assign({f"scan_{k}": v for k, v in self.curves.items()})

    @cached_property
    def curves(self) -> xr.Dataset:
        """Error, core consistency, degeneracy, convergence and stability against ``rank``."""
        ranks = list(self.fits)
        fits = list(self.fits.values())
        data: dict[str, Any] = {
            "error": ("rank", np.array([f.error for f in fits])),
            "core_consistency": ("rank", np.array([f.core_consistency for f in fits])),
            "min_cosine": ("rank", np.array([f.degeneracy.min_cosine for f in fits])),
            "converged": ("rank", np.array([f.converged for f in fits], dtype=np.int8)),
            "restart_errors": (("rank", "restart"), np.stack([f.restart_errors for f in fits])),
        }
        attrs: dict[str, Any] = {}
        if self.selection is not None:
            data["stability"] = ("rank", np.asarray(self.selection.stability))
            if self.selection.chance is not None:
                data["chance"] = ("rank", self.selection.chance)
            attrs = {
                "chosen": self.selection.chosen,
                "reason": self.selection.reason,
                "confidence": self.selection.confidence,
                "split": self.selection.split,
            }
        return xr.Dataset(data, coords={"rank": ranks}, attrs=attrs)


@dataclass(frozen=True)
class Interaction:
    """One entry of a Tucker core.

    Attributes
    ----------
    index : dict of str to int
        By mode: its component (for a mode left whole, its entry).
    value : float
        The core's entry: strength and sign.
    share : float
        Share of the tensor's squared norm.
    """

    index: dict[str, int]
    value: float
    share: float


@dataclass(frozen=True)
class TuckerFit:
    """A Tucker decomposition with its core in HOSVD normal form.

    Factors have orthonormal columns; the core's slices along a mode are orthogonal to one another
    and descend in norm; the largest-magnitude entry of each factor column is positive.

    Attributes
    ----------
    core : ndarray
        float64 ``[c_1, ..., c_N]``; modes left whole have their full size.
    factors : tuple of ndarray or None
        float64 ``[n_k, c_k]``; None for a mode left whole.
    dims : tuple of str
        Names of the modes.
    ranks : tuple of int
        Sizes of the core.
    spectra : dict of str to ndarray
        By mode whose rank was given as a share of the energy: the squared singular values of the
        tensor's unfolding, as shares of its squared norm, descending.
    error : float
        Norm of the residual over the norm of the tensor.
    converged : bool
        Whether the last sweep changed the error by less than 1e-6.
    n_sweeps : int
        HOOI sweeps after the ST-HOSVD.
    notes : tuple of str
        What a reader should know.
    """

    core: np.ndarray = field(repr=False)
    factors: tuple[np.ndarray | None, ...] = field(repr=False)
    dims: tuple[str, ...]
    ranks: tuple[int, ...]
    spectra: Mapping[str, np.ndarray] = field(repr=False)
    error: float
    converged: bool
    n_sweeps: int
    notes: tuple[str, ...] = ()
    coords: Mapping[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def tucker_tensor(self) -> TuckerTensor:
        """The fit in tensorly's form, on numpy; a mode left whole gets an identity factor."""
        import tensorly as tl
        from tensorly.tucker_tensor import TuckerTensor

        factors = [
            np.eye(n) if f is None else f.copy()
            for f, n in zip(self.factors, self.core.shape, strict=True)
        ]
        with tl.backend_context("numpy", local_threadsafe=True):
            return TuckerTensor((self.core.copy(), factors))

    @property
    def explained(self) -> float:
        """Share of the tensor's squared norm that the fit explains."""
        return 1.0 - self.error**2

    def interactions(self, n: int = 10) -> list[Interaction]:
        """Strongest entries of the core, by descending share of the tensor's energy.

        Entries of equal magnitude keep the core's order.
        """
        flat = np.abs(self.core).reshape(-1)
        top = np.argsort(-flat, kind="stable")[:n]
        energy = float(np.square(self.core / max(flat.max(), 1e-300)).sum())
        out = []
        for place in top:
            index = np.unravel_index(int(place), self.core.shape)
            value = float(self.core[index])
            share = 0.0
            if value:
                share = float(self.explained * (value / flat.max()) ** 2 / energy)
            named = {d: int(i) for d, i in zip(self.dims, index, strict=True)}
            out.append(Interaction(named, value, share))
        return out

    @cached_property
    def dataset(self) -> xr.Dataset:
        """``core[DIM_component, ...]``, ``factor_DIM[DIM, DIM_component]``, ``energy_DIM``.

        A mode left whole keeps its own name in the core and has no factor.
        """
        names = [
            d if f is None else f"{d}_component"
            for d, f in zip(self.dims, self.factors, strict=True)
        ]
        data: dict[str, Any] = {"core": (names, self.core)}
        coords = dict(self.coords)
        for dim, name, factor in zip(self.dims, names, self.factors, strict=True):
            if factor is None:
                continue
            data[f"factor_{dim}"] = ((dim, name), factor)
            coords[name] = np.arange(factor.shape[1])
            if dim in self.spectra:
                data[f"energy_{dim}"] = (f"{dim}_direction", self.spectra[dim])
        attrs = {
            "method": "tucker",
            "modes": list(self.dims),
            "ranks": list(self.ranks),
            "error": self.error,
            "explained": self.explained,
            "converged": int(self.converged),
            "n_sweeps": self.n_sweeps,
            "notes": json.dumps(list(self.notes), ensure_ascii=False),
        }
        return xr.Dataset(data, coords=coords, attrs=attrs)
