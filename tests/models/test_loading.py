"""Names, folders, the hub's cache, and one clear message for each way to fail."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlens.errors import (
    DamagedModelError,
    OfflineError,
    OptionError,
    OutOfMemoryError,
    UnknownModelError,
    UnsupportedModelError,
)
from attnlens.models import Model, ModelFacts, describe_model, load_model, load_tokenizer
from attnlens.models.aliases import ALIASES, nearest_names, repository_of
from tests.modelzoo import FAMILIES, tiny

Zoo = Callable[..., Path]


@pytest.fixture
def copied(zoo: Zoo, tmp_path: Path) -> Path:
    """Return a folder of its own with a tiny GPT-2, to be spoilt."""
    return Path(shutil.copytree(zoo("gpt2"), tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Lay out repositories in a cache of the hub as the hub's library does."""
    from huggingface_hub import constants

    root = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))

    def add(repository: str, folder: Path, *, branch: str, commit: str) -> str:
        home = root / f"models--{repository.replace('/', '--')}"
        snapshot = home / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (home / "blobs").mkdir(exist_ok=True)
        for file in folder.iterdir():
            blob = home / "blobs" / f"{commit[:8]}{file.name}"
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        reference = home / "refs" / branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
        return str(home)

    return add


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_aliases() -> None:
    expected = {
        "gpt2-small": "gpt2",
        "gpt2-medium": "gpt2-medium",
        "GPT2-XL": "gpt2-xl",
        "pythia-160m": "EleutherAI/pythia-160m",
        "tiny-stories-33M": "roneneldan/TinyStories-33M",
        "tiny-stories-1L-21M": "roneneldan/TinyStories-1Layer-21M",
        "tiny-stories-instruct-2L-33M": "roneneldan/TinyStories-Instruct-2Layers-33M",
        "llama-2-7b": "meta-llama/Llama-2-7b-hf",
        "bert-base-uncased": "google-bert/bert-base-uncased",
        "gemma-2-2b": "google/gemma-2-2b",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
        "mistral-7b": "mistralai/Mistral-7B-v0.1",
        "somebody/something": "somebody/something",
    }
    assert {name: repository_of(name) for name in expected} == expected
    assert all(name == name.lower() for name in ALIASES)
    assert nearest_names("gpt2-smal")[0] == "gpt2-small"
    assert nearest_names("pythia160m")[0] == "pythia-160m"
    assert nearest_names("xyzzy-plugh") == []


def test_facts_need_no_torch() -> None:
    code = (
        "import sys; from attnlens.models import ModelFacts; import attnlens.models.aliases; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'transformer_lens')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_description_is_what_loading_finds(family: str, zoo: Zoo, loaded: Any) -> None:
    described, found = describe_model(zoo(family)).to_json(), loaded(family).facts.to_json()
    assert described.pop("weights_hash") is None
    assert len(found.pop("weights_hash")) == 64
    assert (described.pop("device"), found.pop("device")) == ("", "cpu")
    assert described == found


def test_facts_survive_json(loaded: Callable[[str], Model]) -> None:
    for family in FAMILIES:
        facts = loaded(family).facts
        back = ModelFacts.from_json(json.loads(json.dumps(facts.to_json())))
        assert back == ModelFacts.from_json(facts.to_json())
        assert (back.windows, back.scales) == (facts.windows, facts.scales)
    with pytest.raises(ValueError, match="lack name"):
        ModelFacts.from_json({})
    assert ModelFacts.from_json(facts.to_json() | {"later": 1}) == back


def test_describing_needs_no_weights(zoo: Zoo, tmp_path: Path) -> None:
    """A05: a huge context and width cost nothing to describe."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 8,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "max_position_embeddings": 131072,
            }
        )
    )
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = describe_model(tmp_path, dtype="bfloat16")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert facts.n_ctx == 131072
    assert facts.n_params == 2 * 128256 * 8192 + 8192 + 8 * (
        2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    )
    assert facts.size == 2 * facts.n_params
    assert grown < 100e6
    with pytest.raises(DamagedModelError, match="holds no weights"):
        load_model(tmp_path)


def test_a_folder_needs_no_network_and_says_nothing(
    zoo: Zoo, no_network: None, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for family in ("gpt2", "llama"):
        for tokenizer in (False, True):
            load_model(zoo(family, tokenizer=tokenizer))
    assert capfd.readouterr() == ("", "")


def test_nothing_global_is_changed(zoo: Zoo) -> None:
    import logging
    import warnings

    import transformers

    torch.manual_seed(3)
    state = torch.get_rng_state()
    verbosity = transformers.logging.get_verbosity()
    filters, handlers = list(warnings.filters), list(logging.getLogger().handlers)
    load_model(zoo("neox"))
    assert torch.equal(torch.get_rng_state(), state)
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert list(warnings.filters) == filters
    assert logging.getLogger().handlers == handlers


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "bert"])
def test_no_junk_tokenizer(family: str, zoo: Zoo) -> None:
    model = load_model(zoo(family))
    assert model.tokenizer is None
    assert model.token_texts() is None
    assert any("takes tokens, not text" in note for note in model.notes)


def test_a_tokenizer_alone(zoo: Zoo, cache: Callable[..., str]) -> None:
    assert load_tokenizer(zoo("llama")) is None
    folder = zoo("llama", tokenizer=True)
    text = "And God said"
    expected = load_model(folder).tokenizer(text)["input_ids"]
    assert load_tokenizer(folder)(text)["input_ids"] == expected
    assert load_tokenizer(load_model(folder))(text)["input_ids"] == expected
    cache("gpt2", folder, branch="main", commit="a" * 40)
    assert load_tokenizer("gpt2-small", revision="main")(text)["input_ids"] == expected


def test_a_broken_tokenizer_leaves_a_model_of_tokens(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo("gpt2", tokenizer=True), tmp_path / "m"))
    (folder / "tokenizer.json").write_text("{")
    model = load_model(folder)
    assert model.tokenizer is None
    assert any("tokenizer cannot be read" in note for note in model.notes)


def test_token_texts(zoo: Zoo) -> None:
    def texts(family: str, text: str) -> tuple[list[str], list[str]]:
        model = load_model(zoo(family, tokenizer=True))
        every = model.token_texts()
        assert every is not None
        assert len(every) == model.facts.d_vocab
        return every, [every[i] for i in model.tokenizer(text)["input_ids"]]

    for family in ("gpt2", "llama"):
        every, shown = texts(family, "And God said\n")
        assert "".join(shown).removeprefix("<s>").strip(" ") == "And God said\n"
        assert not any(mark in text for text in every for mark in "▁Ċ")
        _, shown = texts(family, "東")
        assert [t for t in shown if t.startswith("<0x")] == ["<0xE6>", "<0x9D>", "<0xB1>"]
    every, shown = texts("bert", "And God said.")
    assert "".join(shown).startswith("[CLS] and god said")
    assert not any(text.startswith("##") for text in every)
    assert every[-1] == "<319>"


def test_cached_hub_model_through_its_alias(
    cache: Callable[..., str], zoo: Zoo, no_network: None
) -> None:
    commit = "a" * 40
    cache("gpt2", zoo("gpt2"), branch="main", commit=commit)
    model = load_model("gpt2-small")
    assert model.facts.name == "gpt2-small"
    assert model.facts.source == "gpt2"
    assert model.facts.revision == commit
    assert model.facts.weights_hash == load_model(zoo("gpt2")).facts.weights_hash
    assert describe_model("gpt2-small").revision == commit


def test_two_revisions_are_two_models(cache: Callable[..., str], zoo: Zoo, tmp_path: Path) -> None:
    """A33."""
    home = ""
    for seed, (branch, commit) in enumerate((("main", "1" * 40), ("step1000", "2" * 40))):
        folder = tiny("neox", tmp_path / branch, seed=seed)
        home = cache("EleutherAI/pythia-160m", folder, branch=branch, commit=commit)
    late, early = load_model("pythia-160m"), load_model("pythia-160m@step1000")
    assert (late.facts.revision, early.facts.revision) == ("1" * 40, "2" * 40)
    assert late.facts.weights_hash != early.facts.weights_hash
    for same in (
        load_model("EleutherAI/pythia-160m", revision="step1000"),
        load_model("pythia-160m@" + "2" * 40),
        load_model(home, revision="step1000"),
    ):
        assert same.facts.weights_hash == early.facts.weights_hash
        assert same.facts.revision == "2" * 40
    with pytest.raises(UnknownModelError, match=r"no revision 'step7'(.|\n)*" + "1" * 40):
        load_model(home, revision="step7")
    with pytest.raises(OfflineError, match="revision 'step7'"):
        load_model("pythia-160m@step7")
    with pytest.raises(OptionError, match="two revisions"):
        load_model("pythia-160m@step1000", revision="main")


def test_a_cache_without_the_weights(cache: Callable[..., str], copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    cache("gpt2", copied, branch="main", commit="a" * 40)
    with pytest.raises(OfflineError, match="only partly on this machine"):
        load_model("gpt2")


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("gpt2-smal", UnknownModelError, "Did you mean gpt2-small"),
        ("./gpt2", UnknownModelError, "no folder './gpt2'"),
        ("/nowhere/at/all", UnknownModelError, "no folder"),
        ("not a name", UnknownModelError, "nor a possible name"),
        ("", UnknownModelError, "empty"),
        ("gpt2@", OptionError, "no revision after it"),
        ("gpt2-small", OfflineError, "'gpt2' is not on this machine.*HF_HUB_OFFLINE"),
        ("somebody/something", OfflineError, "HF_HUB_OFFLINE"),
        ("EleutherAI/pythia-16m", OfflineError, "Did you mean"),
        ("demo@main", OptionError, "no revisions"),
    ],
)
def test_names_that_lead_nowhere(
    name: str, kind: type[Exception], says: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=rf"(?s){says}"):
        load_model(name)


def test_a_misspelt_folder_names_its_neighbour(zoo: Zoo) -> None:
    folder = zoo("gpt2")
    with pytest.raises(UnknownModelError, match="Did you mean gpt2"):
        load_model(folder.with_name("gtp2"))
    with pytest.raises(UnknownModelError, match="is a file"):
        load_model(folder / "config.json")
    with pytest.raises(OptionError, match="is a folder, which has none"):
        load_model(folder, revision="main")


def test_a_folder_of_results_does_not_hide_a_model(
    zoo: Zoo, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "gpt2-small"):
        Path(name, "store").mkdir(parents=True)
    assert load_model("demo").facts.source == "demo"
    with pytest.raises(OfflineError):
        load_model("gpt2-small")
    shutil.copytree(zoo("gpt2"), "gpt2-medium")
    assert load_model("gpt2-medium").facts.source == str(tmp_path / "gpt2-medium")


def test_code_of_its_own_runs_only_when_trusted(zoo: Zoo, tmp_path: Path, monkeypatch: Any) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = Path(shutil.copytree(zoo("llama"), tmp_path / "m"))
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaForCausalLM\n"
        f"Path({str(marker)!r}).touch()\n"
        "class Own(LlamaForCausalLM):\n    pass\n"
    )
    edit(folder, auto_map={"AutoModelForCausalLM": "own.Own"})
    with pytest.raises(UnsupportedModelError, match="trust_remote_code"):
        load_model(folder)
    assert not marker.exists()
    model = load_model(folder, trust_remote_code=True)
    assert marker.exists()
    assert type(model.bridge.original_model).__name__ == "Own"
    assert model.facts.weights_hash == load_model(zoo("llama")).facts.weights_hash


def test_the_bundled_model() -> None:
    model = load_model("demo")
    assert model.facts.source == "demo"
    assert model.facts.dtype == "float32"
    assert model.tokenizer is not None


def spoil(what: str, folder: Path) -> None:
    weights = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    match what:
        case "no config":
            (folder / "config.json").unlink()
        case "no weights":
            weights.unlink()
        case "empty":
            weights.write_bytes(b"")
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "cut header":
            weights.write_bytes(weights.read_bytes()[:20])
        case "garbage":
            weights.write_bytes(b"\xff" * 5000)
        case "bad json":
            (folder / "config.json").write_text("{")
        case "no type":
            (folder / "config.json").write_text("{}")
        case "missing shard":
            weights.unlink()
            index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "other shape":
            config["n_embd"] = 32
            (folder / "config.json").write_text(json.dumps(config))
        case "more layers":
            config["n_layer"] = 3
            (folder / "config.json").write_text(json.dumps(config))
        case "bad value":
            config["n_embd"] = "wide"
            (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no config", "no config.json.*model.safetensors"),
        ("no weights", "holds no weights"),
        ("empty", "empty weights"),
        ("cut", "damaged.*bytes are there"),
        ("cut header", "damaged"),
        ("garbage", "damaged"),
        ("bad json", "config.json.*cannot be read"),
        ("no type", "names no model_type"),
        ("missing shard", "lacks the weights file model-00001-of-00001"),
        ("other shape", r"do not fit config.json at transformer\.h"),
        ("more layers", "lack transformer.h.2"),
        ("bad value", "config.json"),
    ],
)
def test_damaged_folders(what: str, says: str, copied: Path) -> None:
    spoil(what, copied)
    with pytest.raises(DamagedModelError, match=rf"(?s){says}") as caught:
        load_model(copied)
    assert len(str(caught.value).splitlines()) == 2
    assert len(str(caught.value)) < 400


def test_torch_weights_and_no_pickled_code(zoo: Zoo, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(zoo("llama"), tmp_path / "m"))
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    model = load_model(folder)
    assert model.facts.weights_hash == load_model(zoo("llama")).facts.weights_hash

    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    torch.save({**state, "evil": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(DamagedModelError):
        load_model(folder)
    assert not marker.exists()


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised.*gptq"),
        ({"is_encoder_decoder": True, "model_type": "t5"}, "encoder-decoder"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "trust_remote_code"),
        ({"model_type": "nonsense"}, "does not know the model type 'nonsense'"),
        (
            {"model_type": "fnet", "architectures": ["FNetForMaskedLM"]},
            "no adapter for FNetForMaskedLM",
        ),
    ],
)
def test_unsupported_models(changes: dict[str, Any], says: str, copied: Path) -> None:
    edit(copied, **changes)
    for attempt in (load_model, describe_model):
        with pytest.raises(UnsupportedModelError, match=rf"(?s){says}"):
            attempt(copied)


@pytest.mark.parametrize(
    ("name", "dtype"), [("model.layers.0.q_proj.qweight", "I32"), ("a.weight", "U8")]
)
def test_packed_weights_are_refused(name: str, dtype: str, copied: Path) -> None:
    """A34."""
    header = json.dumps({name: {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}}).encode()
    (copied / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UnsupportedModelError, match=f"quantised.*{dtype}"):
        load_model(copied)


@pytest.mark.parametrize(
    ("file", "says"), [("adapter_config.json", "adapter"), ("model.gguf", "GGUF")]
)
def test_other_formats(file: str, says: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=says):
        load_model(tmp_path)


def test_memory_is_looked_at_before_loading(zoo: Zoo, monkeypatch: Any) -> None:
    from collections import namedtuple

    import psutil

    full = namedtuple("full", "available free")(1000, 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    monkeypatch.setattr(psutil, "swap_memory", lambda: full)
    with pytest.raises(OutOfMemoryError, match=r"kB of float32(.|\n)*float16") as caught:
        load_model(zoo("gpt2"))
    assert "cpu" in str(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_running_out_of_memory_while_loading(error: Exception, zoo: Zoo, monkeypatch: Any) -> None:
    """A stand-in: transformers' loader is made to fail as it does on a full device."""
    from transformers import GPT2LMHeadModel

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(GPT2LMHeadModel, "from_pretrained", fail)
    with pytest.raises(OutOfMemoryError, match=r"cpu ran out while loading(.|\n)*float32"):
        load_model(zoo("gpt2"))


def test_dtypes_and_devices(zoo: Zoo) -> None:
    assert load_model(zoo("gpt2"), dtype="fp16").facts.dtype == "float16"
    assert load_model(zoo("gpt2"), dtype=torch.bfloat16).facts.dtype == "bfloat16"
    assert load_model(zoo("gpt2"), dtype="auto", device="auto").facts.dtype == "float32"
    assert load_model(zoo("gpt2"), device_map={"": "cpu"}).facts.device == "cpu"
    for options, says in (
        ({"dtype": "int8"}, "int8"),
        ({"device": "gpu"}, "no device 'gpu'"),
        ({"device": "cpu", "device_map": "auto"}, "both"),
        ({"device_map": "foo"}, "device_map 'foo'"),
    ):
        with pytest.raises(OptionError, match=says):
            load_model(zoo("gpt2"), **options)
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="'cuda' is not available"):
            load_model(zoo("gpt2"), device="cuda")


def test_weights_hash_sees_every_change(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    before = load_model(copied).facts.weights_hash
    state = load_file(copied / "model.safetensors")
    state["transformer.h.1.ln_2.bias"][3] += 1e-3
    save_file(state, copied / "model.safetensors", metadata={"format": "pt"})
    assert load_model(copied).facts.weights_hash != before
