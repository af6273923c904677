"""The analysis: a map of heads or features, and how far it may be believed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import attnlens
from attnlens_plugins.cp.claims import typed_heads
from attnlens_plugins.cp.heads import type_scores
from attnlens_plugins.embedding import drawing, maps, scores, vectors
from attnlens_plugins.embedding.options import LEAST, EmbeddingOptions

#: Spread of the purity among models with random weights, at least, and the level of its bounds.
#: With three twins a claim then needs a purity about 0.3 above theirs.
_PURITY_FLOOR, _ALPHA = 0.06, 0.05


class Embedding(attnlens.Analysis):
    """Maps of heads and features by t-SNE or UMAP, with PCA beside and scores of trust.

    Heads that attend alike (``of=heads``), write alike (``outputs``) or load alike on cp's
    components (``loadings``), or cp's feature factors (``features``), are drawn as points in the
    plane. Distances in such maps deceive: sizes of groups and gaps between them mean nothing, and
    the same points give other pictures with other seeds. What can be trusted is reported instead:
    trustworthiness (how few neighbours on the map are strangers in the data) and the purity of
    neighbourhoods (how often neighbours share a layer, type or cluster), with what it would be by
    chance and in models with random weights. The claim is judged on the data, not on the map.

    The same seed gives the same picture on one machine; on another, compare neighbourhoods and
    not coordinates.
    """

    name = "embedding"
    Options = EmbeddingOptions

    @property
    def requires(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the points are made of."""
        options: EmbeddingOptions = self.options
        # Attention labels the points; only the map of heads by attention is made of it.
        offsets, *types = vectors.OF_HEADS
        needs = [offsets if options.of == "heads" else f"{offsets}?", *(f"{t}?" for t in types)]
        if options.of == "outputs":
            needs += ["result", "weights?"]
        if options.needs_cp:
            needs.append("analysis:cp")
        return (*needs, "twin")

    def compute(self, store: Any) -> xr.Dataset:
        """Place the points, and measure how far the places may be believed."""
        options: EmbeddingOptions = self.options
        seed = int(store.manifest.seed)
        cp = store.results["cp"] if options.needs_cp else None
        points = self._points(store, cp)
        what = "components" if options.of == "features" else "heads"
        maps.check(points.values, what)
        n = len(points.values)
        found: dict[str, Any] = {}
        places, share = maps.pca(points.values)
        found["pca"] = places
        notes = []
        if options.method in ("tsne", "both"):
            perplexity = maps.fitted_perplexity(options.perplexity, n)
            if perplexity < options.perplexity:
                notes.append(f"Perplexity {perplexity:.3g}: {n} {what} allow no more.")
            found["tsne"] = maps.tsne(points.values, perplexity=perplexity, seed=seed)
        if options.method in ("umap", "both"):
            near = maps.fitted_neighbors(options.neighbors, n)
            if near < options.neighbors:
                notes.append(f"{near} neighbours: {n} {what} allow no more.")
            found["umap"], more = maps.umap(points.values, neighbors=near, seed=seed)
            notes += more
        result = xr.Dataset(
            {k: (("point", "axis"), v) for k, v in found.items()},
            coords={
                "point": points.name,
                "point_layer": ("point", points.layer),
                "point_head": ("point", points.head),
            },
        )
        result["variance"] = ("axis", share)
        labels = self._labels(store, points, cp)
        for name, values in labels.items():
            result[f"label_{name}"] = ("point", values)
        # Where all points have one label, neighbours share it whatever they are.
        labels = {k: v for k, v in labels.items() if len(np.unique(v)) > 1}
        spaces = {"data": points.values, **found}
        result["purity"] = (
            ("space", "label"),
            np.array(
                [[scores.purity(v, one) for one in labels.values()] for v in spaces.values()]
            ).reshape(len(spaces), len(labels)),
        )
        result["purity_chance"] = (
            "label", np.array([scores.chance_purity(one) for one in labels.values()])
        )  # fmt: skip
        result["trustworthiness"] = (
            "map", np.array([scores.trustworthiness(points.values, v) for v in found.values()])
        )  # fmt: skip
        result = result.assign_coords(space=list(spaces), label=list(labels), map=list(found))
        judged = cp is None and "layer" in labels
        twins = [self._twin_purity(twin) for twin in store.twins] if judged else []
        if twins:
            result["purity_twin"] = ("twin", np.array(twins))
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return result.assign_attrs(
            of=options.of,
            what=what,
            color=options.color,
            seed=seed,
            neighbors=scores.neighbors(n),
            notes=notes,
        )

    def _points(self, store: Any, cp: xr.Dataset | None) -> vectors.Points:
        options: EmbeddingOptions = self.options
        if options.of == "heads":
            return vectors.of_heads(store)
        if options.of == "outputs":
            return vectors.of_outputs(store, most=options.max_tokens, seed=int(store.manifest.seed))
        assert cp is not None
        count = cp.sizes["component"] * cp.sizes.get("part", 1)
        least = LEAST if options.of == "features" else 2
        if count < least:
            raise attnlens.Skip(
                f"of={options.of} needs at least {least} components; cp's rank is "
                f"{cp.attrs['rank']}: ask for more by -o cp.rank={max(least, 4)}"
            )
        return vectors.of_loadings(cp) if options.of == "loadings" else vectors.of_features(cp)

    def _labels(self, store: Any, points: vectors.Points, cp: xr.Dataset | None) -> dict[str, Any]:
        """Label every point by layer, by its head's known type, and by its head's cluster."""
        causal = store.facts is None or bool(store.facts.causal)
        known = type_scores(store, causal=causal)
        twins = [type_scores(twin, causal=causal) for twin in store.twins]
        if twins:
            both = xr.concat(twins, "twin")
            known = known.merge(both.rename({n: f"{n}_twin" for n in both.data_vars}))
        kinds: dict[tuple[int, int], str] = {}
        found = typed_heads(known)
        # The most special type comes first: many heads rest on the first token.
        for kind in sorted(found, key=lambda k: (k == "sink", k == "previous token")):
            for cell in found[kind]:
                kinds[cell] = f"{kinds[cell]} and {kind}" if cell in kinds else kind
        cells = [(int(a), int(b)) for a, b in zip(points.layer, points.head, strict=True)]
        labels: dict[str, Any] = {
            "layer": points.layer.astype(np.int64),
            "type": np.array([kinds.get(cell, "none") for cell in cells]),
        }
        if cp is not None:
            label = cp["cluster"] if cp.attrs["n_clusters"] else cp["group"]
            labels["cluster"] = np.array(
                [int(label.sel(layer=a, head=b)) for a, b in cells], dtype=np.int64
            )
        return labels

    def _twin_purity(self, twin: Any) -> float:
        """Measure how often heads that are alike share a layer, in a model with random weights."""
        points = self._points(twin, None)
        return scores.purity(points.values, points.layer)

    # -- what is shown ------------------------------------------------------------------------

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """Judge whether heads of a layer lie together more than in the twins."""
        claim = "layers-lie-together"
        known = "layer" in result["label"].values
        value = result["purity"].sel(space="data", label="layer").item() if known else 0.0
        by_chance = result["purity_chance"].sel(label="layer").item() if known else 0.0
        what, k = result.attrs["what"], result.attrs["neighbors"]
        trust = ", ".join(
            f"{m} {result['trustworthiness'].sel(map=m).item():.2f}" for m in result["map"].values
        )
        evidence = {
            "purity": value,
            "neighbors": k,
            "trustworthiness": dict(
                zip(result["map"].values.tolist(), result["trustworthiness"].values, strict=True)
            ),
        }
        null: dict[str, Any] = {"chance": by_chance}
        text = (
            f"Of the {k} nearest {what}, {value:.0%} are of the same layer (by chance "
            f"{by_chance:.0%}"
        )
        holds = False
        if "purity_twin" in result and known:
            twins = result["purity_twin"]
            bounds = attnlens.nulls.twin_range(
                list(twins), floor=_PURITY_FLOOR, over=(), alpha=_ALPHA
            )
            holds = value > float(bounds["high"])
            null |= {"twins": twins.values.tolist(), "bound": float(bounds["high"])}
            text += f"; twins {twins.min().item():.0%} to {twins.max().item():.0%}"
        text = f"{text})" if known else f"All {what} are of one layer"
        yield attnlens.Finding(
            claim=claim,
            holds=holds,
            text=f"{text}. Trustworthiness of the maps: {trust}.",
            evidence=evidence,
            null=null,
        )

    @attnlens.figure("Maps of the points")
    def maps(self, result: xr.Dataset, figure: Any) -> str:
        """Draw PCA and the map side by side."""
        return drawing.panels(result, figure)

    @attnlens.figure("How far the maps may be believed")
    def trust(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the purity of neighbourhoods beside chance."""
        return drawing.trust(result, figure)

    @attnlens.table("Purity of neighbourhoods, and trustworthiness")
    def scores(self, result: xr.Dataset) -> pd.DataFrame:
        """List purity by label and trustworthiness, for the data and each map."""
        rows = []
        for space in result["space"].values:
            row: dict[str, Any] = {"space": str(space)}
            for label in result["label"].values:
                row[f"purity by {label}"] = result["purity"].sel(space=space, label=label).item()
            if space in result["map"].values:
                row["trustworthiness"] = result["trustworthiness"].sel(map=space).item()
            rows.append(row)
        chance = {
            f"purity by {label}": result["purity_chance"].sel(label=label).item()
            for label in result["label"].values
        }
        return pd.DataFrame([*rows, {"space": "by chance", **chance}]).round(4)

    @attnlens.table("Places of the points")
    def places(self, result: xr.Dataset) -> pd.DataFrame:
        """List every point with its labels and places."""
        frame = pd.DataFrame({"point": result["point"].values.astype(str)})
        for name in result.data_vars:
            if str(name).startswith("label_"):
                frame[str(name).removeprefix("label_")] = result[name].values
        for name in result["map"].values:
            for axis in range(2):
                frame[f"{name} {axis + 1}"] = result[str(name)].values[:, axis].round(4)
        return frame
