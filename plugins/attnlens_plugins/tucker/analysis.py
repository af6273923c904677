"""The analysis: multilinear ranks, and the interactions of a small core."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import attnlens
from attnlens_plugins.cp import building
from attnlens_plugins.cp.heads import rank_at
from attnlens_plugins.tucker import drawing, judging, results, tensor
from attnlens_plugins.tucker.options import MOST, TuckerOptions


class Tucker(attnlens.Analysis):
    """Directions among heads, tokens and features, and how they mix: Tucker decomposition.

    Every mode of the tensor [head, token, d_model] of what heads write gets directions of its own,
    ordered by energy (sigma squared), and a small core tells which of them act together and how
    strongly. The multilinear ranks, how many directions of each mode hold a share of the energy,
    are set beside those of twins: few directions among the heads mean that heads repeat each
    other. The core is in HOSVD normal form: its slices along a mode are orthogonal and fall in
    energy. Every head counts the same unless ``scale`` says otherwise.
    """

    name = "tucker"
    Options = TuckerOptions

    @property
    def requires(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the chosen tensor is made of, and the same of twins."""
        own = building.REQUIRED[self.options.tensor]
        return (*own, *(() if "weights" in own else ("weights?",)), "twin")

    def memory(self, facts: Any, tokens: int) -> int:
        """Estimate the bytes held: the tensor in float32, and up to two copies of it."""
        d = facts.d_head if self.options.tensor == "z" else facts.d_model
        width = int(facts.n_layers * facts.n_heads * d)
        count = tensor.fitting(min(int(self.options.max_tokens), tokens), width)
        return 12 * count * width

    def compute(self, store: Any) -> xr.Dataset:
        """Decompose the model's tensor; measure the energy of its modes and of its twins'."""
        options: TuckerOptions = self.options
        seed = int(store.manifest.seed)
        sample = tensor.sample_of(store, options, seed)
        whole = tensor.build(store, options, sample, seed)
        spectra = [whole.spectrum(k) for k in range(3)]
        counts = [rank_at(s, options.energy) for s in spectra]
        wanted = options.wanted()
        if wanted is None:
            wanted = [max(min(n, MOST), 1) for n in counts]
        fit = attnlens.decomposition.tucker(whole.values, wanted, dims=whole.dims)
        result = results.label(store, options, whole, sample, fit)
        for name, shares, count in zip(whole.dims, spectra, counts, strict=True):
            result[f"energy_{name}"] = (f"{name}_direction", shares)
            result[f"rank_{name}"] = count
        twins = []
        for twin in store.twins:
            like = tensor.build(twin, options, sample, seed)
            found = xr.Dataset()
            for k, name in enumerate(whole.dims):
                shares = like.spectrum(k)
                found[f"energy_{name}_twin"] = (f"{name}_direction", shares)
                found[f"rank_{name}_twin"] = rank_at(shares, options.energy)
            # The largest entry of the core, at the model's sizes.
            other = attnlens.decomposition.tucker(like.values, list(fit.core.shape))
            found["strongest_twin"] = other.interactions(1)[0].share
            found["explained_twin"] = other.explained
            twins.append(found)
        if twins:
            result = result.merge(xr.concat(twins, "twin"))
        notes = [*building.warnings_for(tensor.as_cp(options)), *fit.notes]
        notes += sample.remark(self.name) if sample is not None else []
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return result.assign_attrs(
            tensor=options.tensor,
            modes=list(whole.dims),
            sizes=list(whole.values.shape),
            core_sizes=list(fit.core.shape),
            energy=options.energy,
            error=fit.error,
            explained=fit.explained,
            converged=int(fit.converged),
            n_tokens=0 if sample is None else len(sample.text),
            notes=notes,
        )

    # -- what is shown ------------------------------------------------------------------------

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """Judge the ranks of each mode, and the strongest interaction, against the twins."""
        return judging.findings(result)

    @attnlens.figure("How many directions hold the energy of each mode")
    def ranks(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the cumulative energy of each mode beside the twins'."""
        return drawing.ranks(result, figure)

    @attnlens.figure("Which directions act together: slices of the core")
    def core(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the core's slices along the heads."""
        return drawing.core(result, figure)

    @attnlens.figure("The strongest interactions")
    def strongest(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the energy of the strongest interactions."""
        return drawing.strongest(result, figure)

    @attnlens.figure("Which heads make up each direction")
    def heads(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the loadings of heads on the directions of their mode."""
        return drawing.heads(result, figure)

    @attnlens.figure("What each feature direction says in the vocabulary")
    def vocabulary(self, result: xr.Dataset, figure: Any) -> str:
        """Draw the top and bottom tokens of the feature directions."""
        return drawing.words(result, figure)

    @attnlens.table("The strongest interactions, told")
    def interactions(self, result: xr.Dataset) -> pd.DataFrame:
        """List the strongest interactions in words."""
        return results.interactions(result)

    @attnlens.table("Directions of each mode that hold the energy")
    def multilinear_ranks(self, result: xr.Dataset) -> pd.DataFrame:
        """List the multilinear ranks beside the twins'."""
        rows = []
        for name, size, kept in zip(
            result.attrs["modes"], result.attrs["sizes"], result.attrs["core_sizes"], strict=True
        ):
            row = {
                "mode": name,
                "entries": size,
                f"directions for {result.attrs['energy']:.0%}": int(result[f"rank_{name}"]),
                "in the core": kept,
                "energy of the first": round(float(result[f"energy_{name}"][0]), 4),
            }
            if f"rank_{name}_twin" in result:
                of_twins = result[f"rank_{name}_twin"].values.astype(int)
                row["twins"] = ", ".join(map(str, of_twins))
            rows.append(row)
        return pd.DataFrame(rows)

    @attnlens.highlight("Token directions over the text")
    def text(self, result: xr.Dataset) -> Iterator[attnlens.Highlight]:
        """Colour the tokens of a prompt by each token direction."""
        if "factor_token" not in result:
            raise attnlens.Skip(f"{result.attrs['tensor']} has no tokens")
        factor = result["factor_token"].transpose("token", "token_component").values
        here = np.flatnonzero(result["token_prompt"].values == result["token_prompt"].values[0])
        words = [str(t) for t in result["token_text"].values[here]]
        for c in range(min(factor.shape[1], 8)):
            values = factor[here, c] / max(float(np.abs(factor[:, c]).max()), 1e-300)
            yield attnlens.Highlight(
                label=f"direction {c + 1}",
                tokens=words,
                weights=[round(float(v), 4) for v in values],
            )
