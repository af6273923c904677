"""Tables and coloured text of ``cp``, made from a result alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import xarray as xr

import attnlens
from attnlens_plugins.cp import claims
from attnlens_plugins.cp.drawing import one_part
from attnlens_plugins.cp.heads import TYPES
from attnlens_plugins.cp.words import top_tokens

#: Prompts and components whose text is coloured.
_PROMPTS, _COMPONENTS = 3, 8


def heads(result: xr.Dataset) -> pd.DataFrame:
    """List every head with its cluster, type, scores and rebuild error."""
    names = ["norm", "explained", "rebuild_error", "group", "silhouette", "cohesion"]
    names += [t for t in TYPES if t in result]
    frame = result[[*names, "cluster"]].to_dataframe()[[*names, "cluster"]].reset_index()
    kinds: dict[tuple[int, int], list[str]] = {}
    for kind, cells in claims.typed_heads(result).items():
        for cell in cells:
            kinds.setdefault(cell, []).append(kind)
    loadings = result["loadings"].transpose("layer", "head", "component").values
    strongest = result["component"].values[np.abs(loadings).argmax(-1)].ravel()
    cells = [(int(a), int(b)) for a, b in zip(frame["layer"], frame["head"], strict=True)]
    for name in ("group", "cluster"):
        frame[name] = [str(int(g) + 1) if g >= 0 else "" for g in frame[name]]
    frame.insert(2, "cluster", frame.pop("cluster"))
    frame.insert(3, "type", [", ".join(kinds.get(cell, [])) for cell in cells])
    frame.insert(4, "strongest component", strongest)
    return frame.rename(columns={t: t.replace("_", " ") for t in [*TYPES, "rebuild_error"]}).round(
        4
    )


def components(result: xr.Dataset) -> pd.DataFrame:
    """List every component with its weight, heads, tokens and vocabulary."""
    parts = (
        [result]
        if "part" not in result.dims
        else [result.isel(part=i) for i in range(result.sizes["part"])]
    )
    return pd.concat([_of_part(p) for p in parts], ignore_index=True)


def _of_part(result: xr.Dataset) -> pd.DataFrame:
    rows = []
    loadings = result["loadings"].transpose("layer", "head", "component")
    if "part" in result.coords:
        loadings = loadings.sel(layer=[int(result["part"])])
    tokens = None
    if "token_loadings" in result:
        tokens = top_tokens(
            result["token_loadings"].transpose("token", "component").values,
            [str(t) for t in result["token_text"].values],
            8,
        )
    for c in range(result.sizes["component"]):
        row: dict[str, object] = {}
        if "part" in result.coords:
            row["layer"] = int(result["part"])
        one = loadings.isel(component=c)
        order = np.argsort(-np.abs(one.values).ravel(), kind="stable")[:6]
        layers, heads = one["layer"].values, one["head"].values
        row |= {
            "component": int(result["component"][c]),
            "weight": round(float(result["weights"][c]), 4),
            "share of energy": round(float(result["share"][c]), 4),
            "heads": ", ".join(
                f"{layers[i // len(heads)]}.{heads[i % len(heads)]} ({one.values.ravel()[i]:+.2f})"
                for i in order
            ),
        }
        if tokens is not None:
            row["tokens"] = " ".join(attnlens.figures.visible_token(t) for t, _ in tokens[c])
        for name in result.data_vars:
            if str(name).startswith("words_"):
                mode = str(name).removeprefix("words_")
                for end, sign in (("top", "raises"), ("bottom", "lowers")):
                    chosen = result[name].isel(component=c).sel(end=end).values
                    row[f"{sign} ({mode})"] = " ".join(
                        attnlens.figures.visible_token(str(t)) for t in chosen
                    )
        rows.append(row)
    return pd.DataFrame(rows)


def highlights(result: xr.Dataset) -> Iterator[attnlens.Highlight]:
    """Colour the tokens of a few prompts by each component's loading."""
    result, _ = one_part(result)
    if "token_loadings" not in result:
        raise attnlens.Skip(f"{result.attrs['tensor']} has no tokens")
    loadings = result["token_loadings"].transpose("component", "token").values
    largest = np.abs(loadings).max(1, keepdims=True)
    scaled = loadings / np.where(largest > 0, largest, 1.0)
    prompts = result["token_prompt"].values
    for prompt in np.unique(prompts)[:_PROMPTS]:
        here = np.flatnonzero(prompts == prompt)
        words = [str(t) for t in result["token_text"].values[here]]
        for c in range(min(len(scaled), _COMPONENTS)):
            yield attnlens.Highlight(
                label=f"prompt {prompt}, component {int(result['component'][c])}",
                tokens=words,
                weights=[round(float(v), 4) for v in scaled[c, here]],
            )
