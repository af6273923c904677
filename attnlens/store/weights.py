"""The model's weights, and the names of their dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from attnlens.errors import NeedError

if TYPE_CHECKING:
    import xarray as xr

    from attnlens.store.schema import ActivationSpec

_DIMS: Final[dict[str, tuple[str, ...]]] = {
    "W_Q": ("layer", "head", "d_model", "d_head"),
    "W_K": ("layer", "kv_head", "d_model", "d_head"),
    "W_V": ("layer", "kv_head", "d_model", "d_head"),
    "W_O": ("layer", "head", "d_head", "d_model"),
    "b_Q": ("layer", "head", "d_head"),
    "b_K": ("layer", "kv_head", "d_head"),
    "b_V": ("layer", "kv_head", "d_head"),
    "b_O": ("layer", "d_model"),
    "W_E": ("d_vocab", "d_model"),
    "W_U": ("d_model", "d_vocab"),
    "b_U": ("d_vocab",),
    "W_pos": ("ctx", "d_model"),
    "q_norm_w": ("layer", "d_head"),
    "k_norm_w": ("layer", "d_head"),
    "ln1_w": ("layer", "d_model"),
    "ln1_b": ("layer", "d_model"),
    "ln2_w": ("layer", "d_model"),
    "ln2_b": ("layer", "d_model"),
    "ln_final_w": ("d_model",),
    "ln_final_b": ("d_model",),
}


def weight_dims(name: str, ndim: int) -> tuple[str, ...]:
    """Return the dimensions of a weight, by its TransformerLens name.

    Parameters
    ----------
    name : str
        ``W_Q``, ``b_O``, ...
    ndim : int
        Number of dimensions of the array; names that are not known, or known with another number
        of dimensions, get ``NAME_0``, ``NAME_1``, ...
    """
    dims = _DIMS.get(name, ())
    return dims if len(dims) == ndim else tuple(f"{name}_{i}" for i in range(ndim))


class Weights:
    """The weights of a store, loaded when they are first used.

    Parameters
    ----------
    load : callable, optional
        Returns them as a dataset; None if there are none.
    """

    def __init__(self, load: Callable[[], xr.Dataset] | None = None) -> None:
        self._load = load

    def __bool__(self) -> bool:
        return self._load is not None

    @cached_property
    def dataset(self) -> xr.Dataset:
        """All of them, by their TransformerLens names.

        Raises
        ------
        NeedError
            If there are none.
        """
        if self._load is None:
            raise NeedError(
                "The store holds no weights.",
                hint="Capture with the weights, or give weights= to Store.from_arrays.",
            )
        return self._load()

    @cached_property
    def _w_o(self) -> npt.NDArray[Any]:
        return np.asarray(self.dataset["W_O"].values, dtype=np.float32)

    def covers(self, spec: ActivationSpec) -> bool:
        """Whether W_O of all layers of an activation is there."""
        return bool(self) and "W_O" in self.dataset and max(spec.layers) < len(self.dataset["W_O"])

    def w_o(self, spec: ActivationSpec) -> npt.NDArray[Any]:
        """Return W_O of an activation's layers and heads, ``[layer, head, d_head, d_model]``.

        Raises
        ------
        NeedError
            If it is not there.
        """
        if not self.covers(spec):
            raise NeedError(
                "result = z W_O needs W_O of every layer that z has, and the store lacks it.",
                hint="Capture with the weights, or give weights={'W_O': ...}.",
            )
        heads = spec.heads if spec.heads is not None else range(self._w_o.shape[1])
        return self._w_o[np.ix_(spec.layers, list(heads))]
