"""Heads in another order, and heads that are equal: both leave a layer's sum as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from attnlens_plugins.equivariance.groups import Array
from attnlens_plugins.equivariance.live import Call
from attnlens_plugins.equivariance.outputs import output_change, output_tolerance
from attnlens_plugins.equivariance.rounding import value_tolerance

#: Weights that go with a query head, and those that go with a key-value head.
_OF_HEAD, _OF_GROUP = ("W_Q", "b_Q", "W_O"), ("W_K", "b_K", "W_V", "b_V")


class HeadOrder:
    """Gathers, layer by layer, whether heads may be listed in another order.

    Attention adds up its heads, so that permuting them changes nothing, if all that belongs to a
    head goes along: its weights, its sink, QK-norm's gains where each head has its own. Heads that
    share keys and values stay together. ALiBi's slopes are no weights and stay with the place in
    the list: there it does change.

    Parameters
    ----------
    facts : ModelFacts
    seed : int

    Attributes
    ----------
    error, tolerance : float64[layer, head]
        Largest change of a weight of the pattern, or of a head's output over its longest, after
        listing the heads in another order and finding each where it went.
    output_error, output_tolerance : float64[layer]
        The same for what the layer writes, all heads together.
    order : int[head]
        The head at place h is the one that was at ``order[h]``.
    """

    def __init__(self, facts: Any, seed: int) -> None:
        self.error = np.full((facts.n_layers, facts.n_heads), np.nan)
        self.tolerance = np.full((facts.n_layers, facts.n_heads), np.nan)
        self.output_error = np.full(facts.n_layers, np.nan)
        self.output_tolerance = np.full(facts.n_layers, np.nan)
        generator = np.random.default_rng([seed, 9])
        per = facts.n_heads // facts.n_kv_heads
        self.groups = _moved_about(facts.n_kv_heads, generator)
        inner = [_moved_about(per, generator) for _ in range(facts.n_kv_heads)]
        self.order = np.concatenate(
            [g * per + within for g, within in zip(self.groups, inner, strict=True)]
        )

    def visit(self, call: Call, weights: Mapping[str, Array]) -> None:
        """Take one layer."""
        if len(self.order) < 2 or "z" not in call.seen or not _reachable(call):
            return
        values = {(n, call.layer): weights[n][self.order] for n in _OF_HEAD if n in weights}
        values |= {(n, call.layer): weights[n][self.groups] for n in _OF_GROUP if n in weights}
        along = self._own(call)
        with call.model.replaced_weights(values), _replaced(along):
            new = call.again()
        size = call.seen["z"].double().norm(dim=-1).amax((0, 1)).clamp_min(1e-30)[self.order]
        off = (new["z"].double() - call.seen["z"][:, :, self.order].double()).norm(dim=-1)
        worst = (off.amax((0, 1)) / size).cpu().numpy()
        if "pattern" in new:
            moved = (new["pattern"].double() - call.seen["pattern"][:, self.order].double()).abs()
            worst = np.maximum(worst, moved.amax((0, 2, 3)).cpu().numpy())
        self.error[call.layer, self.order] = worst
        rounding = value_tolerance(call.seen, call.model.facts, call.layer, call.n)
        self.tolerance[call.layer] = 2 * rounding.double().numpy()
        self.output_error[call.layer] = output_change(new["out"], call.seen["out"])
        self.output_tolerance[call.layer] = 2 * output_tolerance(call, weights, rounding)

    def _own(self, call: Call) -> list[tuple[Any, Any]]:
        """List the parameters of single heads that are no weights, and their new values."""
        per_head = (("sinks", self.order), ("q_norm.weight", self.order),
                    ("q_norm.bias", self.order), ("k_norm.weight", self.groups),
                    ("k_norm.bias", self.groups))  # fmt: skip
        width = call.model.facts.d_head
        found = []
        for name, order in per_head:
            parameter = call.parameter(name)
            if parameter is None or parameter.numel() != len(order) * (
                1 if name == "sinks" else width
            ):
                continue
            rows = parameter.detach().reshape(len(order), -1)
            found.append((parameter, rows[order].reshape(parameter.shape)))
        return found


def _reachable(call: Call) -> bool:
    """Whether the parameters that may belong to single heads can be moved along."""
    facts = call.model.facts
    needed = [("sinks", facts.sinks), ("q_norm.weight", facts.qk_norm)]
    return all(call.parameter(name) is not None for name, there in needed if there)


@contextmanager
def _replaced(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Let parameters have other values inside a with block; the old ones always return."""
    saved = [(parameter, parameter.detach().clone()) for parameter, _ in values]
    try:
        for parameter, value in values:
            parameter.data.copy_(value)
        yield
    finally:
        for parameter, old in saved:
            parameter.data.copy_(old)


def _moved_about(count: int, generator: np.random.Generator) -> Any:
    """Return a permutation that is not the identity, where there is one."""
    order = generator.permutation(count)
    return np.roll(np.arange(count), 1) if (order == np.arange(count)).all() else order


def merged(model: Any, tokens: Any, pairs: Sequence[tuple[int, int]]) -> float:
    """Merge pairs of equal heads in the live model and return how far the logits move.

    The first head's output weights are doubled and the second's are zero, for the length of one
    forward pass.

    Parameters
    ----------
    model : Model
    tokens : int[prompt, pos]
    pairs : sequence of (int, int)
        Heads of one layer each, as ``layer * n_heads + head``; a head that was merged already is
        left out.

    Returns
    -------
    float
        Largest change of a logit over the largest logit.
    """
    n_heads = model.facts.n_heads
    values: dict[tuple[str, int], Array] = {}
    weight: dict[int, Array] = {}
    for first, second in pairs:
        layer, keep, drop = first // n_heads, first % n_heads, second % n_heads
        own = values.setdefault(("W_O", layer), model.head_weights(layer)["W_O"].copy())
        original = weight.setdefault(layer, model.head_weights(layer)["W_O"])
        if not own[drop].any() or not own[keep].any():
            continue
        own[keep] += original[keep]
        own[drop] = 0.0
    logits = model.forward(tokens).double()
    with model.replaced_weights(values):
        moved = model.forward(tokens).double()
    return float((moved - logits).abs().max() / logits.abs().max().clamp_min(1e-30))
