"""From what the user named or holds to a hooked model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import torch

from attnlens.errors import OptionError
from attnlens.models.checkpoint import configure, describe, read_tokenizer, read_weights
from attnlens.models.checks import check_weights
from attnlens.models.devices import (
    check_device_map,
    own_dtype,
    parse_device,
    parse_dtype,
    refuse_device,
)
from attnlens.models.facts import ModelFacts
from attnlens.models.live import (
    describe_bridge,
    describe_hugging_face,
    usable_tokenizer,
    wrap_bridge,
    wrap_live,
)
from attnlens.models.memory import memory_errors, refuse_too_big
from attnlens.models.model import Model
from attnlens.models.quiet import quiet
from attnlens.models.source import find_source
from attnlens.models.wrapping import hook

_SMALLER: Final = "Try dtype float16 or bfloat16, a smaller model, or a device map."


def load_model(
    model: Any,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model, or wrap one that lives already, ready to be captured.

    Parameters
    ----------
    model : str, Path, TransformerBridge, transformers.PreTrainedModel or Model
        A short name (``gpt2-small``, ``pythia-160m``), a repository of the Hugging Face hub,
        either with ``@revision``, a folder, or ``"demo"`` for the bundled model. A live
        ``TransformerBridge`` is used as it is, in its mode. A live Hugging Face model is wrapped
        *in place*: TransformerLens puts its own modules into it, and attention is switched to
        eager; it computes the same afterwards.
    revision : str, optional
        Branch, tag or commit of the hub's repository.
    device : str, optional
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``; by default (``"auto"``) a CUDA device
        where there is one, else the CPU.
    dtype : str, optional
        ``"float32"`` (the default), ``"float16"``, ``"bfloat16"``, ``"float64"``, or ``"auto"``
        for the checkpoint's own.
    device_map : str or dict, optional
        Passed to transformers, to spread the model over devices.
    trust_remote_code : bool, optional
        Run Python code from the model's repository.

    Returns
    -------
    Model

    Raises
    ------
    ModelError
        `UnknownModelError`, `OfflineError`, `GatedModelError`, `UnsupportedModelError`,
        `DamagedModelError` or `OutOfMemoryError`.
    OptionError
        If the device or dtype makes no sense, or is given for a live model.
    """
    if isinstance(model, str | Path):
        where = parse_device(device) if device_map is None else refuse_device(device)
        check_device_map(device_map)
        kind = None if dtype == "auto" else parse_dtype(dtype)
        return _load_named(str(model), revision, where, kind, device_map, trust_remote_code)
    _refuse_options(revision=revision, device=device, dtype=dtype, device_map=device_map)
    if isinstance(model, Model):
        return model
    return wrap_live(model) if _is_hugging_face(model) else wrap_bridge(model)


def describe_model(
    model: Any,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
) -> ModelFacts:
    """Return a model's facts from its configuration; no weights are loaded and nothing allocated.

    Parameters
    ----------
    model, revision, dtype, trust_remote_code
        As for `load_model`. A live Hugging Face model is not wrapped.
    device : str, optional
        Only written into the facts.
    device_map : any, optional
        Without effect, as nothing is loaded.

    Raises
    ------
    ModelError
        As `load_model`, for what can be told before loading.
    """
    if not isinstance(model, str | Path):
        _refuse_options(revision=revision, device=device, dtype=dtype, device_map=device_map)
        return _describe_live(model)
    name = str(model)
    source = find_source(name, revision=revision, files="config", code=trust_remote_code)
    config, architecture = configure(source, trust_remote_code)
    kind = own_dtype(config) if dtype == "auto" else parse_dtype(dtype)
    facts = describe(source, config, architecture, kind, trust_remote_code)
    return dataclasses.replace(facts, device="" if device is None else str(device))


def load_tokenizer(
    model: Any, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Return a model's tokenizer, or None where it has none; no weights are loaded.

    Parameters
    ----------
    model, revision, trust_remote_code
        As for `load_model`.
    """
    if isinstance(model, str | Path):
        source = find_source(
            str(model), revision=revision, files="tokenizer", code=trust_remote_code
        )
        with quiet():
            return read_tokenizer(source, trust_remote_code)[0]
    return None if _is_hugging_face(model) else usable_tokenizer(model.tokenizer)


def _refuse_options(**given: Any) -> None:
    for option, value in given.items():
        if value is not None:
            raise OptionError(
                f"{option}={value!r} cannot be applied to a model that is loaded already",
                hint="Move or cast the model yourself, or give its name.",
            )


def _is_hugging_face(model: Any) -> bool:
    """Whether a live model is Hugging Face's (True), or a bridge or ours (False).

    Raises
    ------
    OptionError
        If it is something else.
    """
    with quiet():
        from transformer_lens.model_bridge import TransformerBridge
        from transformers import PreTrainedModel
    if isinstance(model, PreTrainedModel):
        return True
    if isinstance(model, TransformerBridge | Model):
        return False
    raise OptionError(
        f"a {type(model).__name__} is no model that attnlens can load",
        hint="Give a name, a folder, a TransformerBridge or a Hugging Face PreTrainedModel.",
    )


def _describe_live(model: Any) -> ModelFacts:
    if isinstance(model, Model):
        return model.facts
    return describe_hugging_face(model) if _is_hugging_face(model) else describe_bridge(model)


def _load_named(
    name: str,
    revision: str | None,
    device: str,
    dtype: torch.dtype | None,
    device_map: Any,
    trust: bool,
) -> Model:
    source = find_source(name, revision=revision, code=trust)
    config, architecture = configure(source, trust)
    safe = check_weights(source)
    kind = dtype or own_dtype(config)
    expected = dataclasses.replace(
        describe(source, config, architecture, kind, trust), device=device or "the devices"
    )
    if device_map is None:
        refuse_too_big(expected, device)
    with quiet(), memory_errors(expected, "loading it", _SMALLER):
        hf, notes, head = read_weights(
            source, config, architecture, kind, device_map, trust, safe=safe
        )
        if device_map is None:
            hf = hf.to(device)
    hf.eval()
    with quiet():
        tokenizer, said = read_tokenizer(source, trust)
    notes += said
    return hook(
        hf,
        architecture,
        name=source.name,
        source=source.origin,
        revision=source.revision or revision,
        tokenizer=tokenizer,
        notes=notes,
        head=head,
    )
