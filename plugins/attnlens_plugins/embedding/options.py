"""What may be asked of ``embedding``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

import attnlens

#: Points that a map needs.
LEAST = 4


class EmbeddingOptions(attnlens.Options):
    """Options of ``embedding``."""

    of: Literal["heads", "outputs", "loadings", "features"] = Field(
        "heads",
        description="What is drawn: heads (by how their attention falls over distances and on "
        "repeats), outputs (heads by the likeness of all that they write), loadings (heads by "
        "cp's loadings), features (cp's feature factors).",
    )
    method: Literal["tsne", "umap", "both"] = Field(
        "tsne", description="Map to draw beside the PCA; umap takes long to import."
    )
    perplexity: float = Field(
        30.0, ge=1, description="Of t-SNE; lowered to a third of the other points where few."
    )
    neighbors: int = Field(
        15, ge=2, description="Of UMAP; lowered to the number of other points where few."
    )
    color: Literal["layer", "type", "cluster"] = Field(
        "layer",
        description="What colours the points: layer, type (known types of heads) or cluster (cp's "
        "clusters, and its best groups where there are none).",
    )
    max_tokens: int = Field(
        1024, ge=8, description="For outputs: use at most so many tokens, chosen by the seed."
    )

    @property
    def needs_cp(self) -> bool:
        """Whether cp's result is read."""
        return self.of in ("loadings", "features") or self.color == "cluster"
