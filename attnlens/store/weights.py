"""Names of the dimensions of weights."""

from __future__ import annotations

from typing import Final

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
