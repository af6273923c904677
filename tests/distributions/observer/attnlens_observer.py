import attnlens

seen = []


@attnlens.hookimpl
def attnlens_before_analysis(name, store):
    seen.append(("before", name))


@attnlens.hookimpl
def attnlens_after_analysis(name, result):
    seen.append(("after", name, sorted(result.data_vars)))


@attnlens.hookimpl
def attnlens_analysis_failed(name, error):
    seen.append(("failed", name, type(error).__name__))
