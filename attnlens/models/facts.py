"""What is known about a model: plain data, without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Positions = Literal["absolute", "rotary", "alibi", "relative", "none"]


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that analyses and stores rely on.

    Attributes
    ----------
    name : str
        As the user gave it (an alias, a repository, a folder), without the revision.
    source : str
        Where the weights are from: a repository's full name, a folder's absolute path, or
        ``"memory"`` for a live model.
    revision : str or None
        The commit for a model of the hub, else what was asked for.
    architecture : str
        Class of the Hugging Face model, such as ``"LlamaForCausalLM"``.
    n_layers, n_heads, n_kv_heads, d_model, d_head, d_vocab, n_ctx : int
        Query head h reads key-value head ``h // (n_heads // n_kv_heads)``.
    positions : {"absolute", "rotary", "alibi", "relative", "none"}
        How the model knows where a token is.
    causal : bool
        Whether a query sees only keys at and before its own position.
    windows : tuple of (int or None)
        Per layer, the number of keys that a query sees, its own included; None for all.
    soft_cap : float or None
        Scores are bent to ``soft_cap * tanh(scores / soft_cap)`` before masking.
    scales : tuple of float
        Per layer, the factor beta in ``beta * q_rot . k_rot``.
    qk_norm : bool
        Whether queries and keys are normalised per head before their product.
    dtype : str
        Of the parameters, such as ``"float32"``.
    device : str
        Where tokens enter the model; ``""`` before the weights are loaded.
    mode : {"raw", "compatibility"}
        The bridge's mode. Compatibility mode folds weights, which changes v and z.
    n_params : int
    weights_hash : str or None
        sha256 over the parameters in name order; None before the weights are loaded or where
        some are offloaded.
    config : dict
        The configuration, JSON-able.
    rotary_dim : int
        How many of a head's dimensions are rotated; 0 where none are.
    alibi_slopes : tuple of float or None
        Per head, the factor m of ALiBi's ``-m * (query_pos - key_pos)``, added after scaling.
    sinks : bool
        Whether attention has a learned sink, so that rows of the pattern sum to less than 1.
    parallel : bool
        Whether attention and MLP read the same input (GPT-NeoX, GPT-J).
    norm : {"layer", "rms", "none"}
        The kind of normalisation before attention.
    """

    name: str
    source: str
    revision: str | None
    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    n_ctx: int
    positions: str
    causal: bool
    windows: tuple[int | None, ...]
    soft_cap: float | None
    scales: tuple[float, ...]
    qk_norm: bool
    dtype: str
    device: str
    mode: str
    n_params: int
    weights_hash: str | None
    config: dict[str, Any]
    rotary_dim: int = 0
    alibi_slopes: tuple[float, ...] | None = None
    sinks: bool = False
    parallel: bool = False
    norm: str = "layer"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict with every field."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelFacts:
        """Rebuild the facts from `to_json`'s dict.

        Raises
        ------
        ValueError
            If a field is missing. Unknown fields are ignored, so that stores made by a later
            version of attnlens can be read.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        missing = [
            name
            for name, field in known.items()
            if name not in values and field.default is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"facts of a model lack {', '.join(missing)}")
        chosen: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in known
        }
        return cls(**chosen)

    @property
    def size(self) -> int:
        """Bytes of the parameters in the model's dtype."""
        width = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}.get(self.dtype, 4)
        return self.n_params * width


def _plain(value: Any) -> Any:
    """Turn a value into what JSON can hold; what it cannot becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
