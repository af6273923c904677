"""A run's folder as `attnlens run` leaves it, made without a model: 12 layers, 12 heads."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens import figures

_GENESIS = (
    "In the beginning God created the heaven and the earth . \n And the earth was without form ,"
    " and void ; and darkness was upon the face of the deep . \n And the Spirit of God moved upon"
    " the face of the waters . \n And God said , Let there be light : and there was light ."
    " $5 <script> 東京 😀 עברית"
)
TEXT = [w if w in ".,;:\n" else f" {w}" for w in _GENESIS.split(" ")]


def build_run(folder: Path, *, model: str = "gpt2", draw: bool = True) -> Path:
    """Write run.json and what lies beside it."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    entropy = np.clip(4.2 - rng.gamma(2.0, 0.55, (12, 12)) - np.hanning(12)[:, None], 0.05, 4.6)
    twins = 4.05 + 0.12 * rng.random((3, 12, 12))
    marks = {"induction": [(5, 5), (6, 9), (7, 10)], "previous token": [(4, 11), (2, 2)]}
    sigma = np.sort(rng.gamma(0.25, 1, (12, 12, 64)), axis=-1)[..., ::-1] + 1e-4
    energy = np.cumsum(sigma**2, -1) / (sigma**2).sum(-1, keepdims=True)
    clusters = np.where(rng.random((12, 12)) < 0.45, -1, rng.integers(0, 4, (12, 12)))
    heads = np.abs(rng.normal(0, 0.15, (12, 12, 4)))
    for i, j in np.argwhere(clusters >= 0):
        heads[i, j, clusters[i, j]] += 1
    over_text = np.abs(rng.normal(0, 0.2, (4, len(TEXT))))
    over_text[0, 0] = 2.5
    over_text[1, 10::12] = 1.8
    top = {
        f"Component {c}": [
            (TEXT[int(rng.integers(len(TEXT)))], float(2.2 * np.exp(-k / 5))) for k in range(8)
        ]
        for c in range(4)
    }

    def one(name: str, figure_name: str, title: str, alt: str, draw_on: Any) -> Any:
        place = f"{name}/figures/{figure_name}"
        if draw:
            figure = figures.new_figure()
            draw_on(figure)
            figures.save_figure(figure, folder / name / "figures", figure_name)
        entry = {"name": figure_name, "title": title, "alt": alt}
        return entry | {"png": f"{place}.png", "svg": f"{place}.svg"}

    def table(name: str, table_name: str, title: str, rows: list[list[Any]]) -> dict[str, str]:
        path = folder / name / "tables" / f"{table_name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows(rows)
        return {"name": table_name, "title": title, "csv": f"{name}/tables/{table_name}.csv"}

    def highlight(name: str, part: str, title: str, rows: list[Any], signed: bool) -> Any:
        path = folder / name / "highlights" / f"{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"rows": rows, "signed": signed}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        return {"name": part, "title": title, "json": f"{name}/highlights/{part}.json"}

    spectrum_figures = [
        one("spectrum", "entropy", "Entropy of attention, by head",
            "Heat map of 12 layers by 12 heads. Entropy is lowest in the middle.",
            lambda f: figures.head_grid(
                f, entropy, title="Entropy of attention, by head", label="Entropy (nats)",
                null=twins, marks=marks,
                note="Mean over query rows. Hatched: twins with random weights.")),
        one("spectrum", "depth", "Entropy of attention over depth",
            "Each head's entropy against its layer; the twins lie in a narrow band at 4.1 nats.",
            lambda f: figures.depth_plot(
                f, entropy, title="Entropy of attention over depth", label="Entropy (nats)",
                null=twins, lines={"uniform, causal": 3.87}, marks=marks)),
        one("spectrum", "energy", "Cumulative energy of the singular values",
            "Curves of cumulative energy for 144 heads.",
            lambda f: figures.curves(
                f, energy, title="Cumulative energy of the singular values",
                label="Share of Σσ²", xlabel="Singular values kept",
                highlight={"5.5": (5, 5), "4.11": (4, 11)}, null=energy[:1] * 0.8, ylim=(0, 1.02))),
    ]  # fmt: skip
    cp_figures = [
        one("cp", "clusters", "Clusters of heads", "Clusters on the grid of layers and heads.",
            lambda f: figures.category_grid(
                f, clusters, title="Clusters of heads", legend_title="Cluster", none="no cluster")),
        one("cp", "heads", "Loadings of heads", "Loadings of 144 heads on 4 components.",
            lambda f: figures.loading_matrix(
                f, heads, title="Loadings of heads on components", groups=clusters)),
        one("cp", "tokens", "Loadings of tokens", "Component 0 loads on the first token.",
            lambda f: figures.token_loadings(
                f, over_text, TEXT, title="Where each component loads, over the text")),
        one("cp", "vocabulary", "Top vocabulary", "Eight tokens for each of 4 components.",
            lambda f: figures.bars(
                f, top, title="Vocabulary that each component writes", label="Logit")),
    ]  # fmt: skip
    rows = [["layer", "head", "kind", "entropy", "effective_rank"]]
    rows += [
        [i, j, "induction" if (i, j) in marks["induction"] else "", entropy[i, j], 60 / (1 + i + j)]
        for i in range(12)
        for j in range(12)
    ]
    analyses: list[dict[str, Any]] = [
        {
            "name": "spectrum", "title": "How much of the sequence space each head uses",
            "distribution": "attnlens", "version": "0.1.0",
            "options": {"top": 64, "energy": 0.9, "exclude_bos": False}, "status": "ok",
            "error": None, "seconds": 3.217,
            "notes": ["Prompts of one token were left out of the spectrum."],
            "figures": spectrum_figures,
            "tables": [table("spectrum", "heads", "Every head", rows)], "highlights": [],
        },
        {
            "name": "cp", "title": "Heads that do the same, by CP decomposition",
            "distribution": "attnlens", "version": "0.1.0",
            "options": {"rank": 4, "restarts": 10, "nonnegative": True, "seed": None},
            "status": "ok", "error": None, "seconds": 12.4, "notes": [], "figures": cp_figures,
            "tables": [table("cp", "fit", "Fit by rank", [["", "rank", "error", "converged"],
                [0, 2, 0.412, True], [1, 4, 0.231, True], [2, 8, 1.2e-7, False]])],
            "highlights": [highlight("cp", "text", "The text, coloured by loading", [
                {"label": f"Component {c}", "tokens": TEXT,
                 "weights": (over_text[c] - (0.6 if c == 1 else 0)).tolist()} for c in range(2)],
                True)],
        },
        {
            "name": "tails", "title": "How heavy the tails of the scores are",
            "distribution": "attnlens-tails", "version": "2.0", "options": {}, "status": "failed",
            "error": {"type": "DecompositionError", "message": "The scores of 3.1 are all equal.",
                      "hint": "Leave layer 3 out with --layers."},
            "seconds": 0.08, "notes": [], "figures": [], "tables": [], "highlights": [],
        },
        {
            "name": "gated", "title": "Which heads open only for rare tokens",
            "distribution": "attnlens-gated", "version": "0.3", "options": {"share": 0.05},
            "status": "skipped", "error": None, "seconds": 0.001,
            "notes": ["it needs the result of tails, which there is not"],
            "figures": [], "tables": [], "highlights": [],
        },
    ]  # fmt: skip
    findings = [
        {"analysis": "spectrum", "claim": "low-rank-heads", "holds": True,
         "text": "31 of 144 heads concentrate 90 % of σ² in fewer than 8 singular values.",
         "evidence": {"heads": 31, "median_rank": 11.42, "lowest": [[5, 5], [6, 9], [7, 10]]},
         "null": {"heads": 0, "median_rank": 46.9}},
        {"analysis": "spectrum", "claim": "attention-sink", "holds": True,
         "text": "Half of all attention goes to the first token from layer 5 on.",
         "evidence": {"share": 0.512}, "null": {"share": 0.0423}},
        {"analysis": "cp", "claim": "redundant-heads", "holds": False,
         "text": "No group of heads writes the same features more than twins do.",
         "evidence": {"factor_match": 0.41}, "null": {"factor_match": 0.38}},
        {"analysis": "cp", "claim": "duplicate-token-heads", "holds": False,
         "text": "No head attends to earlier copies of its token.", "evidence": {}, "null": {}},
    ]  # fmt: skip
    run = {
        "schema": "attnlens-run/1", "attnlens": "0.1.0",
        "command": ["attnlens", "run", "--plugins", "spectrum,cp,tails,gated", "-o", "cp.rank=4",
                    "--text", "it's a test", model],
        "started": "2026-03-14T15:09:26+00:00", "seconds": 41.7,
        "model": {"name": model, "source": "hub", "revision": "607a30d783dfa663",
                  "architecture": "GPT2LMHeadModel", "n_layers": 12, "n_heads": 12,
                  "n_kv_heads": 12,
                  "d_model": 768, "d_head": 64, "d_vocab": 50257, "n_ctx": 1024,
                  "positions": "absolute", "causal": True, "windows": [None] * 12,
                  "soft_cap": None, "scales": [0.125] * 12, "dtype": "float32", "device": "cpu",
                  "mode": "raw", "n_params": 124439808,
                  "weights_hash": "9f2c1d0e77b3a1d6" * 4,
                  "config": {"n_layer": 12, "activation_function": "gelu_new"}},
        "corpus": {"name": "default", "n": 16, "length": 128, "seed": 0, "bos": "prepended",
                   "hash": "4b1d0f"},
        "plan": {"activations": ["z", "pattern"], "statistics": ["pattern.entropy"],
                 "disk_bytes": 73400320},
        "store": "store.attn", "seed": 0,
        "versions": {"python": "3.11.4", "torch": "2.6.0", "transformer-lens": "4.3.0"},
        "notes": ["Attention was switched from sdpa to eager, so that patterns can be seen."],
        "analyses": analyses, "findings": findings,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def drawn_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with its figures drawn; not to be changed."""
    return build_run(tmp_path_factory.mktemp("run") / "dir with space ü東")


@pytest.fixture
def bare_run(tmp_path: Path) -> Path:
    """A run whose figure files are not there; free to be changed."""
    return build_run(tmp_path / "run", draw=False)
