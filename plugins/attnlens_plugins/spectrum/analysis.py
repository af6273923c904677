"""The analysis: each head's spectrum and entropy, beside those of twins."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr
from pydantic import Field

import attnlens
from attnlens_plugins import words
from attnlens_plugins.spectrum import gather
from attnlens_plugins.spectrum.claims import MEASURES, UNMEASURED, WEIGHTS, judge_all
from attnlens_plugins.spectrum.measures import causal_uniform, grid

_CURVES = ("energy_sigma", "energy_sigma2")
_PER_LAYER = ("mean_residual", "rank_one_residual")
_NO_LENGTHS = "every prompt has a single token, whose attention is all its own"


class Spectrum(attnlens.Analysis):
    """Singular values, ranks, entropies and sinks of every head's attention.

    Attention over n tokens is an n x n matrix with rows that sum to one. Its singular values tell
    how many independent mixtures of tokens the head writes; its row entropy, how many keys a query
    reads. All is averaged over prompts (the spread over prompts is in the result) and set beside
    the same numbers of twins (the same architecture with fresh random weights on the same tokens)
    and of attention that spreads evenly over the visible keys, which is causal-uniform attention.
    A low rank is no finding in itself: causal-uniform attention over 512 tokens already has nine
    tenths of its sigma in a quarter of its singular values.

    What is measured of each head: Shannon and Renyi-2 entropy of the rows; effective rank (exp of
    the entropy of the normalised singular values, Roy and Vetterli 2007: it speaks of sigma);
    stable rank (squared Frobenius norm over the squared largest singular value: it speaks of sigma
    squared); spectral gap; energy in the first k singular values; the exponent of a power-law tail
    of the eigenvalues of A^T A with the Kolmogorov-Smirnov distance of the fit (Clauset et al.
    2009); the weight on the first token (sink) and that column's share in the spectrum; the
    effective rank of the scores before mask and softmax, which have at most d_head dimensions. Of
    each layer: how far the tokens' vectors are from rank one (Dong et al. 2021). Of the weights:
    the same ranks of W_Q W_K^T and W_V W_O, which no change of a head's basis changes.

    Beyond 512 tokens nothing n x n is decomposed: leading singular values come from a block Krylov
    method, sums over the whole spectrum from stochastic Lanczos quadrature, with their error bars.
    """

    name = "spectrum"
    permutes_heads = True

    class Options(attnlens.Options):
        """Options of ``spectrum``."""

        of: Literal["all", "activations", "weights"] = Field(
            "all",
            description="What to look at. With `weights` no prompts matter.",
        )
        prompts: int = Field(
            8, ge=1, description="Measure spectra and entropies on at most so many prompts."
        )

    @property
    def requires(self) -> tuple[str, ...]:  # type: ignore[override]
        """What it reads, by its option `of`."""
        activations = ("pattern", "q_rot?", "k_rot?", "resid_pre?")
        of = self.options.of
        return (
            *(activations if of != "weights" else ()),
            *(("weights?",) if of == "all" else ("weights",) if of == "weights" else ()),
            "twin",
        )

    def compute(self, store: Any) -> xr.Dataset:
        """Measure every head of the model and of its twins."""
        of = self.options.of
        parts = []
        if of != "weights":
            parts.append(self._activations(store))
        if of == "weights" or (of == "all" and store.has_weights):
            parts.append(self._with_twins(store, gather.weights, WEIGHTS))
        elif UNMEASURED in parts[0].attrs:
            raise attnlens.Skip(_NO_LENGTHS)
        return xr.merge(parts, join="outer", compat="override", combine_attrs="override")

    def _activations(self, store: Any) -> xr.Dataset:
        lengths = store.lengths.values
        alone = int((lengths < 2).sum())
        if alone == len(lengths):
            return xr.Dataset(attrs={UNMEASURED: _NO_LENGTHS})
        if alone:
            warnings.warn(
                f"Prompts of a single token were left out: {alone} of {len(lengths)}.",
                stacklevel=2,
            )
        own = gather.activations(store, self.options.prompts)
        twins = [gather.activations(twin, self.options.prompts) for twin in store.twins]
        n = int(np.median(lengths[lengths > 1]))
        reference = causal_uniform(n)
        result = xr.Dataset(attrs={"length": n})
        result["singular_values"] = own["sigma"].mean("prompt")
        for name in (*_CURVES, "tail", "tail_distance", "effective_rank_error"):
            average = own[name].mean("prompt")
            if bool(np.isfinite(average).any()):
                result[name] = average
        measured = [n for n in (*MEASURES, *_PER_LAYER) if n in own]
        for name in measured:
            result[name] = own[name].mean("prompt")
            result[f"{name}_std"] = own[name].std("prompt")
            if name in reference:
                result[name].attrs["causal_uniform"] = reference[name]
        if twins:
            dim = pd.Index(range(len(twins)), name="twin")
            for name in measured:
                result[f"{name}_twin"] = xr.concat([t[name].mean("prompt") for t in twins], dim)
            curves = [t["energy_sigma"].mean(["prompt", "head"]) for t in twins]
            result["energy_sigma_twin"] = xr.concat(curves, dim)
        ks = grid(min(n, 1024))
        result["uniform_energy"] = (("uniform_k",), reference["curve"][np.array(ks) - 1])
        return result.assign_coords(uniform_k=[k * n // min(n, 1024) for k in ks])

    def _with_twins(
        self, store: Any, measure: Callable[[Any], xr.Dataset], names: dict[str, Any]
    ) -> xr.Dataset:
        result = measure(store)
        twins = [measure(twin) for twin in store.twins]
        if twins:
            dim = pd.Index(range(len(twins)), name="twin")
            for name in names:
                result[f"{name}_twin"] = xr.concat([t[name] for t in twins], dim)
        return result

    # -- figures --------------------------------------------------------------------------------

    def _grid(self, result: xr.Dataset, figure: Any, name: str, title: str) -> str:
        label, _ = (MEASURES | WEIGHTS)[name]
        self._have(result, name)
        attnlens.figures.head_grid(
            figure, result[name], title=title, label=label, null=result.get(f"{name}_twin")
        )
        seen = attnlens.figures.extremes(result[name])
        text = f"{title}, a grid of layers by heads: {seen}."
        twins = result.get(f"{name}_twin")
        if twins is not None:
            chance = words.span(twins.min().item(), twins.max().item(), "{:.3g}")
            text += f" Twins: {chance}."
        return text

    def _depth(self, result: xr.Dataset, figure: Any, name: str, title: str) -> str:
        label, _ = MEASURES[name]
        self._have(result, name)
        attnlens.figures.depth_plot(
            figure,
            result[name],
            title=title,
            label=label,
            null=result.get(f"{name}_twin"),
            lines={"causal-uniform": result[name].attrs["causal_uniform"]},
        )
        medians = ", ".join(f"{v:.3g}" for v in result[name].median("head").values)
        seen = attnlens.figures.extremes(result[name])
        uniform = result[name].attrs["causal_uniform"]
        return (
            f"{title}, a dot for each head: {seen}; medians by layer are {medians}; "
            f"causal-uniform attention has {uniform:.3g}."
        )

    @staticmethod
    def _have(result: xr.Dataset, name: str) -> None:
        if name not in result:
            unasked = "it was not asked for (option `of`)"
            raise attnlens.Skip(result.attrs.get(UNMEASURED, unasked))

    @attnlens.figure("Effective rank of each head's attention")
    def effective_rank_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the effective rank on the head grid."""
        return self._grid(result, figure, "effective_rank", "Effective rank of each head")

    @attnlens.figure("Effective rank with depth")
    def effective_rank_depth(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the effective rank against depth."""
        return self._depth(result, figure, "effective_rank", "Effective rank with depth")

    @attnlens.figure("Attention entropy of each head, as a share of the possible")
    def entropy_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the entropy's share on the head grid."""
        return self._grid(result, figure, "entropy_share", "Entropy as a share of the possible")

    @attnlens.figure("Attention entropy with depth")
    def entropy_depth(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the entropy against depth."""
        return self._depth(result, figure, "entropy", "Row entropy with depth")

    @attnlens.figure("Attention on the first token: sinks")
    def sink_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the sink mass on the head grid."""
        return self._grid(result, figure, "sink", "Attention on the first token")

    @attnlens.figure("How fast the singular values' energy is used up")
    def energy_curves(self, result: xr.Dataset, figure: Any) -> str:
        """Draw each head's cumulative energy."""
        self._have(result, "energy_sigma")
        ranks = result["effective_rank"].transpose("layer", "head")
        layers, heads = ranks["layer"].values, ranks["head"].values
        named = {}
        for place in (np.nanargmin(ranks.values), np.nanargmax(ranks.values)):
            i, j = np.unravel_index(place, ranks.shape)
            named[f"{layers[i]}.{heads[j]}"] = (int(layers[i]), int(heads[j]))
        ks = result["k"].values
        twin = result.get("energy_sigma_twin")
        uniform = np.interp(ks, result["uniform_k"].values, result["uniform_energy"].values)
        attnlens.figures.curves(
            figure,
            result["energy_sigma"].transpose("layer", "head", "k"),
            x=ks,
            title="Share of the nuclear norm in the first singular values",
            label="Cumulative share of sigma",
            xlabel="Number of singular values",
            highlight=named,
            lines={"causal-uniform": uniform},
            null=None if twin is None else twin.transpose(..., "k").values.reshape(-1, len(ks)),
            xlog=True,
            ylim=(0, 1.02),
        )
        half = result["energy_sigma"].transpose("layer", "head", "k")[..., len(ks) // 2]
        return (
            "Cumulative share of the singular values' sum for every head; the steepest is head "
            f"{next(iter(named))}, the flattest head {list(named)[-1]}. In the first "
            f"{ks[len(ks) // 2]} of {ks[-1]} singular values: "
            f"{attnlens.figures.extremes(half, '{:.0%}')}; causal-uniform "
            f"{uniform[len(ks) // 2]:.0%}."
        )

    @attnlens.figure("How many dimensions the scores use")
    def score_rank_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the scores' effective rank on the head grid."""
        return self._grid(result, figure, "score_rank", "Effective rank of the scores")

    @attnlens.figure("How far the tokens' vectors are from rank one, with depth")
    def collapse_depth(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the residual to the nearest rank-one matrix by layer."""
        self._have(result, "rank_one_residual")
        residual = result["rank_one_residual"]
        twin = result.get("rank_one_residual_twin")
        attnlens.figures.curves(
            figure,
            residual.values[None],
            x=residual["layer"].values,
            title="Distance of the residual stream from rank one",
            label="Share of the norm outside rank one",
            xlabel="Layer",
            highlight={"this model": 0},
            null=None if twin is None else twin.transpose("twin", "layer").values,
            ylim=(0, 1.02),
        )
        shown = ", ".join(f"{v:.2f}" for v in residual.values)
        text = f"Distance of the tokens' vectors from rank one, layer by layer: {shown}."
        if twin is not None:
            text += f" Twins: {twin.min().item():.2f} to {twin.max().item():.2f}."
        return text

    @attnlens.figure("Effective rank of the weights W_Q W_K^T")
    def qk_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the effective rank of W_Q W_K^T on the head grid."""
        return self._grid(result, figure, "qk_effective_rank", "Effective rank of W_Q W_K^T")

    @attnlens.figure("Effective rank of the weights W_V W_O")
    def ov_grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the effective rank of W_V W_O on the head grid."""
        return self._grid(result, figure, "ov_effective_rank", "Effective rank of W_V W_O")

    # -- tables and findings ----------------------------------------------------------------------

    @attnlens.table("Every head in numbers")
    def heads(self, result: xr.Dataset) -> pd.DataFrame:
        """List the measures of every head."""
        names = [n for n in (*MEASURES, "tail", "tail_distance", *WEIGHTS) if n in result]
        frame = result[names].to_dataframe().reset_index()
        return frame[["layer", "head", *names]].round(4)

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """Name the heads that lie outside what chance would have, for each measure."""
        yield from judge_all(result)
