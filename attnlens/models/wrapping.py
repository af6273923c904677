"""Around a Hugging Face model, or a live bridge: a hooked model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from attnlens.errors import UnsupportedModelError
from attnlens.models.checkpoint import adapter_config, first_line
from attnlens.models.checks import quantised_error, refuse_config
from attnlens.models.describe import architecture_of, facts_from
from attnlens.models.facts import ModelFacts
from attnlens.models.memory import memory_errors
from attnlens.models.model import Model
from attnlens.models.probe import probe_tokens
from attnlens.models.quiet import quiet
from attnlens.models.weights import fingerprint, unwrapped


def make_twin(model: Model, seed: int) -> Model:
    """Return a model like `model` with fresh random weights: see `Model.twin`."""
    bridge, facts = model.bridge, model.facts
    original = bridge.original_model
    dtype = getattr(torch, facts.dtype)
    name = f"{facts.name}, random weights {seed}"
    hint = "Use fewer twins, or a machine with more memory."
    with (
        quiet(),
        memory_errors(facts, "making its random twin", hint),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(seed)
        if hasattr(type(original), "_from_config"):
            config = copy.deepcopy(original.config)
            # Drawn on the CPU in float32, so that a seed means the same bytes everywhere.
            fresh = type(original)._from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
            fresh = fresh.to(dtype).to(facts.device).eval()
            twin = _bridge(fresh, config, facts.architecture, name, facts.device)
        else:
            from transformer_lens.model_bridge.sources import boot_native

            settings = copy.deepcopy(bridge.cfg)
            settings.seed = seed
            twin = boot_native(settings, device=facts.device, dtype=dtype)
            twin.eval()
            fresh = twin.original_model
        if facts.mode == "compatibility":
            twin.enable_compatibility_mode()
    twin_facts = dataclasses.replace(
        facts, name=name, source="random", revision=None, weights_hash=fingerprint(fresh, twin.cfg)
    )
    return Model(twin_facts, twin, model.tokenizer)


def hook(
    hf: Any,
    architecture: str,
    *,
    name: str,
    source: str,
    revision: str | None,
    tokenizer: Any,
    notes: Iterable[str],
    head: bool = True,
) -> Model:
    """Wrap a Hugging Face model, and check that it still computes the same."""
    config = copy.deepcopy(hf.config)
    device = str(hf.get_input_embeddings().weight.device)
    dtype = hf.get_input_embeddings().weight.dtype
    with quiet(), torch.random.fork_rng(devices=[]):
        cfg = adapter_config(copy.deepcopy(config), architecture, name, dtype)
        facts = facts_from(
            name=name,
            source=source,
            revision=revision,
            config=config,
            cfg=cfg,
            model=hf,
            dtype=dtype,
            device=device,
            mode="raw",
            weights_hash=fingerprint(hf, cfg),
        )
        before = _plain_logits(hf, facts)
        bridge = _bridge(hf, config, architecture, name, device)
        model = Model(facts, bridge, tokenizer, notes, head=head)
    _compare(before, model)
    return model


def _bridge(hf: Any, config: Any, architecture: str, name: str, device: str) -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.utilities.multi_gpu import count_unique_devices

    modes = {module: module.training for module in hf.modules()}
    try:
        bridge = build_bridge_from_module(
            hf, architecture, hf_config=config, model_name=name, device=device
        )
    except Exception as error:
        if "memory" in str(error).lower():
            raise
        raise UnsupportedModelError(
            f"TransformerLens cannot wrap {name!r} ({architecture}): {first_line(error)}"
        ) from error
    bridge.cfg.n_devices = count_unique_devices(hf)
    # The bridge gives every module the mode of the whole; a user may have mixed them.
    for module, training in modes.items():
        module.training = training
    for module in hf.modules():
        if module not in modes and unwrapped(module) in modes:
            module.training = modes[unwrapped(module)]
    return bridge


def _plain_logits(hf: Any, facts: ModelFacts) -> torch.Tensor:
    tokens = probe_tokens(facts, getattr(hf.config, "pad_token_id", None)).to(facts.device)
    training = [m for m in hf.modules() if m.training]
    hf.eval()
    try:
        with torch.inference_mode():
            logits: torch.Tensor = hf(input_ids=tokens).logits
    finally:
        for module in training:
            module.training = True
    return logits.detach().to("cpu", torch.float32)


def _compare(before: torch.Tensor, model: Model) -> None:
    """Hold the wrapped model's logits against the plain model's on the same tokens."""
    after = model.probe_logits.to(torch.float32)
    scale = float(before.abs().max()) or 1.0
    off = float((after - before).abs().max()) / scale
    if off > (1e-3 if model.facts.dtype in ("float32", "float64") else 0.1):
        raise UnsupportedModelError(
            f"TransformerLens computes {model.facts.name!r} ({model.facts.architecture}) "
            f"differently from Hugging Face: logits are off by {off:.1%} of the largest",
            hint="What it shows of this model could not be trusted.",
        )


def wrap_live(hf: Any) -> Model:
    """Wrap a live Hugging Face model in place."""
    kept = hf.__dict__.get("_attnlens_model")
    if isinstance(kept, Model):
        return kept
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
    notes = _make_eager(hf)
    whole, head = _with_head(hf, architecture, name)
    if not head:
        notes.append("a live model without a head: logits and W_U mean nothing and are not used")
    model = hook(
        whole,
        architecture,
        name=name,
        source="memory",
        revision=getattr(hf.config, "_commit_hash", None),
        tokenizer=None,
        notes=notes,
        head=head,
    )
    # A second call must find the wrapped model, as it cannot be wrapped again.
    hf.__dict__["_attnlens_model"] = model
    return model


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
                for parameter in module.parameters():
                    torch.nn.init.normal_(parameter, std=0.02)
        setattr(whole, prefix, hf)
        whole.tie_weights()
        whole.train(hf.training)
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
    original = bridge.original_model
    if not hasattr(bridge, "blocks"):
        raise UnsupportedModelError(
            f"the bridge around {type(original).__name__} has no single stack of blocks",
            hint="Decoder-only models (GPT, Llama, ...) and encoders (BERT) are supported.",
        )
    hf_config = getattr(original, "config", None)
    config = hf_config if hasattr(hf_config, "get_text_config") else bridge.cfg
    name = str(getattr(bridge.cfg, "model_name", None) or type(original).__name__)
    if getattr(config, "is_encoder_decoder", False):
        refuse_config({"is_encoder_decoder": True}, name, trust_remote_code=True)
    _refuse_packed(original, name)
    first = next(original.parameters())
    facts = facts_from(
        name=name,
        source="memory",
        revision=getattr(hf_config, "_commit_hash", None),
        config=config,
        cfg=bridge.cfg,
        model=original,
        dtype=first.dtype,
        device=str(getattr(bridge.cfg, "device", None) or first.device),
        mode="compatibility" if getattr(bridge, "compatibility_mode", False) else "raw",
        weights_hash=fingerprint(original, bridge.cfg),
    )
    notes = _make_eager(original) if hf_config is not None else []
    tokenizer = bridge.tokenizer
    if tokenizer is not None and len(tokenizer) == 0:
        tokenizer = None
        notes.append("the bridge's tokenizer knows no words: the model takes tokens, not text")
    return Model(facts, bridge, tokenizer, notes)
