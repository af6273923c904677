import xarray as xr

import attnlens


class OtherLookBack(attnlens.Analysis):
    """Another analysis of the same name."""

    name = "lookback"
    requires = ("pattern.max",)

    def compute(self, store):
        return xr.Dataset({"largest": store["pattern.max"]})


@attnlens.hookimpl
def attnlens_register_analysis():
    return OtherLookBack
