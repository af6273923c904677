"""The demo model's tokenizer and configuration, and how its folder is written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attnlens.demo.rows import BOS_ID, CONTEXT, VOCABULARY

BOS: Final = "<s>"


def build_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Learn a byte-level byte-pair tokenizer of 512 tokens; every text can be encoded.

    Parameters
    ----------
    text : str
        What the merges are learned from.

    Returns
    -------
    PreTrainedTokenizerFast
        Its BOS token is ``<s>``, id 0, put before every text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=BOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """Make the untrained model: 3 layers, width 128, 8 heads, rotary positions."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=CONTEXT,
            bos_token_id=BOS_ID,
            eos_token_id=BOS_ID,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


def save_folder(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str
) -> None:
    """Write a Hugging Face folder with float16 weights; the model in memory stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.float16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # safetensors writes files that only their owner can read.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    # A name of the class that older versions of transformers know too.
    settings = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "README.md").write_text(card, encoding="utf-8")
