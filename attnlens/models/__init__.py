"""Models: a name, a folder or a live model becomes a hooked model and its facts.

The only room that imports transformer_lens and transformers. `ModelFacts` needs neither them nor
torch, so that stores and reports can be read without them; the rest is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnlens.models.facts import ModelFacts

if TYPE_CHECKING:
    from attnlens.models.loading import describe_model, load_model, load_tokenizer
    from attnlens.models.model import Model

__all__ = ["Model", "ModelFacts", "describe_model", "load_model", "load_tokenizer"]

_HOMES = {
    "Model": "attnlens.models.model",
    "describe_model": "attnlens.models.loading",
    "load_model": "attnlens.models.loading",
    "load_tokenizer": "attnlens.models.loading",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings
    from importlib import import_module

    with warnings.catch_warnings():
        # In notebooks tqdm, which comes with transformers, would like ipywidgets to be there.
        warnings.filterwarnings("ignore", message="IProgress not found")
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
