"""Models with random weights have no structure, and nothing may be claimed of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnlens_plugins.cp import CP
from attnlens_plugins.embedding import Embedding
from attnlens_plugins.tucker import Tucker

import attnlens

LAYERS, HEADS, WIDTH, LENGTH, VOCABULARY = 2, 4, 16, 16, 50


def random_model(family: str, seed: int) -> Any:
    """Return a model as its library initialises it, which is how its twins are made too."""
    import torch
    import transformers as hf

    special = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "gpt2":
            config: Any = hf.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                n_positions=LENGTH,
                **special,
            )
        else:
            config = hf.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=32,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
                **special,
            )
        return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tokens_of(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(1, VOCABULARY, (8, LENGTH)).astype(np.int32)


def store_of(family: str, seed: int, tokens: np.ndarray, **more: Any) -> attnlens.Store:
    """Capture a random model by plain hooks, on tokens and on repeated random tokens."""
    import torch

    model = random_model(family, seed)
    if family == "gpt2":
        outs = [block.attn.c_proj for block in model.transformer.h]
        w_o = [m.weight.detach() for m in outs]
    else:
        outs = [block.self_attn.o_proj for block in model.model.layers]
        w_o = [m.weight.detach().T for m in outs]
    seen: dict[int, Any] = {}
    for i, m in enumerate(outs):
        m.register_forward_pre_hook(lambda _, given, i=i: seen.__setitem__(i, given[0]))
    period = 7
    stretch = np.random.default_rng(1).integers(1, VOCABULARY, (8, period))
    repeated = np.concatenate([stretch, stretch, stretch[:, :1]], axis=1)
    patterns = []
    with torch.inference_mode():
        for ids in (repeated, tokens):
            found = model(torch.as_tensor(ids, dtype=torch.long), output_attentions=True)
            patterns.append(torch.stack(found.attentions, 1).numpy())
    z = np.stack([seen[i].reshape(8, LENGTH, HEADS, -1).numpy() for i in range(LAYERS)], 1)
    weights = {"W_O": np.stack([w.reshape(HEADS, -1, WIDTH).numpy() for w in w_o])}
    return attnlens.Store.from_arrays(
        tokens=tokens,
        z=z,
        pattern=patterns[1],
        weights=weights,
        corpora={"repeated-random": attnlens.Store.from_arrays(pattern=patterns[0], period=period)},
        **more,
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_claim(family: str, seed: int) -> None:
    tokens = tokens_of(seed)
    twins = [store_of(family, 10 * seed + k, tokens) for k in range(1, 4)]
    store = store_of(family, 1000 + seed, tokens, twins=twins)
    # Half of the seeds at a rank at which components, and so groups of heads, are forced.
    rank = 3 if seed % 2 else "1..3"
    of = "outputs" if seed % 2 else "heads"
    for analysis in (CP(rank=rank, n_restarts=2, n_splits=1), Tucker(), Embedding(of=of)):
        findings = list(analysis.findings(analysis.compute(store)))
        assert findings
        assert not [f for f in findings if f.holds], analysis


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_claim_in_a_run(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: dict[str, list[Any]] = {
        k: [] for k in ("figures", "tables", "highlights", "notes", "errors")
    }
    monkeypatch.setattr("attnlens.execution.draw_all", lambda *_: dict(nothing))
    run = attnlens.run(
        random_model(family, 1000),
        plugins=[CP(rank="1..4", n_restarts=3, n_splits=2), Tucker(), Embedding()],
        corpus=tokens_of(0),
        out=tmp_path / "run",
    )
    assert not run.errors
    assert {f.claim for f in run.findings if f.holds} == set()
    assert len(run.findings) > 10
