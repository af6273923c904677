"""What one store will hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from attnlens.needs import MAIN
from attnlens.store.schema import UnitSpec


@dataclass(frozen=True)
class StorePlan:
    """What one store will hold: one model, or twin, on one corpus.

    Attributes
    ----------
    corpus : str
        Name of the corpus; ``""`` is the run's own.
    twin : int or None
        Number of the twin, None for the model itself.
    activations : dict of str to str
        The dtype that each raw activation is stored with. float16 gives way to float32 in a unit
        whose values do not fit.
    statistics : tuple of str
    weights : bool
    layers, heads : tuple of int or None
        None means all.
    positions : tuple of int or None
        Positions of the raw activations (of their queries, for ``pattern`` and ``scores``);
        negative ones count from the end of each prompt. Statistics always see all positions.
    units : tuple of UnitSpec
    batch_size : int
    sizes : dict of str to int
        Raw bytes of each activation, and of the weights.
    lean : bool
        Whether the model runs without attention matrices.
    not_lean : str
        Why it does not although the prompts are long enough; empty elsewhere.
    captured : dict of str to str
        The activations, with dtypes, that are stored instead if the first batch shows that those
        of `derived` cannot be computed on reading. Empty where nothing is derived, and where
        there is no such check, as in lean capture.
    derived : tuple of str
        What is asked for, and computed from ``q_rot`` and ``k_rot`` on reading.
    """

    corpus: str
    twin: int | None
    activations: dict[str, str]
    statistics: tuple[str, ...]
    weights: bool
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    positions: tuple[int, ...] | None
    units: tuple[UnitSpec, ...]
    batch_size: int
    sizes: dict[str, int] = field(default_factory=dict)
    lean: bool = False
    not_lean: str = ""
    captured: dict[str, str] = field(default_factory=dict)
    derived: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Raw bytes of all activations."""
        return sum(self.sizes.values())

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return sum(len(u.prompts) for u in self.units)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max((u.length for u in self.units), default=0)

    @property
    def where(self) -> str:
        """The store's place inside the run's own store, ``""`` for the run's own."""
        parts = [] if self.twin is None else [f"twins/{self.twin:03d}"]
        if self.corpus != MAIN:
            parts.append(f"corpora/{self.corpus}")
        return "/".join(parts)

    def as_captured(self) -> StorePlan:
        """Return the plan that derives nothing."""
        return replace(self, activations=dict(self.captured), captured={}, derived=())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {
            "where": self.where,
            "corpus": self.corpus,
            "twin": self.twin,
            "activations": dict(self.activations),
            "derived": list(self.derived),
            "lean": self.lean,
            "statistics": list(self.statistics),
            "weights": self.weights,
            "layers": None if self.layers is None else list(self.layers),
            "heads": None if self.heads is None else list(self.heads),
            "positions": None if self.positions is None else list(self.positions),
            "prompts": self.n_prompts,
            "longest": self.longest,
            "units": len(self.units),
            "batch_size": self.batch_size,
            "bytes": dict(self.sizes),
        }
