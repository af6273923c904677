"""The analysis: certificates of symmetry for the live model, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import attnlens
from attnlens_plugins.equivariance import certificate, claims, drawing, tables, words
from attnlens_plugins.equivariance.distances import equal_below
from attnlens_plugins.equivariance.merging import merged
from attnlens_plugins.equivariance.options import EquivarianceOptions
from attnlens_plugins.equivariance.pairs import compare, read_pairs, represent

#: Heads nearer than this to each other are grouped, if no twin's heads come that near.
_NEAR = 0.7


class Equivariance(attnlens.Analysis):
    """Symmetry certificates: what leaves the model's attention unchanged, and what breaks it.

    The live model is called again, through hooks, on changed input or with changed weights, and
    what it computes is compared with what it computed before:

    - the tokens in another order, with positional encodings and mask permuted along (attention on
      a set does not mind), or with one of them left behind, which shows how positional a head is;
    - a constant added to rows of scores, a vector added to all keys;
    - queries, keys, values and outputs of each head in another basis (gauge), inside the group
      that the architecture leaves free, and outside it;
    - the residual stream rotated.

    A symmetry that holds follows from the architecture: it is a certificate that the model, as it
    is run here, is what it is thought to be, and no claim about what was learned. What was learned
    is judged beside twins with random weights: heads that follow positions or content far more
    than a twin's do, and heads that are alike whatever their bases.

    Each tolerance follows from the dtype and the number of terms that are summed; "broken by x %"
    is the norm of the difference over the norm of what it should be. Positionality is, of a head's
    reaction to a shuffle of its tokens whose positions and mask stay in place, the share that
    is seen from the tokens: 0 for a head that finds its tokens wherever they went, 1 for a head
    that reads the same places whatever stands there.

    Options `pairs` and `other` compare representations of texts with one meaning, or of one text
    in two models, by similarities that no rotation of either side changes.
    """

    name = "equivariance"
    requires = ("model", "weights", "twin")

    Options = EquivarianceOptions

    def compute(self, store: Any) -> xr.Dataset:
        """Check every symmetry of the live model."""
        model, facts = store.model, store.model.facts
        seed = int(store.manifest.seed)
        tokens = chosen_tokens(store, self.options.prompts, self.options.length)
        weights = {str(name): array.values for name, array in store.weights.items()}
        result = certificate.permutations(model, tokens, self.options.shuffles, seed)
        result = result.merge(certificate.shifts(model, tokens, seed))
        pre_norm = "ln1_w" in weights
        result = result.merge(certificate.rotations(model, tokens, seed, pre_norm=pre_norm))
        notes = []
        gauge: Any = None
        try:
            gauge = certificate.gauges(model, tokens, weights, seed)
        except attnlens.errors.ModelError as error:
            notes.append(f"Gauge symmetry was not checked: {error.message}.")
        else:
            notes += _unknown_groups(gauge)
            result = result.merge(certificate.gauge_dataset(gauge))
        result = self._beside_twins(store, result, weights, gauge, tokens, notes)
        if self.options.pairs is not None:
            found = self._pairs(store, model, seed)
            result = result.merge(found).assign_attrs({**result.attrs, **found.attrs})
        result = result.assign_coords(
            layer=np.arange(facts.n_layers), head=np.arange(facts.n_heads)
        )
        result.attrs |= {
            "prompts": len(tokens),
            "length": tokens.shape[1],
            "positions": facts.positions,
            "causal": facts.causal,
            "windowed": any(w is not None for w in facts.windows),
            "norm": facts.norm,
            "pre_norm": pre_norm,
            "qk_norm": facts.qk_norm,
            "soft_capped": facts.soft_cap is not None,
            "sinks": facts.sinks,
            "numbered_heads": "each has its own slope" if facts.positions == "alibi" else "",
            "own_by_head": _own_by_head(facts, weights),
            "grouped": facts.n_kv_heads != facts.n_heads,
            "d_model": facts.d_model,
            "attention_parameters": int(
                sum(weights[n].size for n in ("W_Q", "W_K", "W_V", "W_O") if n in weights)
            ),
            "dtype": facts.dtype,
            "notes": notes,
        }
        return result

    def _beside_twins(
        self,
        store: Any,
        result: xr.Dataset,
        weights: Any,
        gauge: Any,
        tokens: Any,
        notes: list[str],
    ) -> xr.Dataset:
        """Compare heads, and measure on twins what is claimed of the model."""
        model, facts = store.model, store.model.facts
        seed, length = int(store.manifest.seed), tokens.shape[1]
        found = None
        if self.options.distances and gauge is not None:
            try:
                found = certificate.head_map(weights, facts, gauge, length)
            except attnlens.errors.ModelError as error:
                notes.append(f"Heads were not compared: {error.message}.")
        positional, near = [], []
        for i, twin in enumerate(store.twins):
            own = {str(name): array.values for name, array in twin.weights.items()}
            if found is not None:
                near.append(certificate.head_map(own, facts, gauge, length)["nearest_distance"])
            # The seed under which the run made this twin, so that it is the same one.
            live = model.twin(1000 * seed + 1 + i)
            positional.append(
                certificate.permutations(live, tokens, self.options.shuffles, seed)["positionality"]
            )
            del live
        dim = pd.Index(range(len(positional)), name="twin")
        if positional:
            result["positionality_twin"] = xr.concat(positional, dim)
        if found is not None:
            below = _NEAR
            if near:
                result["nearest_distance_twin"] = xr.concat(near, dim)
                below = min(_NEAR, float(result["nearest_distance_twin"].min()))
            found = certificate.grouped(found, below)
            moved = _merged(found, model, tokens)
            if moved is not None:
                result["merged_logits"] = moved
            names = [f"{a}.{b}" for a in range(facts.n_layers) for b in range(facts.n_heads)]
            result = result.merge(found).assign_coords(one=names, other=names)
            result.attrs |= {"offsets": found.attrs["offsets"], "grouped_below": below,
                             "equal_below": equal_below(facts)}  # fmt: skip
        return result

    def _pairs(self, store: Any, model: Any, seed: int) -> xr.Dataset:
        options = self.options
        texts = read_pairs(options.pairs, single=options.other is not None)
        second = attnlens.load_model(options.other) if options.other is not None else model
        sides = [represent(model, [a for a, _ in texts], options.pool)]
        sides.append(represent(second, [b for _, b in texts], options.pool))
        found = compare(*sides, shuffles=options.pair_shuffles, seed=seed)
        found.attrs["pairs_other"] = options.other or ""
        values = []
        twins = len(store.twins)
        for i in range(twins):
            seeds = (1000 * seed + 1 + i, 1000 * seed + 1 + twins + i)
            live = [model.twin(seeds[0])] * 2
            if options.other is not None:  # two models that share nothing
                live = [live[0], second.twin(seeds[1])]
            both = [represent(live[k], [t[k] for t in texts], options.pool) for k in (0, 1)]
            values.append(compare(*both, shuffles=20, seed=seed)["pairs_value"])
        if values:
            found["pairs_twin"] = xr.concat(values, pd.Index(range(len(values)), name="twin"))
        return found

    # -- figures ------------------------------------------------------------------------------

    @attnlens.figure("What leaves the model unchanged, and what does not")
    def certificate(self, result: xr.Dataset, figure: Any) -> str:
        """Draw all checks of all layers as one table."""
        return drawing.certificate(result, figure)

    @attnlens.figure("Positionality: does a head follow positions or content?")
    def positionality(self, result: xr.Dataset, figure: Any) -> str:
        """Draw positionality on the head grid."""
        return drawing.positionality(result, figure)

    @attnlens.figure("How heads take a shuffle of their tokens")
    def reactions(self, result: xr.Dataset, figure: Any) -> str:
        """Draw each head's two reactions against each other."""
        return drawing.reactions(result, figure)

    @attnlens.figure("Distances between heads, whatever their bases")
    def head_distances(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the map of all pairs of heads."""
        return drawing.head_distances(result, figure)

    @attnlens.figure("Each head's distance to the one most like it")
    def nearest_heads(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the distance to the nearest head on the head grid."""
        return drawing.nearest_heads(result, figure)

    @attnlens.figure("Texts with one meaning: how alike their representations are")
    def pairs(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the invariants of pairs over depth."""
        return drawing.pairs(result, figure)

    # -- tables and findings --------------------------------------------------------------------

    @attnlens.table("The certificate in numbers")
    def checks(self, result: xr.Dataset) -> pd.DataFrame:
        """List every check of every layer with its tolerance."""
        return tables.checks(result)

    @attnlens.table("Gauge groups: the freedom of each layer's bases")
    def gauge_groups(self, result: xr.Dataset) -> pd.DataFrame:
        """List each layer's groups and the dimensions of the redundant space."""
        return tables.gauge_groups(result)

    @attnlens.table("Which quantities of other analyses do not depend on a head's basis")
    def invariants(self, result: xr.Dataset) -> pd.DataFrame:
        """List what a change of basis left as it was."""
        return tables.invariants(result)

    @attnlens.table("The pairs of heads that are most alike")
    def alike(self, result: xr.Dataset) -> pd.DataFrame:
        """List the nearest pairs of heads."""
        return tables.alike(result)

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """State the certificates, then what lies outside what chance would have."""
        yield from claims.findings(result)


def _unknown_groups(gauge: Any) -> list[str]:
    unknown = [i for i, known in enumerate(gauge.known["qk"]) if not known]
    if not unknown:
        return []
    return [
        f"What acts between queries, keys and their product in {words.layers(unknown)} could not "
        "be told, so that their group is not known and was not tested."
    ]


def _merged(found: xr.Dataset, model: Any, tokens: Any) -> float | None:
    """Merge the equal heads of each layer for a moment; None where there are none."""
    equal = found["distance"].values < equal_below(model.facts)
    near = np.argwhere(np.triu(equal, 1)).tolist()
    n_heads = model.facts.n_heads
    pairs = [(i, j) for i, j in near if i // n_heads == j // n_heads]
    return merged(model, tokens, pairs) if pairs else None


def _own_by_head(facts: Any, weights: Any) -> str:
    """Name what each head has of its own beside its weights, and takes along."""
    if facts.sinks:
        return "its sink"
    return "its gains" if np.ndim(weights.get("q_norm_w")) == 3 else ""


def chosen_tokens(store: Any, prompts: int, length: int) -> Any:
    """Return prompts of one length, int64[prompt, pos]: of the length that most of them have.

    Parameters
    ----------
    store : View
    prompts : int
        At most so many.
    length : int
        At most so many tokens of each.

    Raises
    ------
    Skip
        If no prompt has two tokens.
    """
    tokens, lengths = store.tokens.values, store.lengths.values
    cut = np.minimum(lengths, length)
    usable: Iterable[int] = np.unique(cut[cut >= 2])
    best = max(usable, key=lambda n: (min((cut == n).sum(), prompts), n), default=None)
    if best is None:
        raise attnlens.Skip("no prompt has two tokens, and symmetries need an order to change")
    rows = np.flatnonzero(cut == best)[:prompts]
    return tokens[rows, :best].astype(np.int64)
