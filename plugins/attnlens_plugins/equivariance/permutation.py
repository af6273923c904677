"""Permutation equivariance: attention is blind to order, once positions and mask go along.

For a permutation P of the tokens, attention with its positional encodings and its mask M carried
along satisfies ``Attn(P X, P M P^T) = P Attn(X, M)``: it is a function on a set. What the model
knows of order is in the encodings and in the mask alone, and leaving either behind shows how much
each head depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnlens_plugins.equivariance.live import Call
from attnlens_plugins.equivariance.outputs import (
    heads_behind,
    output_change,
    output_tolerance,
    weights_of,
)
from attnlens_plugins.equivariance.rounding import value_tolerance

if TYPE_CHECKING:
    from torch import Tensor

#: Below this mean distance (total variation), a head's pattern does not react to a shuffle at all.
_STILL = 1e-3


class Permutation:
    """Gathers, layer by layer, how each head takes a shuffle of its tokens.

    Parameters
    ----------
    facts : ModelFacts
    orders : sequence of array of int, [pos]
        The shuffles.

    Attributes
    ----------
    error : float64[layer, head]
        Largest departure from equivariance when all is permuted along: of the weights, absolute,
        or of the output over its longest value, whichever is larger.
    tolerance : float64[layer, head]
        What rounding may do to it.
    output_error, output_tolerance : float64[layer]
        The same for what the layer writes, all heads together; NaN where its weights cannot be had
        head by head. If it departs, the heads that depart alone are given its error.
    mask_broken, positions_broken : float64[layer, head]
        Relative change of the head's output when the mask, or the positional encodings, stay
        behind; NaN where there are none.
    content_distance, position_distance, positionality : float64[layer, head]
        See :meth:`_judge`.
    """

    def __init__(self, facts: Any, orders: Any) -> None:
        self.facts = facts
        self.orders = [np.asarray(order) for order in orders]
        shape = (facts.n_layers, facts.n_heads)
        self.error = np.zeros(shape)
        self.tolerance = np.zeros(shape)
        self.output_error = np.full(facts.n_layers, np.nan)
        self.output_tolerance = np.full(facts.n_layers, np.nan)
        self.mask_broken = np.full(shape, np.nan)
        self.positions_broken = np.full(shape, np.nan)
        self.content_distance = np.full(shape, np.nan)
        self.position_distance = np.full(shape, np.nan)

    @property
    def positionality(self) -> Any:
        """Share of a head's reaction to a shuffle that is its hold on positions, in [0, 1]."""
        total = self.content_distance + self.position_distance
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(total > _STILL, self.content_distance / total, np.nan)

    def visit(self, call: Call) -> None:
        """Take one layer."""
        import torch

        orders = [torch.as_tensor(order, device=call.x.device) for order in self.orders]
        self._certify(call, orders)
        self._leave_behind(call, orders)

    def _certify(self, call: Call, orders: list[Tensor]) -> None:
        import torch

        worst = torch.zeros(self.facts.n_heads, dtype=torch.float64)
        longest = _longest_value(call)
        for order in orders:
            new = call.again(order)
            if "pattern" in new:
                old = call.seen["pattern"][..., order, :][..., :, order]
                off = (new["pattern"].double() - old.double()).abs().amax((0, 2, 3)).cpu()
                worst = torch.maximum(worst, off)
            if "z" in new and longest is not None:
                off = new["z"].double() - call.seen["z"][:, order].double()
                far = torch.linalg.vector_norm(off, dim=-1).amax((0, 1)).cpu() / longest
                worst = torch.maximum(worst, far)
        rounding = value_tolerance(call.seen, self.facts, call.layer, call.n)
        self.error[call.layer] = worst.numpy()
        self.tolerance[call.layer] = rounding.double().numpy()
        self._certify_output(call, orders, rounding)

    def _certify_output(self, call: Call, orders: list[Tensor], rounding: Tensor) -> None:
        weights = weights_of(call)
        if weights is None or "v" not in call.seen:
            return
        allowed = output_tolerance(call, weights, rounding)
        changes = [output_change(call.again(o)["out"], call.seen["out"][:, o]) for o in orders]
        worst = int(np.argmax(changes))
        self.output_error[call.layer], self.output_tolerance[call.layer] = changes[worst], allowed
        if not changes[worst] <= allowed and (self.error <= self.tolerance)[call.layer].all():
            order = orders[worst]
            found = heads_behind(call, lambda: call.again(order), lambda out: out[:, order])
            own = self.error[call.layer]
            self.error[call.layer] = np.where(found > 4 * allowed, np.maximum(own, found), own)

    def _leave_behind(self, call: Call, orders: list[Tensor]) -> None:
        """Shuffle the tokens while the mask, the positional encodings, or both stay."""
        facts, layer = self.facts, call.layer
        encoded = facts.positions in ("rotary", "alibi", "relative")
        kept = _kept_positions(call) if facts.positions == "absolute" else None
        mask, positions, reactions = [], [], []
        for order in orders:
            shuffled = call.x[:, order]
            if kept is not None:
                shuffled = shuffled + kept - kept[:, order]
            if call.masked and "z" in call.seen:
                mask.append(_change(call.again(order, mask=False)["z"], call.seen["z"][:, order]))
            if (encoded or kept is not None) and "z" in call.seen:
                new = call.again(order, x=shuffled, positions=False)
                positions.append(_change(new["z"], call.seen["z"][:, order]))
            if "pattern" in call.seen and not (facts.positions == "absolute" and kept is None):
                new = call.again(order, x=shuffled, positions=False, mask=False)
                reactions.append(
                    reaction(call.seen["pattern"], new["pattern"], order, call.visible)
                )
        if mask:
            self.mask_broken[layer] = np.mean(mask, axis=0)
        if positions:
            self.positions_broken[layer] = np.mean(positions, axis=0)
        if reactions:
            content, position = np.mean(reactions, axis=0)
            self.content_distance[layer] = content
            self.position_distance[layer] = position


def _longest_value(call: Call) -> Tensor | None:
    import torch

    if "v" not in call.seen:
        return None
    groups = call.model.facts.n_heads // call.model.facts.n_kv_heads
    lengths: Tensor = torch.linalg.vector_norm(call.seen["v"].double(), dim=-1).amax((0, 1))
    return lengths.repeat_interleave(groups).clamp_min(1e-30).cpu()


def _change(new: Tensor, old: Tensor) -> Any:
    """Relative change of each head's output, [head]."""
    import torch

    off = torch.linalg.vector_norm(new.double() - old.double(), dim=(0, 1, 3))
    return (off / torch.linalg.vector_norm(old.double(), dim=(0, 1, 3)).clamp_min(1e-30)).cpu()


def _kept_positions(call: Call) -> Tensor | None:
    """Return what the input holds of positions, [prompt, pos, d_model]; None with one prompt.

    Where positions are embedded in the residual stream, their part is the mean over prompts at
    each position. Each prompt gets the mean over the others, so that its own content is not taken
    for a position.

    References
    ----------
    Song and Zhong, "Uncovering hidden geometry in Transformers via disentangling position and
    context" (2023), section 2: the mean over contexts as the positional component.
    """
    prompts = call.x.shape[0]
    if prompts < 2:
        return None
    total = call.x.sum(0, keepdim=True)
    return (total - call.x) / (prompts - 1)


def reaction(old: Tensor, new: Tensor, order: Tensor, visible: Tensor) -> Any:
    """Measure how attention moved under a shuffle whose positions and mask stayed in place.

    A head that looks for content finds its keys wherever they went: seen from the tokens, its
    weights are what they were (on the keys that the token sees before and after, which is all
    that the mask leaves comparable). A head that looks at positions keeps its weights as a matrix.

    Parameters
    ----------
    old, new : Tensor[prompt, head, query_pos, key_pos]
        Weights before, and after the token at place i became the one from ``order[i]``.
    order : Tensor[pos] of int
    visible : Tensor[query_pos, key_pos] of bool

    Returns
    -------
    float64[2, head]
        Mean total variation distance, each in [0, 1]: seen from the tokens, then from the
        positions. A row counts by the weight that it has on comparable keys.
    """
    import torch

    old, new = old.double(), new.double()
    back = torch.argsort(order)
    returned = new[..., back, :][..., :, back]
    shared = visible & visible[back][:, back]
    left, right = old * shared, returned * shared
    mass_left, mass_right = left.sum(-1, keepdim=True), right.sum(-1, keepdim=True)
    known = torch.minimum(mass_left, mass_right)
    off = (left / mass_left.clamp_min(1e-12) - right / mass_right.clamp_min(1e-12)).abs().sum(-1)
    weight = known[..., 0] * (shared.sum(-1) > 1)
    content = (off / 2 * weight).sum((0, 2)) / weight.sum((0, 2)).clamp_min(1e-12)
    rows = visible.sum(-1) > 1
    position = ((new - old).abs().sum(-1) / 2)[..., rows].mean((0, 2))
    return torch.stack([content, position]).cpu().numpy()


def shuffles(tokens: Any, count: int, seed: int) -> list[Any]:
    """Draw permutations of positions that leave in place what all prompts share there.

    A first token that is always the same (BOS) is both content and position; moving it would tell
    nothing of either.

    Parameters
    ----------
    tokens : int[prompt, pos]
    count : int
    seed : int

    Returns
    -------
    list of int[pos]
    """
    tokens = np.asarray(tokens)
    generator = np.random.default_rng(seed)
    n = tokens.shape[1]
    shared = (tokens == tokens[:1]).all(0) if len(tokens) > 1 else np.arange(n) == 0
    free = np.flatnonzero(~shared)
    if len(free) < 2:
        free = np.arange(n)
    orders = []
    for _ in range(count):
        order = np.arange(n)
        order[free] = free[generator.permutation(len(free))]
        orders.append(order)
    return orders
