"""Pairs of texts with one meaning, read by one model or by two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.equivariance.representations import INVARIANTS, with_null

#: Fewer items than this say nothing: the debiased CKA needs four.
_FEWEST = 4


def read_pairs(path: Path, *, single: bool) -> list[tuple[str, str]]:
    """Read one pair a line, the two texts separated by a tab; empty lines are skipped.

    Parameters
    ----------
    path : pathlib.Path
        In UTF-8.
    single : bool
        Whether a line may hold one text, which is then read by two models.

    Raises
    ------
    UsageError
        If the file cannot be read, a line is no pair, or there are fewer than four.
    """
    hint = "equivariance.pairs is a UTF-8 text file: one pair a line, separated by a tab."
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise attnlens.errors.UsageError(
            f"The pairs in {path} cannot be read: byte {error.start} is not UTF-8.", hint=hint
        ) from error
    except OSError as error:
        raise attnlens.errors.UsageError(
            f"The pairs in {path} cannot be read: {error.strerror}.", hint=hint
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split("\t")]
        if single and len(parts) == 1:
            parts = parts * 2
        if len(parts) != 2 or not all(parts):
            texts = sum(map(bool, parts))
            raise attnlens.errors.UsageError(
                f"Line {number} of {path} holds {texts} text{'' if texts == 1 else 's'}, not a "
                f"pair: {line[:60]!r}.",
                hint="Separate the two texts by one tab; one text alone needs equivariance.other.",
            )
        found.append((parts[0], parts[1]))
    if len(found) < _FEWEST:
        raise attnlens.errors.UsageError(
            f"{path} holds {len(found)} pair{'' if len(found) == 1 else 's'}; at least {_FEWEST} "
            "are needed.",
            hint="The similarities compare how pairs differ from each other: some dozens are good.",
        )
    return found


def represent(model: Any, texts: list[str], pool: str) -> Any:
    """Return every text's representation at the input of each layer.

    Parameters
    ----------
    model : Model
    texts : list of str
    pool : {"mean", "last"}
        Mean over a text's tokens, or its last token.

    Returns
    -------
    float64[layer, item, d_model]

    Raises
    ------
    NeedError
        If the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise attnlens.errors.NeedError(
            f"{model.facts.name!r} has no tokenizer, and pairs are texts.",
            hint="Use a model with a tokenizer, or leave out equivariance.pairs.",
        )
    found = np.zeros((model.facts.n_layers, len(texts), model.facts.d_model))
    at = {"item": 0}

    def keep(name: str, layer: int, value: Any) -> None:
        rows = value[0].double()
        pooled = rows.mean(0) if pool == "mean" else rows[-1]
        found[layer, at["item"]] = pooled.cpu().numpy()

    longest = model.facts.n_ctx
    with model.record(["resid_pre"], keep):
        # One at a time: no padding enters the model.
        for item, text in enumerate(texts):
            at["item"] = item
            ids = model.tokenizer(text)["input_ids"][:longest]
            if not ids:
                raise attnlens.errors.UsageError(f"The text {text!r} has no tokens.")
            model.forward(np.array([ids]))
    return found


def compare(left: Any, right: Any, *, shuffles: int, seed: int) -> xr.Dataset:
    """Compare two sides layer by layer, at equal relative depth.

    Parameters
    ----------
    left : float64[layer, item, d_model]
    right : float64[layer, item, d_model]
        Of another number of layers, perhaps.
    shuffles : int
        Random pairings for the null.
    seed : int

    Returns
    -------
    xarray.Dataset
        ``pairs_value``, ``pairs_null_mean``, ``pairs_null_high``, ``pairs_p``, ``pairs_p_any``
        over [layer, invariant]; ``pairs_other_layer`` over [layer]. The last p-value is of the
        largest of all layers under each pairing, and so is right for all layers at once.

    References
    ----------
    Westfall and Young, *Resampling-Based Multiple Testing* (1993): the maximum over all tests.
    """
    n = len(left)
    depth = [round(i * (len(right) - 1) / max(n - 1, 1)) for i in range(n)]
    rows = [with_null(left[i], right[j], shuffles=shuffles, seed=seed) for i, j in enumerate(depth)]
    names = list(INVARIANTS)
    result = xr.Dataset(coords={"invariant": names})
    for key in ("value", "null_mean", "null_high", "p"):
        values = np.array([[row[name][key] for name in names] for row in rows])
        result[f"pairs_{key}"] = (("layer", "invariant"), values)
    # Every layer saw the same pairings.
    p_any = np.ones((n, len(names)))
    for column, name in enumerate(names):
        top = np.max([np.nan_to_num(row[name]["null"], nan=-np.inf) for row in rows], axis=0)
        for i, row in enumerate(rows):
            if np.isfinite(row[name]["value"]):
                p_any[i, column] = (1 + (top >= row[name]["value"]).sum()) / (1 + shuffles)
    result["pairs_p_any"] = (("layer", "invariant"), p_any)
    result["pairs_other_layer"] = ("layer", np.array(depth))
    result.attrs["pairs"] = int(left.shape[1])
    return result
