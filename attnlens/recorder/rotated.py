"""Attention from the queries and keys of a forward pass, instead of from its pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from attnlens.store.rules import rule_of

if TYPE_CHECKING:
    from attnlens.attention import Attention
    from attnlens.models import ModelFacts

#: How far weights computed from q and k may be from the model's own: as far as their storage as
#: float16 would put them.
_TOLERANCE: Final = 2.0**-11


class RuleDisagreesError(Exception):
    """A layer's pattern is not what its queries and keys give by the rule in the facts."""

    def __init__(self, layer: int, off: float) -> None:
        super().__init__(f"layer {layer}: {off:g}")
        self.layer = layer
        self.off = off


class Rotated:
    """Brings queries and keys of each layer together as they arrive.

    Parameters
    ----------
    facts : ModelFacts
    heads : sequence of int or None
        Heads that queries are of; None for all.
    groups : sequence of int or None
        Key-value heads that keys are of; None for all.
    """

    def __init__(
        self, facts: ModelFacts, heads: Sequence[int] | None, groups: Sequence[int] | None
    ) -> None:
        plain = facts.to_json()
        self.rules = [rule_of(plain, layer) for layer in range(facts.n_layers)]
        self.heads = heads
        self.places: list[int] | None = None
        if heads is not None and groups is not None:  # not every group of heads is whole
            each = facts.n_heads // facts.n_kv_heads
            self.places = [list(groups).index(head // each) for head in heads]
        self._waiting: dict[tuple[str, int], Tensor] = {}

    def add(self, name: str, layer: int, value: Tensor) -> Attention | None:
        """Take ``q_rot`` or ``k_rot`` of a layer; return its attention once both are there.

        Parameters
        ----------
        name : {"q_rot", "k_rot"}
        layer : int
        value : Tensor, [prompt, pos, head or kv_head, d_head]
            Not changed before the other one comes.
        """
        self._waiting[name, layer] = value
        rule = self.rules[layer]
        if rule is None or not {("q_rot", layer), ("k_rot", layer)} <= self._waiting.keys():
            return None
        q, k = (self._waiting.pop((which, layer)).transpose(1, 2) for which in ("q_rot", "k_rot"))
        if self.places is not None:
            k = k[:, self.places]
        return rule.attention(q, k, self.heads)


def check_rule(layer: int, attention: Attention, pattern: Tensor) -> None:
    """Hold attention computed from queries and keys against the pattern.

    Parameters
    ----------
    layer : int
    attention : Attention
    pattern : Tensor, [prompt, head, query_pos, key_pos]

    Raises
    ------
    RuleDisagreesError
    """
    made = attention.to_dense().to(torch.float32)
    off = float((made - pattern.to(torch.float32)).abs().max())
    if not off <= _TOLERANCE:
        raise RuleDisagreesError(layer, off)
