"""The analysis whole: through a run, from a reloaded result, and on a bare store."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from attnlens_plugins.equivariance import Equivariance, certificate
from attnlens_plugins.equivariance.analysis import chosen_tokens
from attnlens_plugins.equivariance.checks import checks
from attnlens_plugins.equivariance.pairs import compare

import attnlens
from attnlens.errors import OptionError
from tests import modelzoo
from tests.analyses.equivariance.conftest import TOKENS

#: Claims about what was learned; the others are certificates.
STRUCTURE = {"positional-heads", "content-heads", "equal-heads", "similar-heads", "same-meaning"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results by family, computed on a captured store: nothing is drawn."""
    made = {}

    def result(family, seed=0, fresh=False):
        key = family, seed, fresh
        if key not in made:
            model = modelzoo.build(family, seed=seed)
            if fresh:  # weights as the family draws them
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    model = type(model)._from_config(model.config, attn_implementation="eager")
                model.eval()
            store = attnlens.capture(
                model, TOKENS, activations=[], weights=True, twins=2, seed=seed,
                out=tmp_path_factory.mktemp("stores") / "s.attn",
            )  # fmt: skip
            made[key] = Equivariance().compute(store)
        return made[key]

    return result


def judged(result):
    return {f.claim: f for f in Equivariance().findings(result)}


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "qwen3", "bert", "gemma2", "bloom"])
def test_certificates(family, results):
    result = results(family)
    claims = judged(result)
    for claim in ("certificate.permutation", "certificate.softmax", "certificate.gauge"):
        assert claims[claim].holds, claims[claim].text
    assert claims["certificate.rotation"].holds == (family in ("llama", "qwen3"))
    assert "architecture" in claims["certificate.permutation"].text
    rows = {c.name: c for c in checks(result)}
    assert rows["head-order"].must_hold == (family != "bloom")
    assert set(rows["head-order"].verdicts) == {"broken" if family == "bloom" else "holds"}
    # These weights are random too, if not as the family draws them.
    assert [f.text for f in claims.values() if f.holds and f.claim in STRUCTURE] == []
    assert set(result["positionality"].dims) == {"layer", "head"} and result.sizes["one"] == 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_random_weights_yield_no_structure(family, seed, results):
    claims = judged(results(family, seed=seed, fresh=True))
    assert [f.text for f in claims.values() if f.holds and f.claim in STRUCTURE] == []


def test_a_run(tmp_path):
    run = attnlens.run(
        modelzoo.build("llama"), [Equivariance()], corpus=TOKENS, twins=1, out=tmp_path / "run"
    )
    assert not run.errors
    assert {f.claim for f in run.findings if f.holds} >= {"certificate.gauge"}
    reloaded = attnlens.open_run(run.path)["equivariance"]
    assert judged(reloaded)["certificate.gauge"] == judged(run["equivariance"])["certificate.gauge"]
    assert "another basis" in (run.path / "report.html").read_text(encoding="utf-8")


def test_every_figure_and_table(results, tmp_path):
    analysis, result = Equivariance(), results("llama")
    for drawing in analysis.drawings("figure"):
        if drawing.name == "pairs":
            with pytest.raises(attnlens.Skip):
                analysis.draw(drawing.name, result)
            continue
        figure = analysis.draw(drawing.name, result)
        png, _ = attnlens.figures.save_figure(figure, tmp_path, drawing.name)
        assert png.stat().st_size > 5000 and len(figure.get_gid()) > 40
    for drawing in analysis.drawings("table"):
        assert len(analysis.tabulate(drawing.name, result)) > 0


def test_the_invariants_are_those_that_other_analyses_may_use(results):
    analysis = Equivariance()
    frame = analysis.tabulate("invariants", results("gpt2")).set_index("quantity")
    assert frame["invariant"].to_dict() == {
        "pattern": "yes", "result": "yes", "q": "no", "k": "no", "v": "no", "z": "no",
    }  # fmt: skip


def test_a_failing_symmetry_is_said_and_drawn(results, tmp_path):
    result = results("llama").copy(deep=True)
    result["gauge_qk_error"][1, 2] = 0.4
    result["permutation_error"][0, 3] = 0.2
    claims = judged(result)
    assert not claims["certificate.gauge"].holds and "head 1.2" in claims["certificate.gauge"].text
    assert "head 0.3" in claims["certificate.permutation"].text
    (row,) = [c for c in checks(result) if c.name == "gauge-qk"]
    assert row.verdicts == ["holds", "fails"] and row.heads == ("1.2",)
    frame = Equivariance().tabulate("checks", result)
    assert "1.2" in set(frame["failing heads"])
    Equivariance().draw("certificate", result)


def test_a_coarse_dtype_is_undecided(results):
    result = results("llama").copy(deep=True)
    result["permutation_tolerance"][1] = 0.5
    claims = judged(result)
    assert not claims["certificate.permutation"].holds
    assert "too coarse" in claims["certificate.permutation"].text


def test_a_map_outside_that_changes_nothing_is_no_certificate(results):
    result = results("llama").copy(deep=True)
    result["gauge_qk_outside"][:] = 0.0
    claims = judged(result)
    assert not claims["certificate.gauge"].holds
    (row,) = [c for c in checks(result) if c.name == "gauge-qk"]
    assert row.verdicts == ["undecided"] * 2


def test_a_dead_layer_is_undecided_and_voids_no_other(results):
    result = results("llama").copy(deep=True)
    result["gauge_qk_outside"][0] = 0.0
    finding = judged(result)["certificate.gauge"]
    assert finding.holds and "arbitrary in layer 1" in finding.text
    assert "not tested in layer 0" in finding.text
    result = results("llama").copy(deep=True)
    result["gauge_qk_outside"][0, 2] = 0.0
    finding = judged(result)["certificate.gauge"]
    assert finding.holds and "not tested in head 0.2" in finding.text


def test_a_group_that_is_not_known_is_undecided(results):
    result = results("llama").copy(deep=True)
    result["gauge_qk_known"][:] = False
    assert not judged(result)["certificate.gauge"].holds
    (row,) = [c for c in checks(result) if c.name == "gauge-qk"]
    assert row.verdicts == ["undecided"] * 2


def test_what_came_out_as_nan_fails(results):
    result = results("llama").copy(deep=True)
    result["gauge_vo_error"][1, 2] = np.nan
    claims = judged(result)
    assert not claims["certificate.gauge"].holds and "1.2" in claims["certificate.gauge"].text


def test_each_check_names_its_own_heads(results):
    result = results("llama").copy(deep=True)
    result["gauge_qk_error"][0, 2] = 0.4
    result["heads_error"][0] = 0.4
    text = judged(result)["certificate.gauge"].text
    assert "queries and keys in another basis fails in head 0.2." in text
    assert "heads in another order fails in heads 0.0, 0.1, 0.2, 0.3." in text


def test_the_order_of_heads_that_share_keys_is_said(results):
    assert "share keys and values" in judged(results("llama"))["certificate.gauge"].text
    assert "in any order, too" in judged(results("gpt2"))["certificate.gauge"].text


def test_a_rotation_that_drowns_in_rounding_is_undecided(results):
    for family in ("llama", "gpt2"):
        result = results(family).copy(deep=True)
        result["rotation_tolerance"][:] = 2.0
        result["rotation_logits_allowed"] = 2.0
        finding = judged(result)["certificate.rotation"]
        assert not finding.holds and "not decided" in finding.text


def test_heads_that_agree_in_weights_but_not_in_what_they_do_are_not_equal(results):
    result = results("llama").copy(deep=True)
    result["distance"][0, 1] = result["distance"][1, 0] = 0.0
    result["merged_logits"] = 1e-6
    claims = judged(result)
    assert claims["equal-heads"].holds and "1 pair of heads is" in claims["equal-heads"].text
    result["merged_logits"] = 0.02
    finding = judged(result)["equal-heads"]
    assert not finding.holds and "not the same heads" in finding.text


def test_positional_heads_are_named_beside_twins(results):
    result = results("llama").copy(deep=True)
    result["positionality"][1, 3] = 0.97
    result["positionality_twin"][:] = 0.4 + 0.01 * np.arange(8).reshape(2, 4)
    claims = judged(result)
    assert claims["positional-heads"].evidence["heads"] == ["1.3"]
    alone = result.drop_vars(["positionality_twin", "nearest_distance_twin"])
    claims = judged(alone)
    assert not claims["positional-heads"].holds and "no twins" in claims["positional-heads"].text


def test_the_demo_has_heads_that_read_the_token_before(tmp_path):
    """A trained model: its previous-token heads follow positions, and twins' heads do not."""
    model = attnlens.load_model("demo")
    tokens = np.random.default_rng(0).integers(5, 500, (8, 32))
    seen = {}
    with model.record(["pattern"], lambda n, layer, v: seen.update({layer: v.clone()})):
        model.forward(tokens)
    before = np.stack([
        seen[i].diagonal(-1, -2, -1).mean((0, 2)).numpy() for i in range(model.facts.n_layers)
    ])  # fmt: skip
    score = certificate.permutations(model, tokens, 2, 0)["positionality"].values
    twin = certificate.permutations(model.twin(1), tokens, 2, 0)["positionality"].values
    strong = before > 0.6
    assert strong.any()
    assert score[strong].min() > twin.max() + 0.1


def test_a_bare_store_says_that_it_needs_run(tmp_path):
    attnlens.capture(
        modelzoo.build("gpt2"), TOKENS, activations=[], weights=True, twins=1,
        out=tmp_path / "s.attn",
    )  # fmt: skip
    run = attnlens.analyze(tmp_path / "s.attn", [Equivariance()], out=tmp_path / "run")
    assert "live model" in run.errors["equivariance"]
    (record,) = run.record["analyses"]
    assert record["error"]["type"] == "NeedError" and "attnlens run" in record["error"]["hint"]


def test_pairs(tmp_path):
    model = modelzoo.tiny("llama", tmp_path / "m", tokenizer=True)
    words = ["light", "earth", "water", "darkness", "heaven", "God", "deep", "face", "good", "void"]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"the {w} was there\tthere was the {w}\n" for w in words))
    store = attnlens.capture(
        str(model), ["In the beginning"], activations=[], weights=True, twins=1,
        out=tmp_path / "s.attn",
    )  # fmt: skip
    analysis = Equivariance(pairs=str(path), pair_shuffles=20)
    result = analysis.compute(store)
    assert result["pairs_value"].sizes == {"layer": 2, "invariant": 5}
    assert result["pairs_twin"].sizes["twin"] == 1
    finding = judged(result)["same-meaning"]
    assert not finding.holds and "10 pairs" in finding.text and "at random" in finding.text
    assert "Four similarities" in (analysis.draw("pairs", result).get_gid() or "")


def test_two_random_models_are_not_said_to_agree(tmp_path):
    paths = [modelzoo.tiny("llama", tmp_path / name, tokenizer=True, seed=seed)
             for name, seed in (("a", 0), ("b", 1))]  # fmt: skip
    words = ["light", "earth", "water", "darkness", "heaven", "God", "deep", "face", "good", "void"]
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"the {w} was there {w}\n" for w in words))
    for twins in (2, 0):
        store = attnlens.capture(
            str(paths[0]), ["In the beginning"], activations=[], weights=True, twins=twins,
            out=tmp_path / f"{twins}.attn",
        )  # fmt: skip
        result = Equivariance(pairs=str(path), other=str(paths[1])).compute(store)
        assert ("pairs_twin" in result) == (twins > 0)
        assert not judged(result)["same-meaning"].holds


def test_twelve_layers_can_agree_after_the_default_pairings(results):
    """P-values of the largest over all layers: more layers need no more pairings."""
    values = np.random.default_rng(0).normal(size=(12, 20, 8))
    found = compare(values, values, shuffles=200, seed=0)
    twins = np.random.default_rng(1).normal(0.1, 0.02, size=(2, 12, 5))
    found["pairs_twin"] = ("twin", "layer", "invariant"), twins
    found.attrs["pairs_other"] = "another"
    (finding,) = of_pairs(results, found)
    assert finding.holds and finding.evidence["layers"] == list(range(12))
    found["pairs_twin"][:] = 1.0
    (finding,) = of_pairs(results, found)
    assert not finding.holds and "more than in twins" in finding.text
    found["pairs_value"][:] = np.nan
    (finding,) = of_pairs(results, found)
    assert not finding.holds and "nan" not in finding.text


def of_pairs(results, found):
    """Judge pairs beside a result of another depth, whose layers say nothing here."""
    rest = results("llama").isel(layer=[0] * 12).assign_coords(layer=np.arange(12))
    result = rest.merge(found).assign_attrs({**rest.attrs, **found.attrs})
    return [f for f in Equivariance().findings(result) if f.claim == "same-meaning"]


@pytest.mark.parametrize("text", ["", "one text\n" * 5, "a\t\n" * 5, "a\tb\tc\n" * 5])
def test_a_bad_file_of_pairs_is_refused_with_the_options(text, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text(text)
    with pytest.raises(OptionError):
        Equivariance(pairs=str(path))
    path.write_bytes(b"caf\xe9\tcoffee\n" * 5)
    with pytest.raises(OptionError, match="not UTF-8"):
        Equivariance(pairs=str(path))


def test_options_are_refused_early(tmp_path):
    with pytest.raises(OptionError, match="no file"):
        Equivariance(pairs=str(tmp_path / "none.tsv"))
    with pytest.raises(OptionError, match="pairs"):
        Equivariance(other="gpt2")


def test_prompts_of_one_length_are_chosen():
    tokens = [[1, 2, 3, 4], [5, 6, 7], [1, 2, 3], [9]]
    padded = np.full((4, 4), -1)
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    store = attnlens.Store.from_arrays(tokens=padded, lengths=np.array([4, 3, 3, 1]))
    assert chosen_tokens(store, 8, 64).tolist() == [[5, 6, 7], [1, 2, 3]]
    assert chosen_tokens(store, 8, 3).tolist() == [[1, 2, 3], [5, 6, 7], [1, 2, 3]]
    assert chosen_tokens(store, 1, 64).tolist() == [[1, 2, 3, 4]]
    with pytest.raises(attnlens.Skip):
        chosen_tokens(attnlens.Store.from_arrays(tokens=np.array([[1], [2]])), 8, 64)


def test_importing_the_plugin_does_not_import_torch():
    code = "import sys, attnlens_plugins.equivariance; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
