import attnlens


@attnlens.hookimpl
def attnlens_register_analisys():
    return None
