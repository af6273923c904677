"""The vocabulary: every activation's name, dimensions, and how it is stored.

One table, read by the planner, the recorder, the store and the documentation.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

#: The value of masked cells in stored ``scores``: finite, and no score can be that low.
MASKED_SCORE: Final = -1.0e30

Codec = Literal["zstd", "blosc"]


@dataclass(frozen=True)
class Activation:
    """One named tensor inside a model.

    Attributes
    ----------
    name : str
    dims : tuple of str
        Dimensions in the store, in order; the first two are always ``prompt`` and ``layer``.
    hook : str or None
        Hook point of TransformerLens, ``{layer}`` to be filled in; None if it is derived.
    derived_from : tuple of str
        What it is computed from on reading, when it has no hook of its own.
    dtype : {"float16", "float32"}
        How it is stored unless asked otherwise. float16 is used only where the values fit.
    codec : {"zstd", "blosc"}
        zstd for patterns and scores, blosc (lz4, bitshuffle) with crc32c for the rest.
    what : str
        One line for people.
    """

    name: str
    dims: tuple[str, ...]
    hook: str | None
    what: str
    dtype: Literal["float16", "float32"] = "float16"
    codec: Codec = "blosc"
    derived_from: tuple[str, ...] = ()

    @property
    def head_dim(self) -> str | None:
        """``"head"``, ``"kv_head"``, or None where the activation has no heads."""
        return next((d for d in self.dims if d in ("head", "kv_head")), None)


_Q = ("prompt", "layer", "pos", "head", "d_head")
_K = ("prompt", "layer", "pos", "kv_head", "d_head")
_SQUARE = ("prompt", "layer", "head", "query_pos", "key_pos")
_RESIDUAL = ("prompt", "layer", "pos", "d_model")

#: Every activation by name.
ACTIVATIONS: Final[dict[str, Activation]] = {
    a.name: a
    for a in (
        Activation("q", _Q, "blocks.{layer}.attn.hook_q", "queries, before rotary and QK-norm"),
        Activation("k", _K, "blocks.{layer}.attn.hook_k", "keys, before rotary and QK-norm"),
        Activation("v", _K, "blocks.{layer}.attn.hook_v", "values"),
        Activation(
            "q_rot",
            _Q,
            "blocks.{layer}.attn.hook_rot_q",
            "queries as the scores use them; q where there is neither rotary nor QK-norm",
            dtype="float32",
        ),
        Activation(
            "k_rot",
            _K,
            "blocks.{layer}.attn.hook_rot_k",
            "keys as the scores use them; k where there is neither rotary nor QK-norm",
            dtype="float32",
        ),
        Activation("z", _Q, "blocks.{layer}.attn.hook_z", "head outputs before W_O"),
        Activation(
            "result",
            ("prompt", "layer", "pos", "head", "d_model"),
            None,
            "z W_O: what each head adds to the residual stream, without b_O",
            derived_from=("z", "weights"),
        ),
        Activation(
            "scores",
            _SQUARE,
            "blocks.{layer}.attn.hook_attn_scores",
            "scaled scores before the softmax; masked cells hold -1e30",
            dtype="float32",
            codec="zstd",
        ),
        Activation(
            "pattern",
            _SQUARE,
            "blocks.{layer}.attn.hook_pattern",
            "attention weights: softmax of the scores over key_pos",
            codec="zstd",
        ),
        Activation("resid_pre", _RESIDUAL, "blocks.{layer}.hook_resid_pre", "input of the block"),
        Activation("attn_out", _RESIDUAL, "blocks.{layer}.hook_attn_out", "output of attention"),
    )
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that looks most like `name`, for error messages."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return found[0] if found else None
