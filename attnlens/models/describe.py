"""The facts of a model, from its configuration and the modules it consists of."""

from __future__ import annotations

import difflib
import math
from typing import Any, Final

import torch

from attnlens.errors import UnsupportedModelError
from attnlens.models.facts import ModelFacts, Positions

_POSITIONS: Final[dict[str, Positions]] = {
    "standard": "absolute",
    "shortformer": "absolute",
    "rotary": "rotary",
    "alibi": "alibi",
    "relative_positional_bias": "relative",
}
_QK_NORMS: Final = ("q_norm", "q_layernorm", "query_norm", "query_layernorm")


def architecture_of(config: Any, name: str) -> str:
    """Return the class that TransformerLens has an adapter for and that loads this model.

    A base model (BertModel, LlamaModel) or one with another head is read through the language
    model of its family; a head that the checkpoint lacks is reported when the weights are loaded.

    Raises
    ------
    UnsupportedModelError
    """
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.utilities.architectures import classify_architecture
    from transformers.models.auto import modeling_auto

    kind = getattr(config, "model_type", None)
    # Encoders come first: BERT can also be read as a decoder, which it is only if it says so.
    families = [
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(kind),
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind),
    ]
    if getattr(config, "is_decoder", False):
        families.reverse()
    candidates = [*(getattr(config, "architectures", None) or []), *families]
    named = [c for c in candidates if isinstance(c, str)]
    for candidate in named:
        if candidate not in SUPPORTED_ARCHITECTURES:
            continue
        what = classify_architecture(candidate)
        if what in ("seq2seq", "audio", "vision"):
            raise UnsupportedModelError(
                f"{name!r} is a {what} model ({candidate}); attnlens captures text decoders and "
                "text encoders",
            )
        return candidate
    shown = " or ".join(dict.fromkeys(named)) or repr(kind)
    close = difflib.get_close_matches(shown, SUPPORTED_ARCHITECTURES, n=3)
    raise UnsupportedModelError(
        f"TransformerLens has no adapter for {shown}, the architecture of {name!r}",
        hint=f"The nearest that it supports: {', '.join(close)}." if close else None,
    )


def facts_from(
    *,
    name: str,
    source: str,
    revision: str | None,
    config: Any,
    cfg: Any,
    model: torch.nn.Module,
    dtype: torch.dtype,
    device: str,
    mode: str,
    weights_hash: str | None,
) -> ModelFacts:
    """Gather a model's facts.

    Parameters
    ----------
    config : transformers.PretrainedConfig or TransformerBridgeConfig
        The model's own configuration.
    cfg : TransformerBridgeConfig
        TransformerLens' view of it, after the adapter has set its share.
    model : torch.nn.Module
        The model, on any device ("meta" will do).
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    n_layers, n_heads = int(cfg.n_layers), int(cfg.n_heads)
    positions = _POSITIONS.get(str(getattr(cfg, "positional_embedding_type", "")), "none")
    modules = dict(model.named_modules())
    soft_cap = getattr(text, "attn_logit_softcapping", None)
    return ModelFacts(
        name=name,
        source=source,
        revision=revision,
        architecture=str(cfg.architecture or type(model).__name__),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=int(getattr(cfg, "n_key_value_heads", None) or n_heads),
        d_model=int(cfg.d_model),
        d_head=int(cfg.d_head),
        d_vocab=int(cfg.d_vocab),
        n_ctx=int(cfg.n_ctx),
        positions=positions,
        causal=getattr(cfg, "attention_dir", "causal") == "causal",
        windows=windows_of(text, n_layers),
        soft_cap=None if soft_cap is None else float(soft_cap),
        scales=scales_of(text, n_layers, int(cfg.d_head), cfg),
        qk_norm=any(path.rpartition(".")[2] in _QK_NORMS for path in modules),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        mode=mode,
        n_params=count(model),
        weights_hash=weights_hash,
        config=_config_dict(config),
        rotary_dim=_rotary_dim(text, int(cfg.d_head)) if positions == "rotary" else 0,
        alibi_slopes=alibi_slopes(n_heads) if positions == "alibi" else None,
        sinks=any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        parallel=bool(getattr(cfg, "parallel_attn_mlp", False)),
        norm=_norm(str(getattr(cfg, "normalization_type", None) or "")),
    )


def _norm(kind: str) -> str:
    if kind.startswith("RMS"):
        return "rms"
    return "layer" if kind.startswith("LN") else "none"


def count(model: torch.nn.Module) -> int:
    """Count the parameters, shared ones once, and not the bridge's split copies of fused ones."""
    return sum(p.numel() for name, p in model.named_parameters() if not is_split_copy(name, model))


def is_split_copy(name: str, model: torch.nn.Module) -> bool:
    """Whether a parameter is a piece that TransformerLens cut from a fused projection.

    The bridge keeps a fused query-key-value projection as ``qkv`` and puts ``q``, ``k`` and ``v``
    cut from it beside, which Hugging Face's model does not have.
    """
    for part in (".q.", ".k.", ".v."):
        head, found, _ = name.rpartition(part)
        if found:
            try:
                return hasattr(model.get_submodule(head), "qkv")
            except AttributeError:
                return False
    return False


def windows_of(config: Any, n_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window: keys that a query sees, its own included.

    Mistral slides in every layer, Gemma 2 and others in those that ``layer_types`` names, GPT-Neo
    in those that ``attention_layers`` calls local.
    """
    everywhere: tuple[int | None, ...] = (None,) * n_layers
    local = getattr(config, "attention_layers", None)
    if local and getattr(config, "window_size", None):
        return tuple(int(config.window_size) if kind == "local" else None for kind in local)
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return everywhere
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    return (int(window),) * n_layers


def scales_of(config: Any, n_layers: int, d_head: int, cfg: Any) -> tuple[float, ...]:
    """Return each layer's score scale beta, 1 / sqrt(d_head) unless the family says otherwise."""
    scale = d_head**-0.5
    if getattr(config, "query_pre_attn_scalar", None):
        scale = float(config.query_pre_attn_scalar) ** -0.5
    elif getattr(config, "attention_multiplier", None):
        scale = float(config.attention_multiplier)
    elif getattr(config, "model_type", None) == "gpt_neo" or (
        config is cfg and getattr(cfg, "use_attn_scale", True) is False
    ):
        scale = 1.0
    elif config is cfg and getattr(cfg, "attn_scale", -1.0) > 0:
        # TransformerLens' own models divide by attn_scale.
        scale = 1.0 / float(cfg.attn_scale)
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return tuple(scale / (layer + 1) for layer in range(n_layers))
    return (scale,) * n_layers


def _rotary_dim(config: Any, d_head: int) -> int:
    if getattr(config, "rotary_dim", None):
        return int(config.rotary_dim)
    rope = getattr(config, "rope_parameters", None) or {}
    share = None
    if isinstance(rope, dict):
        share = rope.get("partial_rotary_factor")
    for field in ("partial_rotary_factor", "rotary_pct"):
        share = getattr(config, field, None) if share is None else share
    return int(d_head * (1.0 if share is None else float(share)))


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope per head.

    For 2^p heads the slopes are ``2^(-8 i / n)``; other numbers interleave those of the next
    power of two.

    References
    ----------
    Press, Smith, Lewis: Train Short, Test Long. ICLR 2022, section 3.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    base = 2.0 ** (-8.0 / power)
    slopes = [base ** (i + 1) for i in range(power)]
    between = 2.0 ** (-4.0 / power)
    slopes += [between ** (2 * i + 1) for i in range(n_heads - power)]
    return tuple(slopes)


def _config_dict(config: Any) -> dict[str, Any]:
    values = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    return {str(key): value for key, value in values.items() if not str(key).startswith("_")}
