"""The labelled dataset of ``tucker``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from attnlens_plugins.cp.options import CPOptions
from attnlens_plugins.cp.results import READ_MODES, name_mode
from attnlens_plugins.cp.sample import Sample
from attnlens_plugins.tucker import telling
from attnlens_plugins.tucker.options import TuckerOptions
from attnlens_plugins.tucker.tensor import Whole, as_cp

#: What is done with the directions of a mode, where it is not plain that heads write them.
_ROLES = {
    "query_d_model": "from queries with ",
    "key_d_model": "keys with ",
    "d_model_in": "on reading ",
    "d_model_2": "with ",
}
_ALONG = "a direction along {} and against {}"
_RAISES = "a direction that raises {} and lowers {}"


def label(
    store: Any, options: TuckerOptions, whole: Whole, sample: Sample | None, fit: Any
) -> xr.Dataset:
    """Label core, factors and interactions of a fit."""
    names = [f"{d}_component" for d in whole.dims]
    coords: dict[str, Any] = {
        n: np.arange(1, s + 1) for n, s in zip(names, fit.core.shape, strict=True)
    }
    layers, heads = np.unique(whole.layer), np.unique(whole.head)
    factors = [
        np.eye(n) if f is None else np.asarray(f)
        for f, n in zip(fit.factors, whole.values.shape, strict=True)
    ]
    data: dict[str, Any] = {
        "core": (names, fit.core),
        "factor_head": (
            ("layer", "head", names[0]),
            factors[0].reshape(len(layers), len(heads), -1),
        ),
    }
    coords |= {"layer": layers, "head": heads}
    told = [
        telling.describe_heads(
            factors[0], [f"{a}.{b}" for a, b in zip(whole.layer, whole.head, strict=True)]
        )
    ]
    words = as_cp(options)
    for mode, name in enumerate(whole.dims[1:], start=1):
        data[f"factor_{name}"] = ((name, names[mode]), factors[mode])
        one = _describe(store, words, sample, name, factors[mode], names[mode], data, coords)
        told.append([f"in {t}" for t in one] if mode == 1 and name == "d_model" else one)
    strongest = fit.interactions(options.interactions)
    keys = list(strongest[0].index)
    data["share"] = ("interaction", np.array([i.share for i in strongest]))
    data["value"] = ("interaction", np.array([i.value for i in strongest]))
    sentences = []
    for mode, key in enumerate(keys):
        data[f"{whole.dims[mode]}_of"] = (
            "interaction",
            np.array([i.index[key] + 1 for i in strongest]),
        )
    for one in strongest:
        parts = [told[mode][one.index[key]] for mode, key in enumerate(keys)]
        sentences.append(telling.sentence(parts, one.share, one.value))
    data["sentence"] = ("interaction", np.array(sentences, dtype=str))
    coords["interaction"] = np.arange(1, len(strongest) + 1)
    return xr.Dataset(data, coords=coords)


def _describe(
    store: Any,
    options: CPOptions,
    sample: Sample | None,
    name: str,
    factor: Any,
    component: str,
    data: dict[str, Any],
    coords: dict[str, Any],
) -> list[str]:
    """Tell each direction of a mode, and keep what the figures need."""
    if name == "token":
        assert sample is not None
        coords["token_prompt"] = ("token", sample.prompt)
        coords["token_pos"] = ("token", sample.position)
        coords["token_text"] = ("token", np.array(sample.text, dtype=str))
        return [f"on {t}" for t in telling.describe_tokens(factor, sample.text)]
    if name in ("query_pos", "key_pos"):
        positions = np.arange(len(factor)) + (1 if options.exclude_bos else 0)
        coords[name] = positions
        what = "from queries" if name == "query_pos" else "keys"
        return telling.describe_positions(factor, positions, what)
    named = name_mode(store, options, name, factor)
    role = _ROLES.get(name, "")
    if named is None:
        return [f"{role}direction {i + 1} of {name}" for i in range(factor.shape[1])]
    data[f"words_{name}"] = ((component, "end", "place"), named["token"].values)
    data[f"logits_{name}"] = ((component, "end", "place"), named["logit"].values)
    coords["end"] = ["top", "bottom"]
    phrase = _ALONG if name in READ_MODES else _RAISES
    return telling.describe_directions(named["token"].values, role + phrase)


def interactions(result: xr.Dataset) -> pd.DataFrame:
    """List the strongest interactions in words."""
    modes = result.attrs["modes"]
    return pd.DataFrame(
        {
            "interaction": result["interaction"].values,
            **{f"{m} direction": result[f"{m}_of"].values for m in modes},
            "core entry": result["value"].values.round(4),
            "share of energy": result["share"].values.round(4),
            "in words": result["sentence"].values,
        }
    )
