"""Figures of ``tucker``, drawn from a result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.cp.drawing import MODES, seen_heads, seen_words, word_bars

_NAMES = {
    "head": "Heads",
    "token": "Tokens",
    "query_pos": "Query positions",
    "key_pos": "Key positions",
    "d_head": "Features",
}
#: Slices of the core that are drawn.
_SLICES = 6


def ranks(result: xr.Dataset, figure: Any) -> str:
    """Draw the cumulative energy of each mode beside the twins'."""
    modes = result.attrs["modes"]
    figure.set_size_inches(3.5 * len(modes), 3.7)
    told = []
    for ax, name in zip(np.atleast_1d(figure.subplots(1, len(modes))), modes, strict=True):
        shares = np.cumsum(result[f"energy_{name}"].values)
        count = int(result[f"rank_{name}"])
        end = min(len(shares), max(4 * count, 8))
        null = None
        lines: dict[str, Any] = {f"{result.attrs['energy']:.0%}": result.attrs["energy"]}
        if f"energy_{name}_twin" in result:
            values = np.cumsum(result[f"energy_{name}_twin"].values, axis=-1)
            null = values[..., :end]
            lines["twins"] = null.mean(0)
        attnlens.figures.curves(
            ax,
            shares[None, :end],
            label="Cumulative share of sigma squared" if name == modes[0] else "",
            xlabel=f"Directions ({count} for {result.attrs['energy']:.0%})",
            title=_NAMES.get(name, MODES.get(name, name)).capitalize(),
            lines=lines,
            null=null,
            ylim=(0, 1.03),
            highlight={"model": 0},
        )
        seen = f"{name}: {count} of {len(shares)}"
        if f"rank_{name}_twin" in result:
            of_twins = result[f"rank_{name}_twin"].values.astype(int)
            seen += f" (twins {', '.join(map(str, of_twins))})"
        told.append(seen)
    with attnlens.figures.style():
        figure.suptitle("How many directions hold the energy of each mode", x=0.012, ha="left")
    return f"Directions that hold {result.attrs['energy']:.0%} of the energy: {'; '.join(told)}."


def core(result: xr.Dataset, figure: Any) -> str:
    """Draw the core's slices along the heads."""
    values = np.asarray(result["core"].values)
    total = float((values**2).sum()) or 1.0
    order = np.argsort(-(values**2).sum((1, 2)), kind="stable")[:_SLICES]
    top = float(np.abs(values).max()) or 1.0
    columns = min(len(order), 3)
    rows = -(-len(order) // columns)
    second, third = result.attrs["modes"][1:]
    figure.set_size_inches(columns * 2.7 + 0.9, rows * 2.5 + 0.7)
    seen = []
    with attnlens.figures.style():
        axes = np.ravel(figure.subplots(rows, columns, squeeze=False))
        image = None
        for ax, k in zip(axes, order, strict=False):
            part = values[k][:24, :24]
            image = ax.imshow(
                part, cmap=attnlens.figures.DIVERGING, vmin=-top, vmax=top, aspect="auto"
            )
            share = float((values[k] ** 2).sum()) / total * float(result.attrs["explained"])
            ax.set_title(f"Head direction {k + 1}: {share:.1%} of energy")
            i, j = np.unravel_index(int(np.abs(values[k]).argmax()), values[k].shape)
            seen.append(
                f"head direction {k + 1} has {share:.1%} of the energy, and its largest entry "
                f"({values[k][i, j]:+.2g}) with {second} direction {i + 1} and {third} "
                f"direction {j + 1}"
            )
            for axis, size in (("x", part.shape[1]), ("y", part.shape[0])):
                step = max(size // 8, 1)
                getattr(ax, f"set_{axis}ticks")(
                    range(0, size, step), [str(i + 1) for i in range(0, size, step)]
                )
        for ax in axes[len(order) :]:
            ax.set_visible(False)
        figure.supxlabel(f"Direction of {third}", fontsize=9)
        figure.supylabel(f"Direction of {second}", fontsize=9)
        if image is not None:
            figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.02, label="Core entry")
        figure.suptitle("Which directions act together: slices of the core", x=0.012, ha="left")
    return f"Slices of the core, the strongest first: {'; '.join(seen)}."


def strongest(result: xr.Dataset, figure: Any) -> str:
    """Draw the energy of the strongest interactions."""
    count = min(result.sizes["interaction"], 12)
    names = [
        " × ".join(f"{_short(m)} {int(result[f'{m}_of'][i])}" for m in result.attrs["modes"])
        for i in range(count)
    ]
    shares = result["share"].values[:count]
    bars = list(zip(names, (100 * shares).tolist(), strict=True))
    if "strongest_twin" in result:
        twins = 100 * np.atleast_1d(result["strongest_twin"].values)
        bars += [(f"twin {i}: strongest", float(v)) for i, v in enumerate(twins, start=1)]
    attnlens.figures.bars(
        figure,
        {"": bars},
        title="The strongest interactions of the core",
        label="Share of the energy (%)",
        most=len(bars),
        tokens=False,
    )
    return "Shares of the strongest interactions. " + " ".join(result["sentence"].values[:3])


def _short(mode: str) -> str:
    return {"d_model": "feature", "query_pos": "query", "key_pos": "key"}.get(mode, mode)


def heads(result: xr.Dataset, figure: Any) -> str:
    """Draw the loadings of heads on the directions of their mode."""
    attnlens.figures.loading_matrix(
        figure,
        result["factor_head"].rename(head_component="component"),
        title="Which heads make up each head direction",
        label="Loading of the head",
    )
    return f"Loadings of the heads. {seen_heads(result['factor_head'], 'Head direction')}"


def words(result: xr.Dataset, figure: Any) -> str:
    """Draw the top and bottom tokens of the feature directions."""
    modes = [m for m in MODES if f"words_{m}" in result]
    if not modes:
        raise attnlens.Skip("there is no unembedding, no vocabulary or no feature mode")
    mode = "d_model" if "d_model" in modes else modes[-1]
    word_bars(
        figure,
        result[f"words_{mode}"].values,
        result[f"logits_{mode}"].values,
        [f"Direction {i}" for i in result[f"{mode}_component"].values],
        f"Vocabulary of the feature directions: {MODES[mode]}",
    )
    return f"Vocabulary of the feature directions, {MODES[mode]}: " + seen_words(
        result[f"words_{mode}"].values, result[f"logits_{mode}"].values, "direction"
    )
