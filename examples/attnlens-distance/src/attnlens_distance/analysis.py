"""What the analysis needs, draws and claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from pydantic import Field

import attnlens
from attnlens_distance.measures import measure, spread_evenly

#: Measures over [layer, head]: what they are, and the spread below which nothing is claimed.
MEASURES: dict[str, tuple[str, float]] = {
    "distance": ("Mean distance (tokens)", 0.5),
    "self": ("Share on the token itself", 0.02),
    "previous": ("Mean weight on the previous token", 0.02),
    "near": ("Share on near tokens", 0.02),
    "first": ("Mean weight on the first token", 0.02),
    "asymmetry": ("Share on later minus share on earlier tokens", 0.02),
}


class Distance(attnlens.Analysis):
    """How far and in which direction each head looks.

    For each head, from attention accumulated by distance (no pattern is kept): the mean distance
    between a query and what it reads, the shares of its attention on the token itself, near it
    and on the first token, and the weight on the previous token. Models whose tokens also see
    later ones (BERT) get an asymmetry: the share on later minus the share on earlier tokens.

    All is set beside twins, the same architecture with random weights on the same tokens, and
    beside attention that spreads evenly over the visible keys. A distance says where attention
    lies, not what it does: a head that rests on the first token (a sink) looks far and may read
    nothing.
    """

    name = "distance"
    requires = ("pattern.by_offset", "pattern.received", "twin")
    permutes_heads = True

    class Options(attnlens.Options):
        """Set on the command line as -o distance.near=8."""

        near: int = Field(4, ge=1, description="Up to how many tokens away a token counts as near.")
        previous: float = Field(
            0.4,
            gt=0,
            le=1,
            description="A previous-token head puts at least this weight there, on average.",
        )
        top: int = Field(20, ge=1, description="Heads in the table, the most distant first.")

    def compute(self, store: Any) -> xr.Dataset:
        """Measure the model and its twins."""
        result = measure(store, self.options.near)
        twins = [measure(twin, self.options.near) for twin in store.twins]
        for name in MEASURES:
            if name in result and twins:
                result[f"{name}_twin"] = xr.concat([t[name] for t in twins], "twin")
        if twins:
            result["share_twin"] = xr.concat([t["share"].mean("head") for t in twins], "twin")
        lengths = store.lengths.values
        two_sided = "asymmetry" in result
        return result.assign_attrs(
            near=self.options.near,
            two_sided=int(two_sided),
            even_distance=spread_evenly(lengths, two_sided=two_sided),
        )

    # -- figures --------------------------------------------------------------------------------

    def _grid(self, result: xr.Dataset, figure: Any, name: str, **how: Any) -> str:
        label, _ = MEASURES[name]
        attnlens.figures.head_grid(
            figure, result[name], label=label, null=result.get(f"{name}_twin"), **how
        )
        low, high = result[name].min().item(), result[name].max().item()
        return f"{label}, a grid of layers by heads: values from {low:.3g} to {high:.3g}."

    @attnlens.figure("Mean distance between a query and what it reads")
    def distance_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the mean distance on the head grid."""
        return self._grid(result, figure, "distance")

    @attnlens.figure("Mean distance with depth")
    def distance_depth(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the mean distance against depth, with that of evenly spread attention."""
        attnlens.figures.depth_plot(
            figure,
            result["distance"],
            label=MEASURES["distance"][0],
            null=result.get("distance_twin"),
            lines={"spread evenly": result.attrs["even_distance"]},
        )
        medians = ", ".join(f"{v:.3g}" for v in result["distance"].median("head").values)
        return f"Mean distance by layer; medians are {medians} tokens."

    @attnlens.figure("Share of the attention at each distance")
    def profile(self, result: xr.Dataset, figure: Any) -> str:
        """Draw each head's attention by distance; the farthest and the nearest head by name."""
        share = result["share"].transpose("layer", "head", "offset")
        distance = result["distance"].transpose("layer", "head")
        named = {}
        for place in (distance.argmin(...), distance.argmax(...)):
            layer = int(share["layer"][place["layer"]])
            head = int(share["head"][place["head"]])
            named[f"{layer}.{head}"] = (layer, head)
        twins = result.get("share_twin")
        null = None
        if twins is not None:
            null = twins.transpose(..., "offset").values.reshape(-1, share.sizes["offset"])
        attnlens.figures.curves(
            figure,
            share,
            x=share["offset"].values,
            label="Share of the attention",
            xlabel="Distance: query - key (tokens)",
            highlight=named,
            null=null,
        )
        return (
            f"Share of attention by distance for every head; head {next(iter(named))} looks "
            f"nearest, head {list(named)[-1]} farthest."
        )

    @attnlens.figure("Attention on the previous token")
    def previous_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the weight on the previous token on the head grid, previous-token heads marked."""
        heads = _cells(result["previous"] >= self.options.previous)
        return self._grid(result, figure, "previous", marks={"previous-token": heads})

    @attnlens.figure("Later or earlier tokens")
    def asymmetry_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the asymmetry on the head grid, for models that see later tokens."""
        if "asymmetry" not in result:
            raise attnlens.Skip("no head of this model sees later tokens")
        return self._grid(result, figure, "asymmetry", centre=0.0)

    # -- table and findings -----------------------------------------------------------------------

    @attnlens.table("Heads that look farthest")
    def heads(self, result: xr.Dataset) -> pd.DataFrame:
        """List the measures of the heads that look farthest."""
        names = [name for name in MEASURES if name in result]
        frame = result[names].to_dataframe().reset_index()[["layer", "head", *names]]
        return frame.nlargest(self.options.top, "distance").round(4)

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """Name the heads that lie clearly outside of what twins have."""
        if "distance_twin" not in result:
            return
        near = result.attrs["near"]
        yield _judge(result, "long-range-heads", "distance", "look farther back than chance")
        yield _judge(
            result, "local-heads", "near", f"keep to tokens at most {near} away more than chance"
        )
        yield _judge(
            result,
            "previous-token-heads",
            "previous",
            "read the previous token",
            least=self.options.previous,
        )
        if "asymmetry" in result:
            yield _judge(result, "forward-heads", "asymmetry", "read later tokens rather")
            yield _judge(
                result, "backward-heads", "asymmetry", "read earlier tokens rather", down=True
            )


def _judge(
    result: xr.Dataset, claim: str, name: str, says: str, *, least: float = 0.0, down: bool = False
) -> attnlens.Finding:
    """Judge one measure over all heads at once."""
    values, twins = result[name], result[f"{name}_twin"]
    bounds = attnlens.nulls.twin_range(
        [twins.isel(twin=i) for i in range(twins.sizes["twin"])], floor=MEASURES[name][1]
    )
    beyond = attnlens.nulls.below(values, bounds) if down else attnlens.nulls.above(values, bounds)
    if least:
        beyond = beyond & (values >= least)
    heads = _cells(beyond)
    order = sorted(heads, key=lambda cell: float(values.sel(layer=cell[0], head=cell[1])))
    named = [f"{layer}.{head}" for layer, head in (order if down else order[::-1])]
    shown = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
    found = values.where(beyond) if heads else values
    return attnlens.Finding(
        claim=claim,
        holds=bool(heads),
        text=f"{len(heads)} of {values.size} heads {says}" + (f": {shown}." if heads else "."),
        evidence={"heads": named, "lowest": found.min(), "highest": found.max()},
        null={"lowest": twins.min(), "highest": twins.max()},
    )


def _cells(which: xr.DataArray) -> list[tuple[int, int]]:
    """Return the (layer, head) pairs where an array of booleans is true."""
    which = which.transpose("layer", "head")
    layers, heads = which["layer"].values, which["head"].values
    return [(int(layers[i]), int(heads[j])) for i, j in np.argwhere(which.values)]
