"""Live models: what the user holds already, used as it is."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Final

import torch

from attnlens.errors import UnsupportedModelError
from attnlens.models.checks import quantised_error, refuse_config
from attnlens.models.describe import architecture_of, facts_from
from attnlens.models.facts import ModelFacts
from attnlens.models.model import Model
from attnlens.models.quiet import quiet
from attnlens.models.weights import fingerprint
from attnlens.models.wrapping import facts_of, hook

#: The source of a live model.
MEMORY: Final = "memory"
_KEPT: Final = "_attnlens_model"


def wrap_live(hf: Any) -> Model:
    """Wrap a live Hugging Face model in place."""
    kept = _kept(hf)
    if kept is not None:
        return kept
    name, architecture = _checked(hf)
    notes = _make_eager(hf)
    whole, head = _with_head(hf, architecture, name)
    if not head:
        notes.append("a live model without a head: logits and W_U mean nothing and are not used")
    model = hook(
        whole,
        architecture,
        name=name,
        source=MEMORY,
        revision=_commit(hf.config),
        tokenizer=None,
        notes=notes,
        head=head,
    )
    # A second call must find the wrapped model, as it cannot be wrapped again.
    hf.__dict__[_KEPT] = model
    return model


def describe_hugging_face(hf: Any) -> ModelFacts:
    """Return the facts of a live Hugging Face model without wrapping it or reading its weights."""
    kept = _kept(hf)
    if kept is not None:
        return kept.facts
    name, architecture = _checked(hf)
    whole, _ = _with_head(hf, architecture, name)
    return facts_of(
        whole,
        architecture,
        name=name,
        source=MEMORY,
        revision=_commit(hf.config),
        hashed=False,
    )


def _kept(hf: Any) -> Model | None:
    kept = hf.__dict__.get(_KEPT)
    return kept if isinstance(kept, Model) else None


def _commit(config: Any) -> str | None:
    return getattr(config, "_commit_hash", None)


def _checked(hf: Any) -> tuple[str, str]:
    """Refuse what cannot be wrapped; return the model's name and the class to wrap it as."""
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    name = str(hf.config.name_or_path or type(hf).__name__)
    if any(isinstance(module, GeneralizedComponent) for module in hf.modules()):
        raise UnsupportedModelError(
            f"{name!r} is wrapped by a TransformerBridge already",
            hint="Give the bridge instead of the model inside it.",
        )
    _refuse_packed(hf, name)
    refuse_config(hf.config.to_dict() | {"auto_map": None}, name, trust_remote_code=True)
    with quiet():
        architecture = architecture_of(_named(hf), name)
    return name, architecture


def _with_head(hf: Any, architecture: str, name: str) -> tuple[Any, bool]:
    """Put a live base model (BertModel, GPT2Model) under a head, which TransformerLens needs.

    Returns
    -------
    model
        The model itself where it has a head already.
    bool
        Whether the head is the model's own; where it is not, it is drawn at random.
    """
    if type(hf).__name__ == architecture:
        return hf, True
    import transformers

    kind = getattr(transformers, architecture, None)
    prefix = getattr(kind, "base_model_prefix", "")
    with quiet(), torch.random.fork_rng(devices=[]):
        whole = _empty(kind, hf.config)
        if type(hf).__name__ != type(getattr(whole, prefix, None)).__name__:
            raise UnsupportedModelError(
                f"TransformerLens has no adapter for {name!r}, a live {type(hf).__name__}",
                hint=f"Load it as {architecture}.",
            )
        torch.manual_seed(0)
        first = next(hf.parameters())
        for part, module in whole.named_children():
            if part != prefix:
                module.to_empty(device=first.device).to(first.dtype)
                module.train(hf.training)
                for parameter in module.parameters():
                    torch.nn.init.normal_(parameter, std=0.02)
        setattr(whole, prefix, hf)
        whole.tie_weights()
        whole.training = hf.training
    return whole, False


def _empty(kind: Any, config: Any) -> Any:
    if kind is None:
        return None
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(config))


def _named(hf: Any) -> Any:
    """Return the configuration with the live model's own class in front."""
    config = copy.deepcopy(hf.config)
    config.architectures = [type(hf).__name__, *(config.architectures or [])]
    return config


def _make_eager(hf: Any) -> list[str]:
    """Switch to eager attention, without which patterns never show; say so."""
    used = getattr(hf.config, "_attn_implementation", None)
    if used in (None, "eager"):
        return []
    with quiet():
        from transformer_lens.utilities.attn_implementation import force_eager_attention

        force_eager_attention(hf, per_layer=True)
    return [f"attention was switched from {used} to eager, which alone shows its pattern"]


def _refuse_packed(model: torch.nn.Module, name: str) -> None:
    for path, value in [*model.named_parameters(), *model.named_buffers()]:
        last = path.rpartition(".")[2]
        if last in ("weight", "qweight", "weight_packed") and not value.is_floating_point():
            raise quantised_error(name, f"{path} is {value.dtype}".replace("torch.", ""))
        if last == "weight" and value.dtype.itemsize == 1:
            raise quantised_error(name, f"{path} is {value.dtype}".replace("torch.", ""))


def wrap_bridge(bridge: Any) -> Model:
    """Use a live TransformerBridge as it is."""
    facts = describe_bridge(bridge)
    original = bridge.original_model
    with quiet():
        weights_hash = fingerprint(original, bridge.cfg)
        notes = _make_eager(original) if hasattr(original, "config") else []
    tokenizer = usable_tokenizer(bridge.tokenizer)
    if tokenizer is None and bridge.tokenizer is not None:
        notes.append("the bridge's tokenizer knows no words: the model takes tokens, not text")
    return Model(dataclasses.replace(facts, weights_hash=weights_hash), bridge, tokenizer, notes)


def usable_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer, or None for one that knows no words."""
    return tokenizer if tokenizer is not None and len(tokenizer) > 0 else None


def describe_bridge(bridge: Any) -> ModelFacts:
    """Return the facts of a live TransformerBridge, without its weights' hash.

    Raises
    ------
    UnsupportedModelError
    """
    original = bridge.original_model
    hf_config = getattr(original, "config", None)
    config = hf_config if hasattr(hf_config, "get_text_config") else bridge.cfg
    name = str(getattr(bridge.cfg, "model_name", None) or type(original).__name__)
    if getattr(config, "is_encoder_decoder", False):
        refuse_config({"is_encoder_decoder": True}, name, trust_remote_code=True)
    if not hasattr(bridge, "blocks"):
        raise UnsupportedModelError(
            f"the bridge around {type(original).__name__} has no single stack of blocks",
            hint="Decoder-only models (GPT, Llama, ...) and encoders (BERT) are supported.",
        )
    _refuse_packed(original, name)
    first = next(original.parameters())
    return facts_from(
        name=name,
        source=MEMORY,
        revision=_commit(hf_config),
        config=config,
        cfg=bridge.cfg,
        model=original,
        dtype=first.dtype,
        device=str(bridge.cfg.device if first.is_meta else first.device),
        mode="compatibility" if getattr(bridge, "compatibility_mode", False) else "raw",
        weights_hash=None,
    )
