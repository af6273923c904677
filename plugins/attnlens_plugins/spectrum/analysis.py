"""The analysis: each head's spectrum and entropy, beside those of twins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from pydantic import Field

import attnlens
from attnlens_plugins.spectrum.measures import causal_uniform, energy, rank_at, summarize

#: Measures over [layer, head], with their unit and the spread below which nothing is claimed.
MEASURES: dict[str, tuple[str, float]] = {
    "entropy": ("Row entropy (nats)", 0.05),
    "entropy_share": ("Entropy, as a share of the possible", 0.02),
    "effective_rank": ("Effective rank (of sigma)", 1.0),
    "stable_rank": ("Stable rank (of sigma squared)", 0.1),
    "sink": ("Attention on the first token", 0.03),
}


class Spectrum(attnlens.Analysis):
    """Singular values, ranks, entropies and sinks of every head's attention pattern.

    Attention over n tokens is an n x n matrix with rows that sum to one. Its singular values tell
    how many independent mixtures of tokens the head writes; its row entropy, how many keys a query
    reads. Both are averaged over prompts and set beside the same numbers of twins (the same
    architecture with fresh random weights on the same tokens) and of attention that spreads evenly
    over the visible keys, which is causal-uniform attention. A low rank is no finding in itself:
    causal-uniform attention over 512 tokens already has nine tenths of its energy in a quarter of
    its singular values.

    "Effective rank" is exp of the entropy of the normalised singular values (Roy and Vetterli
    2007) and speaks of sigma; "stable rank" is the squared Frobenius norm over the squared largest
    singular value and speaks of sigma squared. "Sink" is the mean weight that queries other than
    the first give to the first token.
    """

    name = "spectrum"
    requires = ("pattern", "twin")

    class Options(attnlens.Options):
        """Options of ``spectrum``."""

        prompts: int = Field(
            8, ge=1, description="Compute spectra and entropies on at most so many prompts."
        )
        share: float = Field(
            0.9, gt=0, lt=1, description="Share of the energy for which components are counted."
        )

    def compute(self, store: Any) -> xr.Dataset:
        """Measure every head of the model and of its twins."""
        own = summarize(store, self.options.prompts)
        lengths = store.lengths.values
        n = int(np.median(lengths))
        result = xr.Dataset(attrs={"length": n, "share": self.options.share})
        result["singular_values"] = own["sigma"].mean("prompt")
        for power, name in ((1, "energy_sigma"), (2, "energy_sigma2")):
            curve = xr.apply_ufunc(
                lambda s, p=power: energy(np.nan_to_num(s), p),
                own["sigma"],
                input_core_dims=[["component"]],
                output_core_dims=[["component"]],
            )
            result[name] = curve.mean("prompt")
            result[f"rank_{name.removeprefix('energy_')}"] = xr.apply_ufunc(
                lambda s, p=power: rank_at(np.nan_to_num(s), self.options.share, p),
                own["sigma"],
                input_core_dims=[["component"]],
            ).mean("prompt")
        for name in MEASURES:
            result[name] = own[name].mean("prompt")
            result[f"{name}_std"] = own[name].std("prompt")
        twins = [summarize(twin, self.options.prompts) for twin in store.twins]
        if twins:
            dim = pd.Index(range(len(twins)), name="twin")
            for name in MEASURES:
                result[f"{name}_twin"] = xr.concat([t[name].mean("prompt") for t in twins], dim)
            curves = [
                energy(np.nan_to_num(t["sigma"].transpose("layer", ...).values), 1).mean((1, 2))
                for t in twins
            ]
            result["energy_sigma_twin"] = (("twin", "layer", "component"), np.stack(curves))
        reference = causal_uniform(n)
        for name in MEASURES:
            result[name].attrs["causal_uniform"] = reference[name]
        return result

    # -- figures ------------------------------------------------------------------------------

    def _grid(self, result: xr.Dataset, figure: Any, name: str, title: str) -> str:
        label, _ = MEASURES[name]
        twin = result.get(f"{name}_twin")
        attnlens.figures.head_grid(figure, result[name], title=title, label=label, null=twin)
        low, high = result[name].min().item(), result[name].max().item()
        return f"{title}: a grid of layers by heads; values from {low:.3g} to {high:.3g}."

    def _depth(self, result: xr.Dataset, figure: Any, name: str, title: str) -> str:
        label, _ = MEASURES[name]
        attnlens.figures.depth_plot(
            figure,
            result[name],
            title=title,
            label=label,
            null=result.get(f"{name}_twin"),
            lines={"causal-uniform": result[name].attrs["causal_uniform"]},
        )
        medians = ", ".join(f"{v:.3g}" for v in result[name].median("head").values)
        return f"{title}: medians by layer are {medians}."

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
        ranks = result["effective_rank"]
        lowest = np.unravel_index(np.nanargmin(ranks.values), ranks.shape)
        highest = np.unravel_index(np.nanargmax(ranks.values), ranks.shape)
        layers, heads = ranks["layer"].values, ranks["head"].values
        named = {
            f"{layers[i]}.{heads[j]}": (int(layers[i]), int(heads[j])) for i, j in (lowest, highest)
        }
        twin = result.get("energy_sigma_twin")
        attnlens.figures.curves(
            figure,
            result["energy_sigma"],
            title="Share of the nuclear norm in the first singular values",
            label="Cumulative share of sigma",
            xlabel="Number of singular values",
            highlight=named,
            lines={"causal-uniform": _uniform_energy(result.sizes["component"])},
            null=None if twin is None else twin.values.reshape(-1, twin.sizes["component"]),
            xlog=True,
            ylim=(0, 1.02),
        )
        return (
            "Cumulative share of the singular values' sum for every head; the flattest spectrum is "
            f"head {list(named)[-1]}, the steepest head {next(iter(named))}."
        )

    # -- tables and findings --------------------------------------------------------------------

    @attnlens.table("Every head in numbers")
    def heads(self, result: xr.Dataset) -> pd.DataFrame:
        """List the measures of every head."""
        names = [*MEASURES, "rank_sigma", "rank_sigma2"]
        frame = result[names].to_dataframe().reset_index()
        share = f"{result.attrs['share']:.0%}"
        return (
            frame[["layer", "head", *names]]
            .rename(
                columns={
                    "rank_sigma": f"components for {share} of sigma",
                    "rank_sigma2": f"components for {share} of sigma^2",
                }
            )
            .round(4)
        )

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """Name the heads that lie outside what chance would have, for each measure."""
        for claim, name, side, minimum, phrase in _CLAIMS:
            yield _judge(result, claim, name, side, minimum, phrase)


#: claim, measure, side of the twins' bounds, absolute minimum or None, what is said of the heads
_CLAIMS = (
    ("sink-heads", "sink", "above", 0.3, "put {0:.0%} to {1:.0%} of their attention on the first "
     "token"),
    ("focused-heads", "entropy_share", "below", None, "are far more focused than chance: {0:.0%} "
     "to {1:.0%} of the possible entropy"),
    ("low-rank-heads", "effective_rank", "below", None, "have a low effective rank (of sigma): "
     "{0:.1f} to {1:.1f}"),
    ("high-rank-heads", "effective_rank", "above", None, "have a high effective rank (of sigma): "
     "{0:.1f} to {1:.1f}"),
)  # fmt: skip


def _judge(
    result: xr.Dataset, claim: str, name: str, side: str, minimum: float | None, phrase: str
) -> attnlens.Finding:
    label, floor = MEASURES[name]
    values = result[name].transpose("layer", "head")
    if f"{name}_twin" not in result:
        return attnlens.Finding(
            claim=claim, holds=False, text=f"{label} was not judged: there are no twins."
        )
    twins = result[f"{name}_twin"]
    bounds = attnlens.nulls.twin_range(list(twins), floor=floor)
    judge = attnlens.nulls.above if side == "above" else attnlens.nulls.below
    beyond = judge(values, bounds)
    if minimum is not None:
        beyond = beyond & (values > minimum)
    heads = _names(beyond)
    null = {
        "twins": twins.sizes["twin"],
        "lowest": twins.min().item(),
        "highest": twins.max().item(),
        "causal_uniform": values.attrs["causal_uniform"],
    }
    total = values.size
    if not heads:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"{label}: none of {total} heads lies clearly {side} the twins.",
            evidence={"heads": [], "lowest": values.min().item(), "highest": values.max().item()},
            null=null,
        )
    found = values.where(beyond)
    span = phrase.format(found.min().item(), found.max().item())
    between = f"twins: {null['lowest']:.3g} to {null['highest']:.3g}"
    return attnlens.Finding(
        claim=claim,
        holds=True,
        text=f"{len(heads)} of {total} heads {span} ({between}): {_some(heads)}.",
        evidence={
            "heads": heads,
            "values": dict(zip(heads, values.values[beyond.values].round(4), strict=True)),
        },
        null=null,
    )


def _names(chosen: xr.DataArray) -> list[str]:
    """Return the chosen heads as ``layer.head``."""
    layers, heads = chosen["layer"].values, chosen["head"].values
    return [f"{layers[i]}.{heads[j]}" for i, j in np.argwhere(chosen.values)]


def _some(heads: list[str], most: int = 12) -> str:
    shown = ", ".join(heads[:most])
    return shown if len(heads) <= most else f"{shown} and {len(heads) - most} more"


def _uniform_energy(n: int) -> Any:
    matrix = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    return energy(np.linalg.svd(matrix, compute_uv=False), 1)
