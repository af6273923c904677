"""Reading a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from attnlens.errors import DamagedStoreError, IncompleteStoreError, NeedError
from attnlens.store.contents import Contents
from attnlens.store.disk import disk_unit, disk_vocabulary, disk_weights, subfolders
from attnlens.store.schema import (
    CORPORA,
    TWINS,
    UNITS,
    Manifest,
    load_manifest,
)
from attnlens.store.units import Unit
from attnlens.store.weights import Weights

if TYPE_CHECKING:
    from attnlens.models import ModelFacts
    from attnlens.statistics import Statistic


class Store(Contents):
    """Labelled activations and statistics: a mapping from their names to lazy DataArrays.

    Made by :func:`open_store`, :meth:`from_arrays`, :meth:`from_cache`, or by a capture.
    Prompts lie along ``prompt`` in the order of their ids; where their lengths differ, what lies
    beyond a prompt's length is NaN, and the coordinate ``length[prompt]`` says where that begins.
    Values stored as float16 are read as float32.

    Attributes
    ----------
    path : Path or None
        The store's folder; None in memory.
    manifest : Manifest
        What it says about itself.
    twins : list of Store
        The same configuration with fresh random weights, on the same tokens.
    """

    def __init__(
        self,
        manifest: Manifest,
        units: list[Unit],
        *,
        path: Path | None = None,
        weights: Weights | None = None,
        vocabulary: list[str] | None = None,
        twins: Iterable[Store] = (),
        corpora: Mapping[str, Store] | None = None,
        statistics: Mapping[str, type[Statistic]] | None = None,
        given: Mapping[str, xr.DataArray] | None = None,
    ) -> None:
        super().__init__(manifest, units, weights=weights, statistics=statistics, given=given)
        self.path = path
        self.vocabulary = vocabulary
        self.twins = list(twins)
        self._corpora = dict(corpora or {})
        self._live_model: Any = None

    # ---- making ------------------------------------------------------------------------------

    @classmethod
    def open(
        cls, path: str | Path, *, statistics: Mapping[str, type[Statistic]] | None = None
    ) -> Store:
        """Open a store; see :func:`open_store`."""
        from attnlens.store.check import quick_problems

        folder = Path(path)
        manifest = load_manifest(folder)
        if not manifest.sealed:
            there = sum((folder / UNITS / u.folder).is_dir() for u in manifest.units)
            what = f"{there} of {len(manifest.units)} units are there"
            if there == len(manifest.units):
                what += ", but not all of its weights, twins and further corpora"
            raise IncompleteStoreError(
                f"{folder} was not finished: {what}.",
                hint="Finish it with the same command and --resume.",
            )
        for where, what in quick_problems(folder, manifest):
            raise DamagedStoreError(
                f"{folder}: {where}: {what}.",
                hint="Restore it from a copy, or capture again; `attnlens store verify` lists "
                "everything that is wrong.",
            )
        weights = Weights((lambda: disk_weights(folder, manifest)) if manifest.weights else None)
        store = cls(
            manifest,
            [disk_unit(folder / UNITS / u.folder, u, manifest, weights) for u in manifest.units],
            path=folder,
            weights=weights,
            vocabulary=disk_vocabulary(folder, manifest) if manifest.vocabulary else None,
            statistics=statistics,
        )
        for twin in subfolders(folder / TWINS):
            store.twins.append(cls.open(twin, statistics=statistics))
        for corpus in subfolders(folder / CORPORA):
            store._corpora[corpus.name] = cls.open(corpus, statistics=statistics)
        return store

    @classmethod
    def from_arrays(
        cls,
        *,
        tokens: Any = None,
        vocabulary: list[str] | None = None,
        weights: Mapping[str, Any] | None = None,
        lengths: Any = None,
        twins: Iterable[Store] = (),
        corpora: Mapping[str, Store] | None = None,
        model: ModelFacts | Mapping[str, Any] | None = None,
        period: int | None = None,
        statistics: Mapping[str, type[Statistic]] | None = None,
        **activations: Any,
    ) -> Store:
        """Make a store of arrays in memory: activations from any tool can be analysed.

        Parameters
        ----------
        tokens : array of int, [prompt, pos] or [pos], optional
        vocabulary : list of str, optional
            Literal text of every token id.
        weights : mapping from str to array, optional
            By TransformerLens names: ``W_O`` over [layer, head, d_head, d_model] and so on.
        lengths : array of int, [prompt], optional
            Tokens of each prompt; what lies beyond is ignored.
        twins : iterable of Store, optional
        corpora : mapping from str to Store, optional
        model : ModelFacts or mapping, optional
            Facts of the model.
        period : int, optional
            After how many tokens a prompt of repeated random tokens repeats.
        statistics : mapping from str to class, optional
            Statistics of one's own, by name.
        **activations
            Arrays of numpy, torch or xarray by the names of activations: ``pattern`` over
            [prompt, layer, head, query_pos, key_pos], ``z`` over [prompt, layer, pos, head,
            d_head], and so on. ``prompt`` and ``layer`` may be left out where they have size 1
            and no doubt is left. Statistics (``**{"pattern.entropy": ...}``) are taken as
            DataArrays with their dimensions. Everything is copied.

        Returns
        -------
        Store

        Raises
        ------
        UsageError
            If shapes do not fit, or an array holds something else than numbers.
        NonFiniteError
            If there is NaN or infinity at a real token.
        """
        from attnlens.store.memory import build

        return build(
            activations,
            tokens=tokens,
            vocabulary=vocabulary,
            weights=weights,
            lengths=lengths,
            twins=twins,
            corpora=corpora,
            model=model,
            period=period,
            statistics=statistics,
        )

    @classmethod
    def from_cache(
        cls, cache: Mapping[str, Any], *, names: Iterable[str] = (), **how: Any
    ) -> Store:
        """Make a store of a TransformerLens ``ActivationCache``.

        Parameters
        ----------
        cache : ActivationCache, or mapping from hook name to tensor
        names : iterable of str, optional
            Activations to take; all that are there if empty.
        **how
            As for :meth:`from_arrays`: `tokens`, `vocabulary`, `weights`, `lengths`, ...

        Raises
        ------
        MissingActivationError
            If a wanted activation, or all of them, are not in the cache.
        """
        from attnlens.store.memory import gather

        arrays, labels = gather(cache, tuple(names))
        labelled: dict[str, Any] = {n: _with_layers(a, labels[n]) for n, a in arrays.items()}
        return cls.from_arrays(**how, **labelled)

    # ---- the rest ----------------------------------------------------------------------------

    @property
    def lengths(self) -> xr.DataArray:
        """Number of tokens of each prompt, ``[prompt]``."""
        n = self.manifest.prompts.n
        return xr.DataArray(
            np.asarray(self.manifest.prompts.lengths),
            dims=("prompt",),
            coords={"prompt": np.arange(n)},
            name="length",
        )

    @cached_property
    def _tokens(self) -> npt.NDArray[np.int32]:
        out = np.full((self.manifest.prompts.n, self.manifest.max_length), -1, dtype=np.int32)
        for unit in self._units:
            out[unit.prompt_ids, : unit.length] = unit.tokens.values
        return out

    @property
    def tokens(self) -> xr.DataArray:
        """Token ids ``[prompt, pos]``, int32, -1 beyond a prompt's length.

        Raises
        ------
        NeedError
            If the store was made of arrays without tokens.
        """
        if not self.has_tokens:
            raise NeedError(
                "The store was made without tokens.", hint="Give tokens= to Store.from_arrays."
            )
        return xr.DataArray(
            self._tokens.copy(),
            dims=("prompt", "pos"),
            coords={
                "prompt": np.arange(self._tokens.shape[0]),
                "pos": np.arange(self._tokens.shape[1]),
                "length": ("prompt", np.asarray(self.manifest.prompts.lengths)),
            },
            name="tokens",
        )

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens are known."""
        return bool((self._tokens >= 0).any())

    def token_strings(self, prompt: int) -> list[str]:
        """Return the literal text of one prompt's tokens.

        Their ids where there is no vocabulary, their positions where there are no tokens.
        """
        length = self.manifest.prompts.lengths[prompt]
        ids = self._tokens[prompt, :length].tolist() if self.has_tokens else range(length)
        if self.vocabulary is None or not self.has_tokens:
            return [str(i) for i in ids]
        known = self.vocabulary
        return [known[i] if 0 <= i < len(known) else str(i) for i in ids]

    @property
    def facts(self) -> ModelFacts | None:
        """Facts of the model; None for arrays in memory."""
        from attnlens.models import ModelFacts

        return ModelFacts.from_json(self.manifest.model) if self.manifest.model else None

    def save(self, path: str | Path, *, overwrite: bool = False) -> Store:
        """Write the store, of arrays in memory say, to a folder.

        Parameters
        ----------
        path : path
            The new ``.attn`` folder.
        overwrite : bool
            Replace a store that is there.

        Returns
        -------
        Store
            The one on disk.

        Raises
        ------
        OutputError
            If something is there already.
        """
        from attnlens.store.copying import save

        return save(self, Path(path), overwrite=overwrite)

    def corpus(self, name: str) -> Store:
        """Return the store of the same model on another corpus.

        Raises
        ------
        NeedError
            If there is none of that name.
        """
        if name not in self._corpora:
            raise NeedError(
                f"The store holds no corpus {name!r}.",
                hint=f"It holds {', '.join(self._corpora) or 'no other corpus'}.",
            )
        return self._corpora[name]

    @property
    def corpora(self) -> Mapping[str, Store]:
        """The same model on other corpora, by name."""
        return dict(self._corpora)

    def attach(self, model: Any) -> None:
        """Let ``store.model`` be this live model."""
        self._live_model = model

    @property
    def model(self) -> Any:
        """The live model that was attached.

        Raises
        ------
        NeedError
            If there is none: a store holds numbers, not a model.
        """
        if self._live_model is None:
            raise NeedError(
                "The store holds no live model.",
                hint="Use attnlens.run(...), or store.attach(model).",
            )
        return self._live_model

    @property
    def seed(self) -> int:
        """The seed of the capture: the only source of randomness that an analysis should use."""
        return self.manifest.seed

    @property
    def results(self) -> dict[str, xr.Dataset]:
        """Results of other analyses; none outside a run."""
        return {}

    def __repr__(self) -> str:
        from attnlens.store.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from attnlens.store.show import as_html

        return as_html(self)


def open_store(
    path: str | Path, *, statistics: Mapping[str, type[Statistic]] | None = None
) -> Store:
    """Open a store; nothing but its metadata is read.

    Parameters
    ----------
    path : path
        The ``.attn`` folder.
    statistics : mapping from str to class, optional
        Statistics that analyses brought, by name; the built-in ones are known.

    Returns
    -------
    Store

    Raises
    ------
    IncompleteStoreError
        If it was not finished.
    StoreVersionError
        If another version of the layout wrote it.
    DamagedStoreError
        If units, arrays or chunks are missing; the message names the first.
    StoreError
        If there is no store.
    """
    return Store.open(path, statistics=statistics)


def _with_layers(array: Any, layers: list[int]) -> xr.DataArray:
    return xr.DataArray(array[0], dims=array[1], coords={"layer": layers})
