"""From what the user named or holds to a hooked model."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from attnlens.errors import (
    DamagedModelError,
    ModelError,
    OptionError,
    UnsupportedModelError,
)
from attnlens.models.checks import (
    check_weights,
    has_tokenizer,
    quantised_error,
    read_config,
    refuse_config,
)
from attnlens.models.describe import architecture_of, facts_from
from attnlens.models.facts import ModelFacts
from attnlens.models.memory import memory_errors, refuse_too_big
from attnlens.models.model import Model
from attnlens.models.probe import probe_tokens
from attnlens.models.quiet import log, quiet
from attnlens.models.source import Source, find_source
from attnlens.models.weights import fingerprint

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_OTHER_NAMES: Final = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "double": "float64",
    "fp64": "float64",
}
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
        where = _device(device) if device_map is None else _no_device(device)
        kind = None if dtype == "auto" else _dtype(dtype)
        return _load_named(str(model), revision, where, kind, device_map, trust_remote_code)
    given = {"revision": revision, "device": device, "dtype": dtype, "device_map": device_map}
    for option, value in given.items():
        if value is not None:
            raise OptionError(
                f"{option}={value!r} cannot be applied to a model that is loaded already",
                hint="Move or cast the model yourself, or give its name.",
            )
    if isinstance(model, Model):
        return model
    with quiet():
        from transformer_lens.model_bridge import TransformerBridge
        from transformers import PreTrainedModel
    if isinstance(model, TransformerBridge):
        return _wrap_bridge(model)
    if isinstance(model, PreTrainedModel):
        return _wrap_live(model)
    raise OptionError(
        f"a {type(model).__name__} is no model that attnlens can load",
        hint="Give a name, a folder, a TransformerBridge or a Hugging Face PreTrainedModel.",
    )


def describe_model(
    name: str | Path,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> ModelFacts:
    """Return a model's facts from its configuration; no weights are loaded and nothing allocated.

    Parameters
    ----------
    name, revision, dtype, trust_remote_code
        As for `load_model`.
    device : str, optional
        Only written into the facts.

    Raises
    ------
    ModelError
        As `load_model`, for what can be told before loading.
    """
    source = find_source(str(name), revision=revision, weights=False, code=trust_remote_code)
    config, architecture = _configure(source, trust_remote_code)
    kind = _own_dtype(config) if dtype == "auto" else _dtype(dtype)
    facts = _describe(source, config, architecture, kind, trust_remote_code)
    return dataclasses.replace(facts, device="" if device is None else str(device))


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


def _load_named(
    name: str,
    revision: str | None,
    device: str,
    dtype: torch.dtype | None,
    device_map: Any,
    trust: bool,
) -> Model:
    source = find_source(name, revision=revision, code=trust)
    config, architecture = _configure(source, trust)
    safe = check_weights(source)
    kind = dtype or _own_dtype(config)
    expected = dataclasses.replace(
        _describe(source, config, architecture, kind, trust), device=device or "the devices"
    )
    if device_map is None:
        refuse_too_big(expected, device)
    with quiet(), memory_errors(expected, "loading it", _SMALLER):
        hf, notes, head = _read_weights(
            source, config, architecture, kind, device_map, trust, safe=safe
        )
        if device_map is None:
            hf = hf.to(device)
    hf.eval()
    with quiet():
        tokenizer, said = _tokenizer(source, trust)
    notes += said
    return _hook(
        hf,
        architecture,
        name=source.name,
        source=source.origin,
        revision=source.revision or revision,
        tokenizer=tokenizer,
        notes=notes,
        head=head,
    )


def _configure(source: Source, trust: bool) -> tuple[Any, str]:
    """Read and check the configuration; return it and the class to load."""
    values = read_config(source)
    refuse_config(values, source.name, trust_remote_code=trust)
    with quiet():
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(
                source.folder, trust_remote_code=trust, local_files_only=True
            )
        except (ValueError, KeyError) as error:
            if "model type" in str(error) or isinstance(error, KeyError):
                raise UnsupportedModelError(
                    f"transformers does not know the model type {values.get('model_type')!r} of "
                    f"{source.name!r}",
                    hint="A newer transformers may know it.",
                ) from error
            raise _damaged_config(source, error) from error
        except Exception as error:
            raise _damaged_config(source, error) from error
        return config, architecture_of(config, source.name)


def _damaged_config(source: Source, error: Exception) -> DamagedModelError:
    return DamagedModelError(
        f"config.json of {source.name!r} makes no sense to transformers: {_first_line(error)}",
        hint="Copy or download the model again.",
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _describe(
    source: Source, config: Any, architecture: str, dtype: torch.dtype, trust: bool
) -> ModelFacts:
    """Gather the facts with the model on the meta device, where nothing takes memory."""
    with quiet(), torch.random.fork_rng(devices=[]):
        settings = copy.deepcopy(config)
        try:
            with torch.device("meta"):
                empty = _from_config(_model_class(architecture, trust), settings, dtype)
            cfg = _adapter_config(settings, architecture, source.name, dtype)
        except Exception as error:
            raise _damaged_config(source, error) from error
        return facts_from(
            name=source.name,
            source=source.origin,
            revision=source.revision,
            config=config,
            cfg=cfg,
            model=empty,
            dtype=dtype,
            device="",
            mode="raw",
            weights_hash=None,
        )


def _model_class(architecture: str, trust: bool) -> Any:
    import transformers
    from transformer_lens.model_bridge.sources.transformers.helpers import (
        get_hf_model_class_for_architecture,
    )

    own = getattr(transformers, architecture, None)
    return (
        own if own is not None and not trust else get_hf_model_class_for_architecture(architecture)
    )


def _from_config(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    make = getattr(kind, "_from_config", None) or kind.from_config
    return make(config, dtype=dtype)


def _adapter_config(config: Any, architecture: str, name: str, dtype: torch.dtype) -> Any:
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources import build_bridge_config_from_hf

    cfg = build_bridge_config_from_hf(config, architecture, name, dtype)
    return ArchitectureAdapterFactory.select_architecture_adapter(cfg).cfg


def _read_weights(
    source: Source,
    config: Any,
    architecture: str,
    dtype: torch.dtype,
    device_map: Any,
    trust: bool,
    *,
    safe: bool,
) -> tuple[Any, list[str], bool]:
    """Load the Hugging Face model; return it, notes, and whether its head was in the weights."""
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "eager",
        "use_safetensors": safe,
        "weights_only": True,
        "local_files_only": True,
        "output_loading_info": True,
    }
    if trust:
        options["trust_remote_code"] = True
    if device_map is not None:
        options["device_map"] = device_map
    kind = _model_class(architecture, trust)
    try:
        # What the weights lack (a head, usually) is drawn at random: the same every time.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            hf, info = kind.from_pretrained(source.folder, **options)
    except (torch.OutOfMemoryError, MemoryError, ModelError):
        raise
    except pickle.UnpicklingError as error:
        raise DamagedModelError(
            f"the weights of {source.name!r} hold more than tensors, or are damaged; attnlens "
            "runs no pickled code",
            hint="Use a checkpoint in safetensors.",
        ) from error
    except Exception as error:
        if "memory" in str(error).lower():
            raise
        raise DamagedModelError(
            f"the weights of {source.name!r} cannot be read: {_first_line(error)}",
            hint="Copy or download the model again, and check that config.json belongs to it.",
        ) from error
    _check_fit(source, hf, info)
    missing = sorted(info["missing_keys"])
    head = not missing
    notes = []
    if missing:
        notes.append(
            f"the checkpoint has no language-model head ({missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "): logits and W_U mean nothing and are not used"
        )
    return hf, notes, head


def _check_fit(source: Source, hf: Any, info: dict[str, Any]) -> None:
    """Refuse weights that do not fill the model; only its head may be missing."""
    surplus = sorted(info["unexpected_keys"])
    packed = [key for key in surplus if key.endswith((".qweight", ".weight_packed", ".SCB"))]
    if packed:
        raise quantised_error(source.name, packed[0])
    body = f"{hf.base_model_prefix}."
    bad = sorted(str(key) for key in info.get("mismatched_keys", ()))
    missing = sorted(key for key in info["missing_keys"] if key.startswith(body))
    if not bad and not missing:
        return
    what = f"lack {missing[0]}" if missing else f"do not fit config.json at {bad[0]}"
    more = len(missing or bad) - 1
    raise DamagedModelError(
        f"the weights of {source.name!r} {what}" + (f" and {more} more" if more else ""),
        hint="Copy or download the model again, and check that config.json belongs to it.",
    )


def _tokenizer(source: Source, trust: bool) -> tuple[Any, list[str]]:
    """Load the tokenizer, or none: without its files transformers would make a junk one."""
    if not has_tokenizer(source.folder):
        return None, ["the model has no tokenizer: it takes tokens, not text"]
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=trust
        )
        usable = len(tokenizer) > 0 and tokenizer("a", add_special_tokens=False)["input_ids"]
    except Exception as error:
        log.debug("the tokenizer of %s failed", source.name, exc_info=error)
        return None, [
            f"the model's tokenizer cannot be read ({_first_line(error)}): it takes tokens only"
        ]
    if not usable:
        return None, ["the model's tokenizer knows no words: it takes tokens, not text"]
    return tokenizer, []


def _hook(
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
        cfg = _adapter_config(copy.deepcopy(config), architecture, name, dtype)
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

    try:
        bridge = build_bridge_from_module(
            hf, architecture, hf_config=config, model_name=name, device=device
        )
    except Exception as error:
        if "memory" in str(error).lower():
            raise
        raise UnsupportedModelError(
            f"TransformerLens cannot wrap {name!r} ({architecture}): {_first_line(error)}"
        ) from error
    bridge.cfg.n_devices = count_unique_devices(hf)
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


def _wrap_live(hf: Any) -> Model:
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
    expected = type(hf).__name__
    if expected != architecture:
        raise UnsupportedModelError(
            f"TransformerLens has no adapter for a live {expected}",
            hint=f"Load it as {architecture}.",
        )
    model = _hook(
        hf,
        architecture,
        name=name,
        source="memory",
        revision=getattr(hf.config, "_commit_hash", None),
        tokenizer=None,
        notes=notes,
    )
    # A second call must find the wrapped model, as it cannot be wrapped again.
    hf.__dict__["_attnlens_model"] = model
    return model


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


def _wrap_bridge(bridge: Any) -> Model:
    """Use a live TransformerBridge as it is."""
    original = bridge.original_model
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
    return Model(facts, bridge, bridge.tokenizer, notes)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.float32
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = dtype.lower().removeprefix("torch.")
    found = _DTYPES.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise OptionError(
            f"dtype {str(dtype)!r} is not one that a model can run in",
            hint=f"Choose {', '.join(_DTYPES)} or auto.",
        )
    return found


def _own_dtype(config: Any) -> torch.dtype:
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def _no_device(device: Any) -> str:
    if device is not None:
        raise OptionError(
            f"device {str(device)!r} and a device map are both given",
            hint="Give one of them.",
        )
    return ""


def _device(device: str | torch.device | None) -> str:
    if device is None or str(device) == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise OptionError(
            f"there is no device {str(device)!r}", hint="Choose cpu, cuda, cuda:N, mps or auto."
        ) from error
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(wanted.type, False) or (
        wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count()
    ):
        raise OptionError(
            f"device {str(device)!r} is not available on this machine",
            hint="Choose cpu, or auto for what there is.",
        )
    return str(wanted)
