"""From a folder to a Hugging Face model and its tokenizer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch

from attnlens.errors import DamagedModelError, ModelError, UnsupportedModelError
from attnlens.models.checks import has_tokenizer, quantised_error, read_config, refuse_config
from attnlens.models.describe import architecture_of, facts_from
from attnlens.models.facts import ModelFacts
from attnlens.models.quiet import log, quiet
from attnlens.models.source import Source


def configure(source: Source, trust: bool) -> tuple[Any, str]:
    """Read and check the configuration; return it and the name of the class to load.

    Raises
    ------
    DamagedModelError, UnsupportedModelError
    """
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
        f"config.json of {source.name!r} makes no sense to transformers: {first_line(error)}",
        hint="Copy or download the model again.",
    )


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, for one-line messages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def describe(
    source: Source, config: Any, architecture: str, dtype: torch.dtype, trust: bool
) -> ModelFacts:
    """Gather the facts with the model on the meta device, where nothing takes memory."""
    with quiet(), torch.random.fork_rng(devices=[]):
        settings = copy.deepcopy(config)
        try:
            with torch.device("meta"):
                empty = _from_config(_model_class(architecture, trust), settings, dtype)
            cfg = adapter_config(settings, architecture, source.name, dtype)
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
    own = getattr(kind, "_from_config", None)
    if own is not None:
        return own(config, dtype=dtype)
    return kind.from_config(config, dtype=dtype, trust_remote_code=True)


def adapter_config(config: Any, architecture: str, name: str, dtype: torch.dtype) -> Any:
    """Return TransformerLens' view of a configuration, with what its adapter adds."""
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources import build_bridge_config_from_hf

    cfg = build_bridge_config_from_hf(config, architecture, name, dtype)
    return ArchitectureAdapterFactory.select_architecture_adapter(cfg).cfg


def read_weights(
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
        # Refused by `_check_fit`, in words that say which.
        "ignore_mismatched_sizes": True,
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
            f"the weights of {source.name!r} cannot be read: {first_line(error)}",
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
    bad = sorted(
        str(key if isinstance(key, str) else key[0]) for key in info.get("mismatched_keys", ())
    )
    missing = sorted(key for key in info["missing_keys"] if key.startswith(body))
    if not bad and not missing:
        return
    what = f"lack {missing[0]}" if missing else f"do not fit config.json at {bad[0]}"
    more = len(missing or bad) - 1
    raise DamagedModelError(
        f"the weights of {source.name!r} {what}" + (f" and {more} more" if more else ""),
        hint="Copy or download the model again, and check that config.json belongs to it.",
    )


def read_tokenizer(source: Source, trust: bool) -> tuple[Any, list[str]]:
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
            f"the model's tokenizer cannot be read ({first_line(error)}): it takes tokens only"
        ]
    if not usable:
        return None, ["the model's tokenizer knows no words: it takes tokens, not text"]
    return tokenizer, []
