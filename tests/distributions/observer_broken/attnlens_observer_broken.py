import attnlens


@attnlens.hookimpl
def attnlens_before_analysis(name, store):
    raise RuntimeError("I do not want to watch")
