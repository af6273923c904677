"""How far rounding alone may move a head's numbers: the tolerances of the certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: A certificate whose tolerance is wider than this says nothing: the dtype is too coarse.
UNDECIDED = 0.1


def unit_roundoff(dtype: Any) -> float:
    """Return the spacing of a dtype's numbers at 1."""
    import torch

    return float(torch.finfo(dtype).eps)


def working_dtype(seen: dict[str, Tensor]) -> Any:
    """Return the dtype that decides a layer's rounding.

    Many families compute the softmax in float32 whatever their weights are: a float64 pattern that
    float32 can hold was computed so.
    """
    import torch

    dtype = next(iter(seen.values())).dtype
    pattern = seen.get("pattern")
    if dtype == torch.float64 and pattern is not None and bool((pattern.float() == pattern).all()):
        return torch.float32
    return dtype


def largest_score(seen: dict[str, Tensor], facts: Any, layer: int) -> Tensor:
    """Bound each head's scores: ``beta max |q_i| max |k_j|``, [head].

    By Cauchy and Schwarz no score is larger; a soft cap bounds it too.
    """
    import torch

    q = seen.get("q_rot", seen.get("q"))
    k = seen.get("k_rot", seen.get("k"))
    if q is None or k is None:
        return torch.full((facts.n_heads,), 64.0)
    groups = facts.n_heads // facts.n_kv_heads
    longest = torch.linalg.vector_norm(q.float(), dim=-1).amax((0, 1))
    keys = torch.linalg.vector_norm(k.float(), dim=-1).amax((0, 1)).repeat_interleave(groups)
    found: Tensor = (abs(facts.scales[layer]) * longest * keys).cpu()
    return found if facts.soft_cap is None else found.clamp(max=facts.soft_cap)


def pattern_tolerance(
    seen: dict[str, Tensor], facts: Any, layer: int, n: int, condition: float = 1.0
) -> Tensor:
    """Bound what rounding does to each head's weights, in absolute value, [head].

    A score is a sum of d_head products of numbers that are themselves sums of d_model products. In
    float32 and float64 the order of summation is what changes, and with K terms it changes a sum
    by about ``eps sqrt(K)`` of their size; 16-bit numbers are summed in float32 and rounded once
    per step, so that K does not count, but the errors of d_head products add up at random:
    ``eps / sqrt(d_head)`` of the bound on the score. The softmax turns an absolute error of a
    score into a relative error of a weight, which is at most 1, and its own sum over n keys adds
    ``eps sqrt(n)``. Twice the sum of these is allowed.

    Parameters
    ----------
    seen : dict of str to Tensor
        ``q_rot`` and ``k_rot`` of the layer.
    facts : ModelFacts
    layer : int
    n : int
        Number of keys.
    condition : float
        How much a change of basis before may have enlarged rounding.

    References
    ----------
    Higham, *Accuracy and Stability of Numerical Algorithms* (2002), sections 2.8 and 3.1:
    the statistical model of rounding errors, in which the constant K becomes its square root.
    """
    import torch

    dtype = working_dtype(seen)
    eps = unit_roundoff(dtype)
    score = largest_score(seen, facts, layer)
    if dtype in (torch.float32, torch.float64):
        spread = facts.d_model**0.5 + facts.d_head**0.5
    else:
        spread = 4 / facts.d_head**0.5
    allowed: Tensor = 2 * eps * (n**0.5 + score * spread * condition)
    return allowed


def value_tolerance(
    seen: dict[str, Tensor], facts: Any, layer: int, n: int, condition: float = 1.0
) -> Tensor:
    """Bound what rounding does to each head's output, as a share of its longest value, [head].

    The weights' own error (:func:`pattern_tolerance`) acts on values of at most that length, and
    the values are sums of d_model products.
    """
    import torch

    dtype = working_dtype(seen)
    wide = facts.d_model**0.5 if dtype in (torch.float32, torch.float64) else 1.0
    own = pattern_tolerance(seen, facts, layer, n, condition)
    return own + 2 * unit_roundoff(dtype) * wide * condition
