"""What a layer's attention writes, all heads together: compared, and traced to heads if it fails.

A head's own output z is read before it is multiplied with W_O. What acts on it behind that place
shows in the layer's output alone; then each head is tried with the output weights of the others
at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import attnlens
from attnlens_plugins.equivariance.live import Call
from attnlens_plugins.equivariance.rounding import unit_roundoff, working_dtype

if TYPE_CHECKING:
    from torch import Tensor


def output_change(new: Tensor, old: Tensor) -> float:
    """Return the largest change of an output over the longest one."""
    import torch

    longest = torch.linalg.vector_norm(old.double(), dim=-1).max().clamp_min(1e-30)
    apart: Tensor = torch.linalg.vector_norm(new.double() - old.double(), dim=-1).max()
    return float((apart / longest).item())


def output_tolerance(call: Call, weights: Mapping[str, Any], heads: Tensor) -> float:
    """Bound what rounding does to a layer's output, as a share of its longest.

    Each head's error, at most `heads` of its longest value, passes through W_O, whose norm it is
    multiplied by; the errors of all heads add up. The sum itself has n_heads x d_head terms.

    Parameters
    ----------
    call : Call
    weights : mapping
        With ``W_O`` [head, d_head, d_model].
    heads : Tensor[head]
        See :func:`~attnlens_plugins.equivariance.rounding.value_tolerance`.
    """
    import torch

    facts, out = call.model.facts, call.seen["out"].double()
    longest = float(torch.linalg.vector_norm(out, dim=-1).max()) or 1.0
    values = torch.linalg.vector_norm(call.seen["v"].double(), dim=-1).amax((0, 1)).cpu().numpy()
    values = np.repeat(values, facts.n_heads // facts.n_kv_heads)
    grams = np.einsum("hdm,hem->hde", weights["W_O"], weights["W_O"])
    norms = np.sqrt(np.linalg.eigvalsh(grams)[:, -1].clip(0))
    passed = float((heads.double().numpy() * values * norms).sum())
    eps = unit_roundoff(working_dtype(call.seen))
    terms = (facts.n_heads * facts.d_head) ** 0.5
    summed = 2 * eps * terms * float((values * norms).max())
    return float((passed + summed) / longest + 4 * eps)


def heads_behind(
    call: Call,
    again: Callable[[], dict[str, Tensor]],
    expected: Callable[[Tensor], Tensor],
    values: Mapping[str, Any] | None = None,
) -> Any:
    """Return how far a change moves the layer's output while one head alone writes, float64[head].

    Parameters
    ----------
    call : Call
    again : callable
        Calls the layer with the change.
    expected : callable(output) -> output
        What the output without the change should become.
    values : mapping from name to array, optional
        Weights that belong to the change.
    """
    own = call.model.head_weights(call.layer, ("W_O",))["W_O"]
    changed = {"W_O": own, **(values or {})}
    found = np.full(len(own), np.nan)
    for head in range(len(own)):
        alone = np.zeros((len(own), 1, 1))
        alone[head] = 1.0
        with call.model.replaced_weights({("W_O", call.layer): alone * own}):
            before = call.again()["out"]
        new = {**changed, "W_O": alone * changed["W_O"]}
        with call.model.replaced_weights({(n, call.layer): v for n, v in new.items()}):
            found[head] = output_change(again()["out"], expected(before))
    return found


def weights_of(call: Call) -> Mapping[str, Any] | None:
    """Return a layer's weights, or None where they cannot be had one by one."""
    try:
        return call.model.head_weights(call.layer)  # type: ignore[no-any-return]
    except attnlens.errors.ModelError:
        return None
