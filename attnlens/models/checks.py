"""What can be said about a model's folder before its weights are read.

Each refusal comes here, up front and in one message, rather than deep inside a library.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

from attnlens.errors import DamagedModelError, OfflineError, UnsupportedModelError
from attnlens.models.source import Source, is_offline

_PACKED_NAMES: Final = (".qweight", ".qzeros", ".weight_packed", ".absmax", ".SCB")
_PACKED_DTYPES: Final = ("I8", "U8", "I16", "I32", "F8_E4M3", "F8_E5M2", "F4")
_SAFE_INDEX: Final = "model.safetensors.index.json"
_PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
_SAFE: Final = "model.safetensors"
_PICKLE: Final = "pytorch_model.bin"
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


def read_config(source: Source) -> dict[str, Any]:
    """Read config.json as it lies.

    Raises
    ------
    DamagedModelError
        If it is missing or no JSON object.
    UnsupportedModelError
        If the folder holds a model in another format.
    """
    path = source.folder / "config.json"
    if not path.is_file():
        held = sorted(p.name for p in source.folder.iterdir())
        _refuse_other_formats(source, held)
        shown = ", ".join(held[:6]) + (", ..." if len(held) > 6 else "")
        raise DamagedModelError(
            f"{source.name!r} holds no config.json",
            hint=f"It holds {shown}." if held else "The folder is empty.",
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedModelError(
            f"config.json of {source.name!r} cannot be read: {error}",
            hint="Copy or download the model again.",
        ) from error
    if not isinstance(values, dict) or not (values.get("model_type") or values.get("auto_map")):
        raise DamagedModelError(
            f"config.json of {source.name!r} names no model_type",
            hint="It must be the configuration of a Hugging Face transformers model.",
        )
    return values


def _refuse_other_formats(source: Source, held: list[str]) -> None:
    if "adapter_config.json" in held:
        raise UnsupportedModelError(
            f"{source.name!r} holds an adapter (PEFT), not a whole model",
            hint="Merge it into its base model and save that.",
        )
    if any(name.endswith(".gguf") for name in held):
        raise UnsupportedModelError(
            f"{source.name!r} holds a quantised model in GGUF format",
            hint="Use the unquantised weights in Hugging Face's format.",
        )


def refuse_config(values: dict[str, Any], name: str, *, trust_remote_code: bool) -> None:
    """Refuse what no capture can be made of, from the configuration alone.

    Raises
    ------
    UnsupportedModelError
        For encoder-decoder models, quantised weights, and models with code of their own that
        the user has not agreed to run.
    """
    kind = values.get("model_type", "?")
    if values.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{name!r} is an encoder-decoder model ({kind}): it has self- and cross-attention in "
            "two stacks, which attnlens does not capture",
            hint="Decoder-only models (GPT, Llama, ...) and encoders (BERT) are supported.",
        )
    quantised = values.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised
        raise quantised_error(name, str(method))
    if values.get("auto_map") and not trust_remote_code:
        raise UnsupportedModelError(
            f"{name!r} needs Python code from its own repository, which attnlens does not run "
            "unasked",
            hint="Pass trust_remote_code if you have read that code and trust it.",
        )


def quantised_error(name: str, method: str) -> UnsupportedModelError:
    """Return the refusal of packed weights, naming their format."""
    return UnsupportedModelError(
        f"{name!r} has quantised weights ({method}): packed integers are no matrices to analyse",
        hint="Use the unquantised weights; --dtype float16 or bfloat16 halves their size.",
    )


def check_weights(source: Source) -> bool:
    """Check that the weights are all there and not cut short.

    Returns
    -------
    bool
        Whether they are safetensors (True) or torch's own format (False).

    Raises
    ------
    DamagedModelError
        If a file is missing, empty or truncated.
    OfflineError
        If the hub's cache holds only part of the model and the hub is switched off.
    UnsupportedModelError
        If the weights are packed integers.
    """
    files, safe = _weight_files(source)
    for file in files:
        path = source.folder / file
        if not path.is_file():
            raise _incomplete(source, f"lacks the weights file {file}")
        if path.stat().st_size == 0:
            raise _incomplete(source, f"holds an empty weights file, {file}")
        if safe:
            _check_safetensors(source, path)
    return safe


def _weight_files(source: Source) -> tuple[list[str], bool]:
    for index, safe in ((_SAFE_INDEX, True), (_PICKLE_INDEX, False)):
        path = source.folder / index
        if path.is_file():
            try:
                shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise DamagedModelError(
                    f"{index} of {source.name!r} cannot be read: {error!r}",
                    hint="Copy or download the model again.",
                ) from error
            return sorted(set(shards)), safe
        whole = _SAFE if safe else _PICKLE
        if (source.folder / whole).exists():
            return [whole], safe
    held = sorted(p.name for p in source.folder.iterdir())
    _refuse_other_formats(source, held)
    foreign = [n for n in held if n.endswith((".h5", ".msgpack", ".onnx", ".ckpt.index"))]
    if foreign:
        raise UnsupportedModelError(
            f"{source.name!r} holds no PyTorch weights, only {', '.join(foreign)}",
            hint="Convert them to safetensors with transformers.",
        )
    raise _incomplete(source, f"holds no weights ({_SAFE} or {_PICKLE})")


def _incomplete(source: Source, what: str) -> DamagedModelError | OfflineError:
    if source.revision is not None and is_offline():
        return OfflineError(
            f"{source.name!r} is only partly on this machine (the cache {what}), and the hub is "
            "switched off (HF_HUB_OFFLINE)",
            hint="Fetch it once with a connection.",
        )
    return DamagedModelError(
        f"{source.name!r} {what}", hint="Copy or download the model again, whole."
    )


def _check_safetensors(source: Source, path: Path) -> None:
    """Compare a safetensors file's length with its header, and look for packed weights."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, 100_000_000):
                raise ValueError("its header is cut short")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedModelError(
            f"the weights {path.name} of {source.name!r} are damaged: {error}",
            hint="Copy or download the file again.",
        ) from error
    if 8 + length + end != size:
        raise DamagedModelError(
            f"the weights {path.name} of {source.name!r} are damaged: {size:,} bytes are there, "
            f"{8 + length + end:,} should be",
            hint="Copy or download the file again.",
        )
    packed = [
        name
        for name, entry in tensors.items()
        if name.endswith(_PACKED_NAMES)
        or (name.endswith(".weight") and entry.get("dtype") in _PACKED_DTYPES)
    ]
    if packed:
        raise quantised_error(source.name, f"{packed[0]} is {tensors[packed[0]]['dtype']}")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's vocabulary.

    Without one, transformers makes a tokenizer that knows no words, or fails, by family.
    """
    return any((folder / name).is_file() for name in _TOKENIZERS)
