"""A model's matrices in one layout for all families, and a fingerprint of its parameters."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlens.models.facts import ModelFacts

Array = NDArray[np.float32]


def output_projection(bridge: Any, layer: int, facts: ModelFacts) -> tuple[Tensor, Tensor] | None:
    """Return W_O[head, d_head, d_model] and b_O[d_model] of a layer in float32 on the CPU.

    None where the layer has no such matrix.
    """
    attn = getattr(bridge.blocks[layer], "attn", None)
    matrix = _read(attn, "W_O")
    if matrix is None:
        return None
    shape = (facts.n_heads, facts.d_head, facts.d_model)
    if matrix.numel() != facts.n_heads * facts.d_head * facts.d_model:
        return None
    bias = _read(attn, "b_O")
    if bias is None or bias.numel() != facts.d_model:
        bias = torch.zeros(facts.d_model)
    return matrix.reshape(shape), bias.reshape(facts.d_model)


def weights_of(bridge: Any, facts: ModelFacts, *, pre_norm: bool, head: bool) -> dict[str, Array]:
    """Return the matrices that attention and its reading in the vocabulary consist of.

    Parameters
    ----------
    pre_norm : bool
        Whether ``ln1`` is the norm before attention; if not it is left out.
    head : bool
        Whether the unembedding is trained (a base model's is not, and is left out).

    Returns
    -------
    dict of str to float32 array
        ``W_Q`` [layer, head, d_model, d_head], ``W_K``, ``W_V`` [layer, kv_head, d_model,
        d_head], ``W_O`` [layer, head, d_head, d_model], ``b_Q`` [layer, head, d_head], ``b_K``,
        ``b_V`` [layer, kv_head, d_head], ``b_O`` [layer, d_model], ``W_E`` [d_vocab, d_model],
        ``W_pos`` [n_ctx, d_model], ``W_U`` [d_model, d_vocab], ``b_U`` [d_vocab], ``ln1_w``,
        ``ln1_b`` [layer, d_model], ``q_norm_w``, ``k_norm_w`` [layer, d_head] or [layer,
        head or kv_head, d_head], ``ln_final_w``, ``ln_final_b`` [d_model]; only those that the
        model has. Gains are as they act: 1 is added where the model adds it (Gemma).
    """
    heads, groups, d, d_head = facts.n_heads, facts.n_kv_heads, facts.d_model, facts.d_head
    shapes: dict[str, tuple[int, ...]] = {
        "W_Q": (heads, d, d_head),
        "W_K": (groups, d, d_head),
        "W_V": (groups, d, d_head),
        "W_O": (heads, d_head, d),
        "b_Q": (heads, d_head),
        "b_K": (groups, d_head),
        "b_V": (groups, d_head),
        "b_O": (d,),
    }
    blocks = list(bridge.blocks)
    found: dict[str, Array] = {}
    for name, shape in shapes.items():
        _add(found, name, [_shaped(_read(_part(b, "attn"), name), shape) for b in blocks])
    offset = 1.0 if getattr(bridge.cfg, "rmsnorm_uses_offset", False) else 0.0
    for part, norm in (("q_norm", "q_norm_w"), ("k_norm", "k_norm_w")):
        gains = [_gain(_part(_part(b, "attn"), part), "weight", offset) for b in blocks]
        _add(found, norm, [_per_head(gain, d_head) for gain in gains])
    if pre_norm:
        _add(found, "ln1_w", [_gain(_part(b, "ln1"), "weight", offset) for b in blocks])
        _add(found, "ln1_b", [_gain(_part(b, "ln1"), "bias", 0.0) for b in blocks])
    single: dict[str, Tensor | None] = {
        "W_E": _read(_part(bridge, "embed"), "W_E"),
        "W_pos": _positions(bridge) if facts.positions == "absolute" else None,
        "ln_final_w": _gain(_part(bridge, "ln_final"), "weight", offset) if head else None,
        "ln_final_b": _gain(_part(bridge, "ln_final"), "bias", 0.0) if head else None,
        "W_U": _read(_part(bridge, "unembed"), "W_U") if head else None,
        "b_U": _read(_part(bridge, "unembed"), "b_U") if head else None,
    }
    if single["b_U"] is not None and not single["b_U"].any():
        # The bridge makes zeros up where the model has no bias.
        single["b_U"] = None
    found |= {name: value.numpy() for name, value in single.items() if value is not None}
    return found


def _add(found: dict[str, Array], name: str, layers: list[Tensor | None]) -> None:
    present = [value for value in layers if value is not None]
    if present and len(present) == len(layers) and len({v.shape for v in present}) == 1:
        found[name] = torch.stack(present).numpy()


def _part(owner: Any, name: str) -> Any:
    return getattr(owner, name, None) if owner is not None else None


def _read(owner: Any, name: str) -> Tensor | None:
    """Read a parameter through the bridge, which shows processed weights where there are any."""
    if owner is None:
        return None
    try:
        value = getattr(owner, name)
    except (AttributeError, ValueError, RuntimeError, NotImplementedError):
        return None
    return _plain(value)


def _plain(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or value.is_meta or not value.is_floating_point():
        return None
    return value.detach().to("cpu", torch.float32, copy=True).contiguous()


def _positions(bridge: Any) -> Tensor | None:
    try:
        return _plain(bridge.W_pos)
    except (AttributeError, ValueError):
        return None


def _shaped(value: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if value is None or value.numel() != int(np.prod(shape)):
        return None
    return value.reshape(shape)


def _gain(norm: Any, name: str, offset: float) -> Tensor | None:
    value = _read(unwrapped(norm), name)
    return None if value is None else value + offset


def _per_head(gain: Tensor | None, d_head: int) -> Tensor | None:
    if gain is None or gain.shape == (d_head,):
        return gain
    return gain.reshape(-1, d_head) if gain.numel() % d_head == 0 else None


def unwrapped(module: Any) -> Any:
    """Return the module that a bridge's component stands for, or `module` itself."""
    while getattr(module, "_modules", {}).get("_original_component") is not None:
        module = module._modules["_original_component"]
    return module


def plain_names(model: Any, cfg: Any) -> list[str]:
    """Return the names of a model's parameters as they are without a bridge around.

    They are read off an empty model of the same configuration on the meta device.
    """
    config = copy.deepcopy(getattr(model, "config", None))
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        if hasattr(type(model), "_from_config"):
            empty = type(model)._from_config(config)
        else:
            empty = type(model)(copy.deepcopy(cfg))
    return [name for name, _ in empty.named_parameters()]


def fingerprint(model: torch.nn.Module, cfg: Any) -> str | None:
    """Return the sha256 over the parameters: name, dtype, shape, bytes, in name order.

    Parameters
    ----------
    model : torch.nn.Module
        The Hugging Face model, wrapped by a bridge or not: the same weights give the same value.
    cfg : TransformerBridgeConfig
        Needed for TransformerLens' own models only.

    Returns
    -------
    str or None
        None if a parameter is offloaded, so that its values are not at hand.
    """
    digest = hashlib.sha256()
    for name in sorted(plain_names(model, cfg)):
        owner: Any = model
        *path, last = name.split(".")
        for part in path:
            owner = getattr(unwrapped(owner), part)
        value = getattr(unwrapped(owner), last).detach()
        if value.is_meta:
            return None
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.reshape(-1).to("cpu").contiguous()
        if flat.numel():
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
