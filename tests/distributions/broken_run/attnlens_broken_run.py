import attnlens


class BrokenRun(attnlens.Analysis):
    """An analysis that loads and then fails while computing."""

    name = "broken-run"
    requires = ("pattern.entropy",)

    def compute(self, store):
        raise ZeroDivisionError("division of a head by nothing")


@attnlens.hookimpl
def attnlens_register_analysis():
    return BrokenRun
