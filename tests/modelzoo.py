"""Small random models of every family, saved as Hugging Face folders in a fraction of a second.

Fresh models have gains of 1, biases of 0 and nearly uniform attention, which hides faults: here
every gain and bias is random, and the matrices are large enough for attention to be uneven.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

FAMILIES = ("gpt2", "llama", "mistral", "neox", "gemma2", "qwen3", "bert", "bloom")

#: Vocabulary of a model without a tokenizer, and of one with.
VOCABULARY = 50
WITH_TOKENIZER = 320

_TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, "
    "and void; and darkness was upon the face of the deep. And God said, Let there be light: "
    "and there was light. And God saw the light, that it was good.\n"
)


def config(family: str, *, vocabulary: int = VOCABULARY, layers: int = 2, **changes: Any) -> Any:
    """Return the family's configuration: 4 heads, width 16 (2 key-value heads where it can)."""
    import transformers as hf

    common = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    grouped = common | {"num_key_value_heads": 2}
    match family:
        case "gpt2":
            values: dict[str, Any] = {
                "vocab_size": vocabulary,
                "n_embd": 16,
                "n_layer": layers,
                "n_head": 4,
                "n_positions": 16,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
            return hf.GPT2Config(**(values | changes))
        case "llama":
            return hf.LlamaConfig(**(grouped | changes))
        case "mistral":
            return hf.MistralConfig(**(grouped | {"sliding_window": 2} | changes))
        case "neox":
            return hf.GPTNeoXConfig(**(common | {"rotary_pct": 0.5} | changes))
        case "gemma2":
            own = {
                "head_dim": 8,
                "sliding_window": 4,
                "query_pre_attn_scalar": 12,
                "attn_logit_softcapping": 2.0,
            }
            return hf.Gemma2Config(**(grouped | own | changes))
        case "qwen3":
            return hf.Qwen3Config(**(grouped | {"head_dim": 8} | changes))
        case "bert":
            return hf.BertConfig(**(common | {"pad_token_id": 0} | changes))
        case "bloom":
            return hf.BloomConfig(
                **(
                    {
                        "vocab_size": vocabulary,
                        "hidden_size": 16,
                        "n_layer": layers,
                        "n_head": 4,
                        "bos_token_id": 0,
                        "eos_token_id": 0,
                        "pad_token_id": 0,
                    }
                    | changes
                )
            )
        case _:
            raise ValueError(f"no family {family!r}; there are {', '.join(FAMILIES)}")


def build(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a live model (``transformers.PreTrainedModel``, eval mode, float32)."""
    import torch
    import transformers as hf

    made = config(family, **changes)
    auto = hf.AutoModelForMaskedLM if family == "bert" else hf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(made, attn_implementation="eager").eval()
        randomise(model)
    return model


def randomise(model: Any) -> None:
    """Give every parameter random values from torch's global generator, in place."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)


def tiny(
    family: str, folder: Path, *, seed: int = 0, tokenizer: bool = False, **changes: Any
) -> Path:
    """Save a small random model of `family` into `folder` and return the folder.

    Parameters
    ----------
    family : str
        One of `FAMILIES`.
    folder : Path
        Made if it is not there.
    seed : int, optional
    tokenizer : bool, optional
        Add a byte-pair (or WordPiece) tokenizer; the vocabulary is then `WITH_TOKENIZER`.
    **changes
        Fields of the configuration, and ``layers`` or ``vocabulary``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        changes.setdefault("vocabulary", WITH_TOKENIZER)
    with _quiet():
        build(family, seed=seed, **changes).save_pretrained(folder)
        if tokenizer:
            make_tokenizer(_KIND.get(family, "sentencepiece")).save_pretrained(folder)
    return folder


_KIND = {"gpt2": "bytes", "neox": "bytes", "qwen3": "bytes", "bloom": "bytes", "bert": "wordpiece"}


def make_tokenizer(kind: str) -> Any:
    """Return a tokenizer of at most `WITH_TOKENIZER` ids.

    `kind` is ``"bytes"`` (as GPT-2: Ġ and Ċ), ``"sentencepiece"`` (as Llama: ▁ and <0x0A>, with
    a BOS that encoding puts in front) or ``"wordpiece"`` (as BERT: ##).
    """
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import trainers as train

    size, text = WITH_TOKENIZER, [_TEXT]
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made.train_from_iterator(
            text,
            train.BpeTrainer(
                vocab_size=size,
                special_tokens=["<|endoftext|>"],
                initial_alphabet=alphabet,
                show_progress=False,
            ),
        )
        return hf.PreTrainedTokenizerFast(
            tokenizer_object=made, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
        )
    if kind == "sentencepiece":
        specials = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        learner = Tokenizer(models.BPE())
        learner.pre_tokenizer = pre_tokenizers.Metaspace()
        learner.train_from_iterator(
            [_TEXT.replace("\n", " ")],
            train.BpeTrainer(vocab_size=size - len(specials), show_progress=False),
        )
        learned = learner.get_vocab()
        pieces = [*specials, *sorted(learned, key=lambda piece: learned[piece])]
        merges = [
            (piece[:cut], piece[cut:])
            for piece in pieces[len(specials) :]
            for cut in range(1, len(piece))
            if piece[:cut] in learned and piece[cut:] in learned
        ]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        return hf.PreTrainedTokenizerFast(
            tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        made.train_from_iterator(
            text,
            train.WordPieceTrainer(
                vocab_size=size,
                special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
                show_progress=False,
            ),
        )
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        return hf.PreTrainedTokenizerFast(
            tokenizer_object=made,
            unk_token="[UNK]",
            pad_token="[PAD]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
        )
    raise ValueError(f"no kind {kind!r} of tokenizer")


class _quiet:
    """transformers without its progress bars and warnings, restored afterwards."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.logging = logging
        self.verbosity = logging.get_verbosity()
        self.bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        self.logging.set_verbosity(self.verbosity)
        if self.bars:
            self.logging.enable_progress_bar()
