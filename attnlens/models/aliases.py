"""Short names of models, and what a misspelt one was probably meant to be.

The table is our own: TransformerLens calls its aliases deprecated. A repository's short name is
its last part in lower case, without a trailing ``-hf``; the few that people know by another name
are listed beside. Looking up ignores case.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

DEMO: Final = "demo"

_REPOSITORIES: Final[dict[str, str]] = {
    "openai-community": "openai-gpt",
    "EleutherAI": (
        "pythia-14m pythia-31m pythia-70m pythia-160m pythia-410m pythia-1b pythia-1.4b "
        "pythia-2.8b pythia-6.9b pythia-12b pythia-70m-deduped pythia-160m-deduped "
        "pythia-410m-deduped pythia-1b-deduped pythia-1.4b-deduped pythia-2.8b-deduped "
        "pythia-6.9b-deduped pythia-12b-deduped gpt-neo-125M gpt-neo-1.3B gpt-neo-2.7B "
        "gpt-j-6B gpt-neox-20b"
    ),
    "roneneldan": (
        "TinyStories-1M TinyStories-3M TinyStories-8M TinyStories-28M TinyStories-33M "
        "TinyStories-1Layer-21M TinyStories-2Layers-33M TinyStories-Instruct-1M "
        "TinyStories-Instruct-3M TinyStories-Instruct-8M TinyStories-Instruct-28M "
        "TinyStories-Instruct-33M TinyStories-Instuct-1Layer-21M "
        "TinyStories-Instruct-2Layers-33M"
    ),
    "facebook": "opt-125m opt-1.3b opt-2.7b opt-6.7b opt-13b opt-30b opt-66b",
    "bigscience": "bloom-560m bloom-1b1 bloom-1b7 bloom-3b bloom-7b1",
    "google-bert": (
        "bert-base-uncased bert-base-cased bert-large-uncased bert-large-cased "
        "bert-base-multilingual-cased"
    ),
    "sentence-transformers": "all-MiniLM-L6-v2 all-MiniLM-L12-v2",
    "google": (
        "gemma-2b gemma-2b-it gemma-7b gemma-7b-it gemma-2-2b gemma-2-2b-it gemma-2-9b "
        "gemma-2-9b-it gemma-2-27b gemma-2-27b-it gemma-3-270m gemma-3-270m-it gemma-3-1b-pt "
        "gemma-3-1b-it"
    ),
    "meta-llama": (
        "Llama-2-7b-hf Llama-2-7b-chat-hf Llama-2-13b-hf Llama-2-13b-chat-hf Llama-2-70b-hf "
        "Llama-2-70b-chat-hf Meta-Llama-3-8B Meta-Llama-3-8B-Instruct Meta-Llama-3-70B "
        "Llama-3.1-8B Llama-3.1-8B-Instruct Llama-3.1-70B Llama-3.2-1B Llama-3.2-1B-Instruct "
        "Llama-3.2-3B Llama-3.2-3B-Instruct Llama-3.3-70B-Instruct"
    ),
    "mistralai": (
        "Mistral-7B-v0.1 Mistral-7B-Instruct-v0.1 Mistral-7B-v0.3 Mistral-Nemo-Base-2407 "
        "Mixtral-8x7B-v0.1 Mixtral-8x7B-Instruct-v0.1"
    ),
    "Qwen": (
        "Qwen1.5-0.5B Qwen1.5-1.8B Qwen1.5-4B Qwen1.5-7B Qwen1.5-14B Qwen2-0.5B "
        "Qwen2-0.5B-Instruct Qwen2-1.5B Qwen2-1.5B-Instruct Qwen2-7B Qwen2-7B-Instruct "
        "Qwen2.5-0.5B Qwen2.5-0.5B-Instruct Qwen2.5-1.5B Qwen2.5-1.5B-Instruct Qwen2.5-3B "
        "Qwen2.5-3B-Instruct Qwen2.5-7B Qwen2.5-7B-Instruct Qwen2.5-14B Qwen2.5-32B Qwen2.5-72B "
        "Qwen3-0.6B Qwen3-0.6B-Base Qwen3-1.7B Qwen3-1.7B-Base Qwen3-4B Qwen3-8B Qwen3-14B"
    ),
    "microsoft": "phi-1 phi-1_5 phi-2 Phi-3-mini-4k-instruct phi-4",
    "allenai": "OLMo-1B-hf OLMo-7B-hf OLMo-2-0425-1B OLMo-2-1124-7B OLMoE-1B-7B-0924",
    "01-ai": "Yi-6B Yi-6B-Chat Yi-34B Yi-34B-Chat",
    "HuggingFaceTB": "SmolLM2-135M SmolLM2-360M SmolLM2-1.7B SmolLM3-3B",
    "stanford-crfm": (
        "alias-gpt2-small-x21 battlestar-gpt2-small-x49 caprica-gpt2-small-x81 "
        "darkmatter-gpt2-small-x343 expanse-gpt2-small-x777 arwen-gpt2-medium-x21 "
        "beren-gpt2-medium-x49 celebrimbor-gpt2-medium-x81 durin-gpt2-medium-x343 "
        "eowyn-gpt2-medium-x777"
    ),
}

# Repositories from the hub's first years, which have no organisation before their name.
_BARE: Final = (
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "distilgpt2",
)

_NICKNAMES: Final[dict[str, str]] = {
    "gpt2-small": "gpt2",
    "distil-gpt2": "distilgpt2",
    "pythia": "EleutherAI/pythia-70m",
    "neo": "EleutherAI/gpt-neo-125M",
    "gpt-neo-small": "EleutherAI/gpt-neo-125M",
    "gpt-neo-medium": "EleutherAI/gpt-neo-1.3B",
    "gpt-neo-large": "EleutherAI/gpt-neo-2.7B",
    "gpt-j": "EleutherAI/gpt-j-6B",
    "gptj": "EleutherAI/gpt-j-6B",
    "gpt-neox": "EleutherAI/gpt-neox-20b",
    "opt": "facebook/opt-125m",
    "bert": "google-bert/bert-base-uncased",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.1",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "phi-3": "microsoft/Phi-3-mini-4k-instruct",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "olmo-2-7b": "allenai/OLMo-2-1124-7B",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "stanford-gpt2-small-a": "stanford-crfm/alias-gpt2-small-x21",
    "stanford-gpt2-small-b": "stanford-crfm/battlestar-gpt2-small-x49",
    "stanford-gpt2-small-c": "stanford-crfm/caprica-gpt2-small-x81",
    "stanford-gpt2-small-d": "stanford-crfm/darkmatter-gpt2-small-x343",
    "stanford-gpt2-small-e": "stanford-crfm/expanse-gpt2-small-x777",
}


def _table() -> dict[str, str]:
    table: dict[str, str] = {}
    for organisation, names in _REPOSITORIES.items():
        for name in names.split():
            short = name.lower().removesuffix("-hf")
            table[short] = f"{organisation}/{name}"
            if short.startswith("tinystories"):
                # People write tiny-stories-33M and tiny-stories-2L-33M.
                dashed = short.replace("tinystories", "tiny-stories").replace("instuct", "instruct")
                table[dashed] = f"{organisation}/{name}"
                table[dashed.replace("layers", "l").replace("layer", "l")] = (
                    f"{organisation}/{name}"
                )
            if short.startswith("meta-llama"):
                table[short.removeprefix("meta-")] = f"{organisation}/{name}"
    table.update((name, name) for name in _BARE)
    table.update(_NICKNAMES)
    return table


#: Short name in lower case -> repository.
ALIASES: Final[dict[str, str]] = _table()


def repository_of(name: str) -> str:
    """Return the hub's repository for a short name, or `name` itself where there is no alias."""
    return ALIASES.get(name.lower(), name)


def is_known(repository: str) -> bool:
    """Whether the table has this repository, so that it is surely not misspelt."""
    return repository in ALIASES.values()


def nearest_names(name: str, also: Iterable[str] = ()) -> list[str]:
    """Return up to three known names that look most like `name`, the best first.

    `also` adds names that are known for another reason, such as folders nearby.
    """
    wanted = name.lower()
    known = {DEMO: DEMO} | {alias: alias for alias in ALIASES}
    known |= {repository.lower(): repository for repository in ALIASES.values()}
    known |= {other.lower(): other for other in also}
    found = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    return list(dict.fromkeys(known[match] for match in found))
