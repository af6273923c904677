"""Around a Hugging Face model, or a live bridge: a hooked model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from attnlens.errors import UnsupportedModelError
from attnlens.models.checkpoint import adapter_config, first_line
from attnlens.models.describe import facts_from
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
    """Wrap a Hugging Face model in place, and check that it still computes the same.

    Parameters
    ----------
    hf : transformers.PreTrainedModel
    architecture : str
        Its class, which TransformerLens has an adapter for.
    name, source, revision, tokenizer, notes, head
        For the facts and for `Model`.

    Raises
    ------
    UnsupportedModelError
        If TransformerLens cannot wrap it, or computes something else.
    """
    config = copy.deepcopy(hf.config)
    with quiet(), torch.random.fork_rng(devices=[]):
        facts = facts_of(hf, architecture, name=name, source=source, revision=revision)
        before = _plain_logits(hf, facts)
        bridge = _bridge(hf, config, architecture, name, facts.device)
        model = Model(facts, bridge, tokenizer, notes, head=head)
    _compare(before, model)
    return model


def facts_of(
    hf: Any, architecture: str, *, name: str, source: str, revision: str | None, hashed: bool = True
) -> ModelFacts:
    """Return the facts of a Hugging Face model that no bridge is around.

    Parameters
    ----------
    hashed : bool, optional
        Whether to read all weights for their hash.
    """
    embedding = hf.get_input_embeddings().weight
    with quiet():
        cfg = adapter_config(copy.deepcopy(hf.config), architecture, name, embedding.dtype)
    return facts_from(
        name=name,
        source=source,
        revision=revision,
        config=copy.deepcopy(hf.config),
        cfg=cfg,
        model=hf,
        dtype=embedding.dtype,
        device=str(embedding.device),
        mode="raw",
        weights_hash=fingerprint(hf, cfg) if hashed else None,
    )


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
    exact = model.facts.dtype in ("float32", "float64")
    if (1e-3 if exact else 0.05) < off <= (0.05 if exact else 0.2):
        model.notes.append(
            f"TransformerLens computes this model a little differently from Hugging Face: logits "
            f"are off by {off:.1%} of the largest"
        )
    elif off > 0.05:
        raise UnsupportedModelError(
            f"TransformerLens computes {model.facts.name!r} ({model.facts.architecture}) "
            f"differently from Hugging Face: logits are off by {off:.1%} of the largest",
            hint="What it shows of this model could not be trusted.",
        )
