"""How scores are made of queries and keys: what a store must know to do without patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from attnlens.activations import MASKED_SCORE
from attnlens.store.schema import ActivationSpec, Manifest

if TYPE_CHECKING:
    from attnlens.attention import Attention

#: What is computed from ``q_rot`` and ``k_rot`` on reading.
DERIVED: Final = ("scores", "pattern")


@dataclass(frozen=True)
class ScoreRule:
    """How one layer's scores and weights follow from its rotated queries and keys.

    Attributes
    ----------
    scale : float
        Scores are ``scale q . k``.
    causal : bool
    window : int or None
        A query sees itself and the ``window - 1`` keys nearest to it.
    soft_cap : float or None
        Scores s become ``soft_cap tanh(s / soft_cap)``.
    slopes : tuple of float or None
        Per head of the model, ALiBi's m in ``-m |query - key|``.
    """

    scale: float
    causal: bool
    window: int | None = None
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None

    def scores(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        rows: npt.NDArray[np.intp],
        first: int,
        head: int,
    ) -> npt.NDArray[Any]:
        """Return the scores of chosen queries over a run of keys.

        Parameters
        ----------
        q : ndarray, [query, d_head]
        k : ndarray, [key, d_head]
        rows : ndarray of int, [query]
            The queries' positions.
        first : int
            The first key's position.
        head : int
            Number of the head.

        Returns
        -------
        ndarray, [query, key]
            Masked cells hold `attnlens.activations.MASKED_SCORE`.
        """
        made: npt.NDArray[Any] = (q * q.dtype.type(self.scale)) @ k.T
        back = rows[:, None] - np.arange(first, first + len(k))
        if self.soft_cap is not None:
            made = np.tanh(made / self.soft_cap, out=made) * made.dtype.type(self.soft_cap)
        if self.slopes is not None:
            made -= (self.slopes[head] * np.abs(back)).astype(made.dtype)
        if self.causal:
            made[back < 0] = MASKED_SCORE
        if self.window is not None:
            made[np.abs(back) >= self.window] = MASKED_SCORE
        return made

    def keys(self, low: int, high: int, n: int) -> tuple[int, int]:
        """Return a range that holds all keys seen by queries from `low` to `high`, both included.

        Parameters
        ----------
        low, high : int
        n : int
            Tokens of the prompt.
        """
        width = n if self.window is None else self.window
        return max(0, low - width + 1), min(n, high + 1 if self.causal else high + width)

    def attention(
        self, q: Any, k: Any, heads: Sequence[int] | None, lengths: Any = None
    ) -> Attention:
        """Return the handle over queries and keys.

        Parameters
        ----------
        q, k : array, [..., head, pos, d_head]
        heads : sequence of int or None
            Numbers of the heads in `q`; None for all.
        lengths : array of int, optional
            Real positions of each prompt.
        """
        from attnlens.attention import Attention

        slopes = None if self.slopes is None else np.asarray(self.slopes)
        return Attention.from_qk(
            q,
            k,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            soft_cap=self.soft_cap,
            alibi=slopes if slopes is None or heads is None else slopes[list(heads)],
            lengths=lengths,
        )


def rule_of(facts: Mapping[str, Any], layer: int) -> ScoreRule | None:
    """Return the rule of a layer, or None where the facts do not settle it.

    Parameters
    ----------
    facts : mapping
        ``ModelFacts.to_json()``.
    layer : int
    """
    scales = facts.get("scales") or ()
    slopes = facts.get("alibi_slopes")
    unknown = (
        not 0 <= layer < len(scales)
        or facts.get("causal") is None
        or facts.get("sinks")
        or facts.get("positions") == "relative"
        or (facts.get("positions") == "alibi" and slopes is None)
    )
    if unknown:
        return None
    windows = facts.get("windows") or ()
    return ScoreRule(
        float(scales[layer]),
        bool(facts["causal"]),
        windows[layer] if layer < len(windows) else None,
        facts.get("soft_cap"),
        None if slopes is None else tuple(float(m) for m in slopes),
    )


def derived_spec(manifest: Manifest, name: str) -> ActivationSpec | None:
    """Return what a store gives of ``pattern`` or ``scores`` that it does not hold.

    Returns
    -------
    ActivationSpec or None
        None where it cannot be computed: it is held, or whole queries and keys are not, or the
        model's facts do not say how scores are made of them.
    """
    if name not in DERIVED or name in manifest.activations:
        return None
    q, k = manifest.activations.get("q_rot"), manifest.activations.get("k_rot")
    if q is None or k is None or q.positions is not None or k.positions is not None:
        return None
    if "float16" in (q.dtype, k.dtype):  # weights would be off by up to 6e-3
        return None
    rules = [rule_of(manifest.model, layer) for layer in q.layers]
    if q.layers != k.layers or None in rules:
        return None
    # Scores under ALiBi are known up to a constant per row, which the softmax does not see.
    if name == "scores" and any(rule is not None and rule.slopes for rule in rules):
        return None
    if (q.heads is not None or k.heads is not None) and not _reads(manifest, q, k):
        return None
    return ActivationSpec(dtype="float32", layers=q.layers, heads=q.heads)


def _reads(manifest: Manifest, q: ActivationSpec, k: ActivationSpec) -> bool:
    """Whether the key-value heads that the chosen heads read are there."""
    heads, groups = manifest.model.get("n_heads"), manifest.model.get("n_kv_heads")
    if not heads or not groups:
        return False
    wanted = {h // (heads // groups) for h in (q.heads or range(heads))}
    return wanted <= set(k.heads or range(groups))


def key_places(manifest: Manifest, n_q: int, n_k: int) -> npt.NDArray[np.intp]:
    """Return, for each stored head, the place of its keys among the stored ones, ``[head]``.

    Parameters
    ----------
    manifest : Manifest
    n_q, n_k : int
        How many heads and key-value heads are stored.
    """
    q, k = manifest.activations["q_rot"], manifest.activations["k_rot"]
    if q.heads is None and k.heads is None:
        return np.arange(n_q) // max(1, n_q // n_k)
    heads, groups = int(manifest.model["n_heads"]), int(manifest.model["n_kv_heads"])
    there = {number: place for place, number in enumerate(k.heads or range(groups))}
    return np.array([there[h // (heads // groups)] for h in (q.heads or range(heads))])
