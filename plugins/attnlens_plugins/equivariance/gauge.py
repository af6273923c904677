"""Gauge symmetry on the live weights: random elements applied to every head, and undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlens_plugins.equivariance.groups import (
    Array,
    Block,
    Group,
    condition,
    query_key_group,
    value_output_group,
)
from attnlens_plugins.equivariance.live import Call
from attnlens_plugins.equivariance.merging import HeadOrder
from attnlens_plugins.equivariance.outputs import heads_behind, output_change, output_tolerance
from attnlens_plugins.equivariance.rotary import Rotary, measured
from attnlens_plugins.equivariance.rounding import (
    pattern_tolerance,
    unit_roundoff,
    value_tolerance,
)

if TYPE_CHECKING:
    from torch import Tensor

#: Name of a weight -> array, for one layer.
Weights = Mapping[str, Array]
#: For each key-value head, the maps of queries and keys, or of values and outputs.
Maps = Sequence[tuple[Array, Array]]

#: How many times more than rounding the weights themselves the logits may move.
_SLACK = 32.0


def turn_query_key(weights: Weights, maps: Maps) -> dict[str, Array]:
    """Return a layer's query and key weights in another basis of each head.

    Parameters
    ----------
    weights : mapping
        ``W_Q`` [head, d_model, d_head], ``W_K`` [kv_head, d_model, d_head], and ``b_Q``, ``b_K``
        where there are any.
    maps : sequence of (A, B), one for each key-value head
        Each [d_head, d_head]; queries of all heads that read it become ``q A``, keys ``k B``.

    Returns
    -------
    dict
        The same names.
    """
    per_head = len(weights["W_Q"]) // len(maps)
    queries = np.repeat(np.stack([a for a, _ in maps]), per_head, axis=0)
    keys = np.stack([b for _, b in maps])
    return _turned(weights, {"Q": queries, "K": keys})


def turn_value_output(weights: Weights, maps: Maps) -> dict[str, Array]:
    """Return a layer's value and output weights in another basis of each head.

    Parameters
    ----------
    weights : mapping
        ``W_V`` [kv_head, d_model, d_head], ``W_O`` [head, d_head, d_model], ``b_V``.
    maps : sequence of (N, M), one for each key-value head
        Values become ``v N``, output weights ``M^T W_O``; inside the group M is N^-T.
    """
    per_head = len(weights["W_O"]) // len(maps)
    found = _turned(weights, {"V": np.stack([n for n, _ in maps])})
    outputs = np.repeat(np.stack([m for _, m in maps]), per_head, axis=0)
    found["W_O"] = np.swapaxes(outputs, 1, 2) @ weights["W_O"]
    return found


def _turned(weights: Weights, maps: Mapping[str, Array]) -> dict[str, Array]:
    found = {}
    for part, turn in maps.items():
        found[f"W_{part}"] = weights[f"W_{part}"] @ turn
        if f"b_{part}" in weights:
            found[f"b_{part}"] = np.einsum("hd,hde->he", weights[f"b_{part}"], turn)
    return found


def groups_of(call: Call, gains: Mapping[str, Any]) -> list[Group]:
    """Return the query-key gauge group of each key-value head of a layer.

    Parameters
    ----------
    call : Call
    gains : mapping
        ``q_norm_w`` and ``k_norm_w`` of this layer, [d_head] or [head or kv_head, d_head], where
        there is QK-norm.
    """
    facts = call.model.facts
    heads, kv, d_head = facts.n_heads, facts.n_kv_heads, facts.d_head
    both = qk_gains(facts, gains)
    rotary = measured(call, both)
    if rotary is None or (facts.qk_norm and both is None):
        turned = d_head if facts.qk_norm else int(facts.rotary_dim or d_head)
        return [_unknown(d_head, turned)] * kv
    if both is None:
        return [query_key_group(d_head, rotary.pairs)] * kv
    q_gain, k_gain = both
    centred = _centred(call)
    per = heads // kv
    return [
        query_key_group(
            d_head,
            rotary.pairs,
            [(q_gain[h], k_gain[g]) for h in range(g * per, (g + 1) * per)],
            centred=centred,
        )
        for g in range(kv)
    ]


def qk_gains(facts: Any, gains: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return QK-norm's gains, float64[head, d_head] and [kv_head, d_head]; None without them."""
    if not facts.qk_norm or "q_norm_w" not in gains or "k_norm_w" not in gains:
        return None
    sides = (("q_norm_w", facts.n_heads), ("k_norm_w", facts.n_kv_heads))
    q, k = (
        np.broadcast_to(gains[name], (count, facts.d_head)).astype(np.float64)
        for name, count in sides
    )
    return q, k


def _unknown(d_head: int, turned: int) -> Group:
    """Claim nothing on dimensions that something unknown acts on."""
    blocks = (Block("unknown", tuple(range(turned))), Block("linear", tuple(range(turned, d_head))))
    return Group(tuple(b for b in blocks if b.dims), d_head)


def _centred(call: Call) -> bool:
    """Whether QK-norm subtracts the mean, as a LayerNorm does."""
    norm = getattr(call.model.bridge.blocks[call.layer].attn, "q_norm", None)
    return norm is not None and not getattr(norm, "uses_rms_norm", True)


class Gauge:
    """Gathers, layer by layer, whether changes of basis inside the group leave each head alone.

    Parameters
    ----------
    model : Model
    gains : mapping
        ``q_norm_w``, ``k_norm_w`` over [layer, ...] where there is QK-norm.
    seed : int

    Attributes
    ----------
    error, tolerance, outside : dict from {"qk", "vo"} to float64[layer, head]
        Inside the group: the largest change of a weight of the pattern (qk), or of the head's
        result ``z W_O`` relative to its longest (vo), and what rounding may do. Outside it: the
        same change, which must be larger.
    output_error, output_tolerance : float64[layer]
        The same for what the layer writes once values and outputs are in another basis.
    dims : dict from {"qk", "vo"} to int[layer]
        Dimensions of the redundant space, all heads together.
    words : dict from {"qk", "vo"} to list of str, one for each layer
    heads : HeadOrder
        Whether the heads may be listed in another order.
    rotary : list, one for each layer, of Rotary or None
        What the rotary embedding does; None where it could not be told.
    slopes, sinks : list, one for each layer, of float64[head] or None
        ALiBi's slopes and the sinks, where there are any and they can be reached.
    known : dict from {"qk", "vo"} to bool[layer]
        Whether the group is known, so that something was tested.
    logits : dict
        See :func:`whole_model`.
    moved : dict from quantity to float
        The largest relative change of each quantity over all layers, inside the group.
    inside, outside_values : dict from (name, layer) to array
        The changed weights of all layers, for a forward pass with all of them at once.
    """

    def __init__(self, model: Any, gains: Mapping[str, Any], seed: int) -> None:
        facts = model.facts
        self.model, self.gains, self.seed = model, gains, seed
        shape = (facts.n_layers, facts.n_heads)
        self.error = {k: np.full(shape, np.nan) for k in ("qk", "vo")}
        self.tolerance = {k: np.full(shape, np.nan) for k in ("qk", "vo")}
        self.output_error = np.full(facts.n_layers, np.nan)
        self.output_tolerance = np.full(facts.n_layers, np.nan)
        self.outside = {k: np.full(shape, np.nan) for k in ("qk", "vo")}
        self.dims = {k: np.zeros(facts.n_layers, dtype=np.int64) for k in ("qk", "vo")}
        self.words = {k: [""] * facts.n_layers for k in ("qk", "vo")}
        self.heads = HeadOrder(facts, seed)
        self.rotary: list[Rotary | None] = [None] * facts.n_layers
        self.slopes: list[Any] = [None] * facts.n_layers
        self.sinks: list[Any] = [None] * facts.n_layers
        self.known = {k: np.zeros(facts.n_layers, dtype=bool) for k in ("qk", "vo")}
        self.logits: dict[str, float] = {}
        self.moved: dict[str, float] = {}
        self.inside: dict[tuple[str, int], Array] = {}
        self.outside_values: dict[tuple[str, int], Array] = {}

    def visit(self, call: Call) -> None:
        """Take one layer."""
        facts, layer = call.model.facts, call.layer
        weights = self.model.head_weights(layer)
        gains = {name: np.asarray(value[layer]) for name, value in self.gains.items()}
        generator = np.random.default_rng([self.seed, layer])
        self.heads.visit(call, weights)
        self.rotary[layer] = measured(call, qk_gains(facts, gains))
        self.slopes[layer], self.sinks[layer] = call.slopes(), _values(call.parameter("sinks"))
        groups = {
            "qk": groups_of(call, gains),
            "vo": [value_output_group(facts.d_head)] * facts.n_kv_heads,
        }
        for kind, turn in (("qk", turn_query_key), ("vo", turn_value_output)):
            maps = [group.draw(generator) for group in groups[kind]]
            beyond = [group.draw_outside(generator) for group in groups[kind]]
            self.dims[kind][layer] = sum(group.dimension for group in groups[kind])
            self.words[kind][layer] = _common(groups[kind])
            values = turn(weights, maps)
            changes, new = measure(call, kind, values, weights)
            self.known[kind][layer] = all(group.known for group in groups[kind])
            if not all(group.trivial for group in groups[kind]):
                self.error[kind][layer] = changes
                worst = condition(*(m for pair in maps for m in pair))
                self.tolerance[kind][layer] = self._allowed(call, kind, worst)
                if kind == "vo":
                    self._certify_output(call, values, new["out"], weights, worst)
            self._note_moved(call, kind, new)
            other = turn(weights, beyond)
            self.outside[kind][layer], _ = measure(call, kind, other, weights)
            self.inside.update({(name, layer): value for name, value in values.items()})
            self.outside_values.update({(name, layer): value for name, value in other.items()})

    def _certify_output(
        self, call: Call, values: Weights, new: Tensor, weights: Weights, worst: float
    ) -> None:
        """Compare what the layer writes; if it moved, find the heads that did it."""
        layer = call.layer
        rounding = 2 * value_tolerance(call.seen, call.model.facts, layer, call.n, worst)
        allowed = output_tolerance(call, weights, rounding)
        change = output_change(new, call.seen["out"])
        self.output_error[layer], self.output_tolerance[layer] = change, allowed
        own = self.error["vo"][layer]
        if not change <= allowed and (own <= self.tolerance["vo"][layer]).all():
            found = heads_behind(call, call.again, lambda out: out, values)
            self.error["vo"][layer] = np.where(found > 4 * allowed, np.maximum(own, found), own)

    def _allowed(self, call: Call, kind: str, worst: float) -> Any:
        """Return what rounding may do once weights are expressed in another basis."""
        facts = call.model.facts
        bound = pattern_tolerance if kind == "qk" else value_tolerance
        # The new weights are rounded, which the products feel as if their inputs had been.
        return 2 * bound(call.seen, facts, call.layer, call.n, worst).double().numpy()

    def _note_moved(self, call: Call, kind: str, new: Mapping[str, Tensor]) -> None:
        import torch

        watched = {"qk": ("q", "k", "pattern"), "vo": ("v", "z")}[kind]
        for name in watched:
            if name in new:
                old = call.seen[name].double()
                size = torch.linalg.vector_norm(old).clamp_min(1e-30)
                change = float(torch.linalg.vector_norm(new[name].double() - old) / size)
                self.moved[name] = max(self.moved.get(name, 0.0), change)
        if kind == "vo":
            change = float(self.error[kind][call.layer].max())
            self.moved["result"] = max(self.moved.get("result", 0.0), change)


def _values(parameter: Any) -> Any:
    return None if parameter is None else parameter.detach().double().cpu().numpy()


def measure(
    call: Call, kind: str, values: Mapping[str, Array], weights: Weights
) -> tuple[Any, dict[str, Tensor]]:
    """Call a layer's attention with other weights and measure each head's change.

    Parameters
    ----------
    call : Call
    kind : {"qk", "vo"}
        Whether to compare patterns, or results ``z W_O``.
    values : mapping from name to array
        The weights to replace in this layer.
    weights : mapping
        The layer's own weights.

    Returns
    -------
    float64[head]
        Largest change of a weight, or of a result relative to the head's longest result.
    dict of str to Tensor
        What the layer computed.
    """
    import torch

    layer = call.layer
    with call.model.replaced_weights({(n, layer): v for n, v in values.items()}):
        held = call.model.head_weights(layer, ("W_O",))["W_O"] if kind == "vo" else None
        new = call.again()
    if held is None:
        off = (new["pattern"].double() - call.seen["pattern"].double()).abs()
        return off.amax((0, 2, 3)).cpu().numpy(), new
    z, fresh = call.seen["z"], new["z"]
    # The products' own rounding is what the tolerance allows for, so float32 will do.
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    found = []
    for head in range(call.model.facts.n_heads):
        before = torch.as_tensor(weights["W_O"][head]).to(z.device, wide)
        after = torch.as_tensor(held[head]).to(z.device, wide)
        old = z[:, :, head].to(wide) @ before
        off = fresh[:, :, head].to(wide) @ after - old
        longest = torch.linalg.vector_norm(old, dim=-1).max().clamp_min(1e-30)
        found.append(float(torch.linalg.vector_norm(off, dim=-1).max() / longest))
    return np.array(found), new


def _common(groups: Sequence[Group]) -> str:
    named = list(dict.fromkeys(group.words() for group in groups))
    return named[0] if len(named) == 1 else " or ".join(named)


def whole_model(gauge: Gauge, tokens: Any, logits: Tensor) -> dict[str, float]:
    """Change the weights of all layers at once and see how far the logits move.

    What rounding does to logits after many layers has no useful bound, so it is measured: the same
    weights are moved by one rounding unit each, at random, and the logits' change, times the
    condition of the group's elements and a slack of 32, is allowed.

    Parameters
    ----------
    gauge : Gauge
        After it has visited all layers.
    tokens : int[prompt, pos]
    logits : Tensor[prompt, pos, d_vocab]
        Of the model as it is.

    Returns
    -------
    dict
        ``inside``, ``outside``, ``allowed``: largest change over the largest logit.
    """
    model = gauge.model
    size = float(logits.double().abs().max()) or 1.0

    def moved(values: Mapping[tuple[str, int], Array]) -> float:
        with model.replaced_weights(values):
            return float((model.forward(tokens).double() - logits.double()).abs().max()) / size

    eps = unit_roundoff(logits.dtype)
    generator = np.random.default_rng([gauge.seed, 1])
    original = {
        (name, layer): value
        for layer in range(model.facts.n_layers)
        for name, value in model.head_weights(layer).items()
        if (name, layer) in gauge.inside
    }
    rounded = {
        key: value * (1 + eps * (2.0 * generator.integers(0, 2, value.shape, dtype=np.int8) - 1))
        for key, value in original.items()
    }
    rounding = moved(rounded)
    return {
        "inside": moved(gauge.inside),
        "outside": moved(gauge.outside_values),
        "allowed": _SLACK * 4 * (rounding + eps),
    }
