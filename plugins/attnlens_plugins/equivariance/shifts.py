"""Softmax: blind to a constant added to a row of scores, not to their scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlens_plugins.equivariance.live import Call, Hooks
from attnlens_plugins.equivariance.rotary import measured
from attnlens_plugins.equivariance.rounding import (
    largest_score,
    pattern_tolerance,
    unit_roundoff,
    working_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

#: Largest constant that is added to a row of scores.
_SHIFT = 4.0


class Shifts:
    """Gathers, layer by layer, what leaves each head's pattern alone and what does not.

    A row of the pattern is ``softmax(s) = softmax(s + c)``. A vector u added to every key (such as
    the key bias b_K) adds ``beta q . u`` to the whole row of query q: a null direction, as long as
    nothing acts between. A rotary embedding turns u differently at every position, QK-norm divides
    by the length of k + u, a soft cap bends the sum; then the direction is not null.

    Parameters
    ----------
    facts : ModelFacts
    seed : int

    Attributes
    ----------
    error, tolerance : float64[layer, head]
        Largest change of a weight when constants are added to the rows of scores, and what
        rounding may do. NaN where the scores cannot be reached.
    scale_change : float64[layer, head]
        Mean total variation distance of the pattern when the scores are doubled.
    key_error, key_tolerance : float64[layer, head]
        The same as `error` for a vector added to the keys on the dimensions that should be null.
        NaN where there are none.
    key_change : float64[layer, head]
        Mean total variation distance for a vector on the other dimensions; NaN without them.
    null_dims : int[layer]
        Dimensions of each head on which the key bias was found to be null.
    """

    def __init__(self, facts: Any, seed: int) -> None:
        self.facts = facts
        self.seed = seed
        shape = (facts.n_layers, facts.n_heads)
        self.error, self.tolerance = np.full(shape, np.nan), np.full(shape, np.nan)
        self.scale_change = np.full(shape, np.nan)
        self.key_error, self.key_tolerance = np.full(shape, np.nan), np.full(shape, np.nan)
        self.key_change = np.full(shape, np.nan)
        self.null_dims = np.zeros(facts.n_layers, dtype=np.int64)

    def visit(self, call: Call) -> None:
        """Take one layer."""
        if "pattern" not in call.seen:
            return
        self._rows(call)
        self._keys(call)

    def _rows(self, call: Call) -> None:
        import torch

        generator = torch.Generator().manual_seed(self.seed + call.layer)
        drawn = torch.rand((1, 1, call.n, 1), generator=generator) * 2 - 1
        constants = (_SHIFT * drawn).to(call.x)
        hooks = _on_scores(call, lambda scores: scores + constants.to(scores))
        new = call.again(hooks=hooks) if hooks else call.again(shift=constants)
        eps = unit_roundoff(working_dtype(call.seen))
        self.error[call.layer] = _largest(new["pattern"], call.seen["pattern"])
        # Adding c rounds the sum to its own spacing.
        rounding = pattern_tolerance(call.seen, self.facts, call.layer, call.n)
        size = largest_score(call.seen, self.facts, call.layer) + _SHIFT
        self.tolerance[call.layer] = (rounding + 2 * eps * size).double().numpy()
        doubled = _on_scores(call, lambda scores: _double(scores))
        if doubled:
            new = call.again(hooks=doubled)
        elif not self.facts.qk_norm:
            own = call.model.head_weights(call.layer)
            values = {(n, call.layer): 2 * own[n] for n in ("W_Q", "b_Q") if n in own}
            with call.model.replaced_weights(values):
                new = call.again()
        else:
            return
        self.scale_change[call.layer] = _moved(new["pattern"], call.seen["pattern"])

    def _keys(self, call: Call) -> None:
        import torch

        if "k" not in call.seen:
            return
        free = null_dimensions(self.facts, call)
        bound = ~free
        keys = call.seen["k"]
        size = keys.float().square().mean((0, 1)).sqrt()  # [kv_head, d_head]
        generator = torch.Generator().manual_seed(self.seed + 1000 + call.layer)
        u = torch.randn(size.shape, generator=generator).to(size) * size
        name = call.model.hook_name("k", call.layer)
        for where, null in ((free, True), (bound, False)):
            if not where.any():
                continue
            mask = torch.as_tensor(where, device=u.device)
            added = torch.where(mask, u, torch.zeros_like(u)).to(keys.dtype)
            new = call.again(hooks=[(name, _adding(added))])["pattern"]
            if null:
                self.key_error[call.layer] = _largest(new, call.seen["pattern"])
                # The score's bound grows with the keys: at most by the added vector's length.
                seen = {**call.seen, "k_rot": call.seen.get("k_rot", keys) * 2}
                bounds = pattern_tolerance(seen, self.facts, call.layer, call.n)
                self.key_tolerance[call.layer] = (2 * bounds).double().numpy()
            else:
                self.key_change[call.layer] = _moved(new, call.seen["pattern"])
        holds = self.key_error[call.layer] <= self.key_tolerance[call.layer]
        self.null_dims[call.layer] = int(free.sum()) if bool(np.all(holds)) else 0


def null_dimensions(facts: Any, call: Call) -> Any:
    """Tell on which dimensions of a head the key bias should not matter, bool[d_head].

    Those that neither a rotary embedding, QK-norm, a soft cap nor a sink acts on.
    """
    none = np.zeros(facts.d_head, dtype=bool)
    if facts.qk_norm or facts.soft_cap is not None or facts.sinks:
        return none
    rotary = measured(call)
    if rotary is None:
        return np.arange(facts.d_head) >= int(facts.rotary_dim or facts.d_head)
    turned = {i for pair in rotary.pairs for i in pair}
    return np.array([i not in turned for i in range(facts.d_head)])


def _adding(vector: Tensor) -> Callable[..., Tensor]:
    def add(value: Tensor, hook: Any) -> Tensor:
        return value + vector.reshape(vector.shape if value.ndim == 4 else (-1,))

    return add


def _on_scores(call: Call, change: Callable[[Tensor], Tensor]) -> Hooks:
    if "scores" not in call.model.available():
        return ()
    return [(call.model.hook_name("scores", call.layer), lambda value, hook: change(value))]


def _double(scores: Tensor) -> Tensor:
    import torch

    hidden = scores <= torch.finfo(scores.dtype).min / 2
    return torch.where(hidden, scores, scores * 2)


def _largest(new: Tensor, old: Tensor) -> Any:
    return (new.double() - old.double()).abs().amax((0, 2, 3)).cpu().numpy()


def _moved(new: Tensor, old: Tensor) -> Any:
    return ((new.double() - old.double()).abs().sum(-1) / 2).mean((0, 2)).cpu().numpy()
