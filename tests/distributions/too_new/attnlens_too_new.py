import xarray as xr

import attnlens


class TooNew(attnlens.Analysis):
    """Written for an interface that does not exist yet."""

    name = "too-new"
    requires_api = 99

    def compute(self, store):
        return xr.Dataset({"x": 1})


@attnlens.hookimpl
def attnlens_register_analysis():
    return TooNew
