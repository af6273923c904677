"""The analysis: heads, tokens and directions that belong together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import attnlens
from attnlens_plugins.cp import (
    building,
    claims,
    clusters,
    drawing,
    fitting,
    heads,
    polishing,
    results,
    tables,
)
from attnlens_plugins.cp.options import MAX_RANK, CPOptions


class CP(attnlens.Analysis):
    """Heads, tokens and directions that belong together: CP decomposition of what heads write.

    The tensor [head, token, d_model] of what every head adds to the residual stream is written as
    a sum of a few components, each the product of a loading on heads, a loading on tokens and a
    direction of the residual stream: these heads, on these tokens, write this. ``result`` (the
    default) does not depend on the arbitrary basis of a head's d_head space, and neither do
    ``pattern`` (mean attention over prompts; components are groups of heads with an attention
    pattern of their own), ``second_moment`` (which directions heads write, whatever the token),
    ``qk`` (W_Q W_K^T: which direction attends to which) and ``ov`` (W_V W_O: which direction is
    read and which written), the last two of the weights alone. ``z`` does depend on it: its
    components across heads mean nothing.

    The rank is the largest of which every component comes back in four of five random halvings of
    the prompts. Heads are grouped by their loadings; groups, redundancy and known types of heads
    are claimed only where the model lies clearly outside its twins, the same architecture with
    random weights on the same tokens, and groups only where the components come back.
    """

    name = "cp"
    Options = CPOptions

    @property
    def requires(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the chosen tensor is made of, the statistics of head types, and the twins."""
        own = building.REQUIRED[self.options.tensor]
        types = [f"{name}?" for name in heads.REQUIRED] if self.options.types else []
        return (*own, *types, *(() if "weights" in own else ("weights?",)), "twin")

    def memory(self, facts: Any, tokens: int) -> int:
        """Estimate the bytes held: the heads' outputs on the leading features, never all of them.

        The estimate is ``2 * 8 * heads * tokens * size`` for the projected tensor and its copy,
        `size` being the number of features that are kept, and one block of tokens as it is read.
        """
        from attnlens_plugins.cp.tensors import READ_AT_ONCE, kept_features

        heads = int(facts.n_layers * facts.n_heads)
        count = min(tokens, int(self.options.max_tokens))
        size = min(kept_features(max(self.options.ranks(heads))), int(facts.d_model))
        whole = heads * count * int(facts.d_model)
        return 16 * heads * count * size + 8 * min(whole, READ_AT_ONCE)

    def compute(self, store: Any) -> xr.Dataset:
        """Decompose the model's tensor and, at the same rank, those of its twins."""
        options: CPOptions = self.options
        seed = int(store.manifest.seed)
        causal = store.facts is None or bool(store.facts.causal)
        sample = building.sample_of(store, options, seed)
        most = max(options.ranks(MAX_RANK))
        tensor = building.build(store, options, sample, max_rank=most, seed=seed)
        ranks = options.ranks(len(tensor.layer) if options.layers != "each" else _widest(tensor))
        parts = _parts(tensor, options)
        how: dict[str, Any] = {
            "seed": seed,
            "nonnegative": options.constrained,
            "joint": options.layers == "joint",
        }
        scans = [fitting.fit_ranks(p, ranks, n_restarts=options.n_restarts, **how) for p in parts]
        tables = [fitting.stability(p, ranks, n_splits=options.n_splits, **how) for p in parts]
        known = [t for t in tables if t is not None]
        table = np.fmin.reduce(known) if len(known) == len(parts) else None
        choice = fitting.choose_rank(ranks, table, tensor.split)
        fits = self._fits(parts, choice.rank, how)
        groups = clusters.group(results.strengths(tensor, fits), options.clusters)
        pieces = [results.components(store, options, tensor, sample, f) for f in fits]
        result = pieces[0]
        if options.layers == "each":
            result = xr.concat(
                pieces, pd.Index(np.unique(tensor.layer), name="part"), coords="minimal",
                compat="override",
            )  # fmt: skip
        result = xr.merge(
            [
                result,
                results.per_head(tensor, fits),
                results.scan(ranks, scans, table),
                results.grouping(tensor, groups),
                results.redundancy(tensor),
                heads.type_scores(store, causal=causal) if options.types else xr.Dataset(),
            ],
            join="outer",
        )
        twins = []
        for twin in store.twins:
            like = building.build(twin, options, sample, max_rank=most, seed=seed)
            twins.append(self._of_twin(twin, like, choice.rank, how, causal))
        if twins:
            result = result.merge(xr.concat(twins, "twin"))
        result = result.assign_coords(component=np.arange(1, choice.rank + 1))
        notes = [*building.warnings_for(options), *dict.fromkeys(n for f in fits for n in f.notes)]
        notes += sample.remark(self.name) if sample is not None else []
        for note in notes:
            warnings.warn(note, stacklevel=2)
        result = result.assign_attrs(
            tensor=options.tensor,
            types=int(options.types),
            clusters=str(options.clusters),
            layers=options.layers,
            modes=list(tensor.dims),
            rank=choice.rank,
            stable=int(choice.stable),
            confidence=choice.confidence,
            reason=choice.reason,
            split=tensor.split,
            error=float(np.sqrt(np.mean([f.error**2 for f in fits]))),
            degenerate=int(any(f.degenerate for f in fits)),
            converged=int(all(f.converged for f in fits)),
            n_groups=groups.count,
            n_tokens=0 if sample is None else len(sample.text),
            tokens_left_out=0 if sample is None else sample.left_out,
            notes=notes,
        )
        result["cluster"] = claims.cluster_labels(result)
        return result.assign_attrs(n_clusters=int(result["cluster"].max()) + 1)

    def _fits(self, parts: list[Any], rank: int, how: Any) -> list[fitting.Fit]:
        """Fit one rank as well as can be: on the core, then on the tensor itself."""
        found = []
        for part in parts:
            fit = fitting.fit_ranks(
                part, [rank], n_restarts=self.options.n_restarts, polish=fitting.FINE, **how
            )[rank]
            found.append(fit if how["joint"] else polishing.polish(part, fit))
        return found

    def _of_twin(self, twin: Any, tensor: Any, rank: int, how: Any, causal: bool) -> xr.Dataset:
        """Put a twin through the same code, at the model's rank."""
        options: CPOptions = self.options
        fits = self._fits(_parts(tensor, options), rank, how)
        groups = clusters.group(results.strengths(tensor, fits), options.clusters)
        found = xr.merge(
            [
                results.per_head(tensor, fits)[["explained"]],
                results.redundancy(tensor),
                results.grouping(tensor, groups)[["group", "silhouette", "cohesion"]],
                heads.type_scores(twin, causal=causal) if options.types else xr.Dataset(),
            ]
        )
        found["error"] = float(np.sqrt(np.mean([f.error**2 for f in fits])))
        found["quality"] = groups.best
        return found.rename({name: f"{name}_twin" for name in found.data_vars})

    # -- what is shown ------------------------------------------------------------------------

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """Judge rank, clusters, redundancy and head types against the twins."""
        return claims.findings(result)

    @attnlens.figure("Which heads belong to which component")
    def head_loadings(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the loadings of heads."""
        return drawing.head_loadings(result, figure)

    @attnlens.figure("How the rank was chosen")
    def rank_selection(self, result: xr.Dataset, figure: Any) -> str:
        """Draw error, stability and core consistency over ranks."""
        return drawing.rank_selection(result, figure)

    @attnlens.figure("Clusters of heads, and heads of known types")
    def head_clusters(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the groups of heads on the layer x head grid."""
        return drawing.cluster_map(result, figure)

    @attnlens.figure("Which tokens each component is about")
    def token_loadings(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the token loadings over a prompt."""
        return drawing.token_text(result, figure)

    @attnlens.figure("What each component says in the vocabulary")
    def vocabulary(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the top and bottom tokens of each feature direction."""
        return drawing.words(result, figure)

    @attnlens.figure("Components over positions")
    def positions(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the components' dependence on position."""
        return drawing.positions(result, figure)

    @attnlens.highlight("Each component over the text")
    def text(self, result: xr.Dataset) -> Iterator[attnlens.Highlight]:
        """Colour the tokens of a few prompts by each component's loading."""
        return tables.highlights(result)

    @attnlens.table("Heads: cluster, type and scores")
    def heads(self, result: xr.Dataset) -> pd.DataFrame:
        """List every head."""
        return tables.heads(result)

    @attnlens.table("Components: weight, heads, tokens and vocabulary")
    def components(self, result: xr.Dataset) -> pd.DataFrame:
        """List every component."""
        return tables.components(result)


def _parts(tensor: Any, options: CPOptions) -> list[Any]:
    """Return what is decomposed on its own: the tensor, or each layer of it."""
    if options.layers != "each":
        return [tensor]
    return [tensor.take(np.flatnonzero(tensor.layer == n)) for n in np.unique(tensor.layer)]


def _widest(tensor: Any) -> int:
    return int(np.bincount(np.searchsorted(np.unique(tensor.layer), tensor.layer)).max())
