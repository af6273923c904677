"""What a store holds: activations and statistics by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xarray as xr

from attnlens.activations import ACTIVATIONS, nearest
from attnlens.errors import NeedError
from attnlens.needs import BUILTIN_STATISTICS
from attnlens.store.lazy import HeadOutputs, Joined, OuterArray, Piece
from attnlens.store.rules import derived_spec
from attnlens.store.schema import Manifest, resolve_positions
from attnlens.store.units import Unit, attention_of, label, rebuilt, spec_of
from attnlens.store.weights import Weights

if TYPE_CHECKING:
    from attnlens.attention import Attention
    from attnlens.statistics import Statistic


class Contents(Mapping[str, xr.DataArray]):
    """Activations and statistics of a store, by name; the base of :class:`Store`.

    Parameters
    ----------
    manifest : Manifest
    units : list of Unit
    weights : Weights, optional
    statistics : mapping from str to class, optional
        Statistics that analyses brought, by name.
    given : mapping from str to DataArray, optional
        Statistics that are there, finished.
    """

    def __init__(
        self,
        manifest: Manifest,
        units: list[Unit],
        *,
        weights: Weights | None = None,
        statistics: Mapping[str, type[Statistic]] | None = None,
        given: Mapping[str, xr.DataArray] | None = None,
    ) -> None:
        self.manifest = manifest
        self._weights = weights or Weights()
        self._own_statistics = dict(statistics or {})
        self._given = dict(given or {})
        self._finished: dict[str, xr.DataArray] = {}
        self._units = units

    def names(self) -> list[str]:
        """Return the names of all activations and statistics that ``store[name]`` gives."""
        known = [*ACTIVATIONS, *sorted({*BUILTIN_STATISTICS, *self._own_statistics, *self._given})]
        extra = [n for n in self.manifest.statistics if n not in known]
        return [n for n in (*known, *extra) if n in self]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __contains__(self, name: object) -> bool:
        if name in self.manifest.activations or name in self._given:
            return True
        if derived_spec(self.manifest, str(name)) is not None:
            return True
        if name == "result":
            z = self.manifest.activations.get("z")
            return z is not None and self._weights.covers(z)
        return name in self.manifest.statistics or self._computable(str(name))

    def _computable(self, name: str) -> bool:
        """Whether a statistic that is not stored can be had from its activation."""
        if name in self._own_statistics:
            of = self._own_statistics[name].of
        elif name in BUILTIN_STATISTICS:
            of = name.partition(".")[0]
        else:
            return False
        spec = self.manifest.activations.get(of) or derived_spec(self.manifest, of)
        return spec is not None and spec.positions is None

    def __getitem__(self, name: str) -> xr.DataArray:
        if name in self.manifest.activations or (name in ACTIVATIONS and name in self):
            return self._activation(name)
        if name in self._given:
            return self._given[name]
        if name in self:
            if name not in self._finished:
                self._finished[name] = self._statistic(name)
            return self._finished[name].copy()
        z = self.manifest.activations.get("z")
        if name == "result" and z is not None:
            self._weights.w_o(z)
        raise self._no(name)

    def _no(self, name: str) -> NeedError:
        there = self.names()
        near = nearest(name, there)
        return NeedError(
            f"The store holds no {name!r}.",
            hint=(f"Did you mean {near!r}? " if near else "")
            + f"It holds {', '.join(there) or 'nothing'}.",
        )

    def lazy(self, name: str) -> OuterArray:
        """Return an activation as a lazy array over all its dimensions and prompts."""
        if name == "result" and name not in self.manifest.activations:
            return HeadOutputs(self.lazy("z"), self._weights.w_o(self.manifest.activations["z"]))
        if derived_spec(self.manifest, name) is not None:
            lengths = np.asarray(self.manifest.prompts.lengths)
            return rebuilt(self, self.manifest, name, lengths)
        spec, longest = self.manifest.activations[name], self.manifest.max_length
        rows = longest if spec.positions is None else len(spec.positions)
        pieces = []
        for unit in self._units:
            which, _ = resolve_positions(spec.positions, unit.length)
            places: list[npt.NDArray[np.intp] | None] = []
            for dim in ACTIVATIONS[name].dims[1:]:
                place = None
                if dim in ("pos", "query_pos", "key_pos"):
                    found = np.arange(unit.length) if dim == "key_pos" else which
                    place = np.full(longest if dim == "key_pos" else rows, -1)
                    place[found] = np.arange(len(found))
                places.append(place)
            pieces.append(Piece(unit.blocks[name], np.array(unit.prompt_ids), tuple(places)))
        sizes = dict(zip(ACTIVATIONS[name].dims, self._units[0].blocks[name].shape, strict=True))
        sizes |= {"prompt": self.manifest.prompts.n, "key_pos": longest}
        sizes |= {"pos": rows, "query_pos": rows}
        return Joined(pieces, tuple(sizes[d] for d in ACTIVATIONS[name].dims))

    def _activation(self, name: str) -> xr.DataArray:
        spec = spec_of(self.manifest, name)
        positions = spec.positions or np.arange(self.manifest.max_length)
        prompts = range(self.manifest.prompts.n)
        return label(self.lazy(name), name, spec, prompts, self.manifest.prompts.lengths, positions)

    def _statistic(self, name: str) -> xr.DataArray:
        from attnlens.statistics import STATISTICS, compute

        kind = self._own_statistics.get(name) or STATISTICS.get(name)
        if kind is None:
            raise NeedError(
                f"{name!r} is stored, but what it means is not known here.",
                hint="Give its class: Store.open(path, statistics={name: class}).",
            )
        if name in self.manifest.statistics:
            result = kind.finalize(kind.merge([u.state(name) for u in self._units]))
        else:
            result = compute(kind, self._units)
        return self._labelled(result, name)

    def _labelled(self, result: xr.DataArray, name: str) -> xr.DataArray:
        """Give a statistic the labels that it does not know itself."""
        head = next((d for d in ("head", "kv_head") if d in result.dims), None)
        heads = self.manifest.heads
        n_heads, groups = (self.manifest.model.get(n) for n in ("n_heads", "n_kv_heads"))
        if head == "kv_head" and heads is not None and n_heads and groups:
            # The manifest lists query heads; each reads the key-value head of its group.
            heads = sorted({h // (n_heads // groups) for h in heads})
        of = name.partition(".")[0]
        spec = self.manifest.activations.get(of) or derived_spec(self.manifest, of)
        if spec is not None and name not in self.manifest.statistics:
            heads = spec.heads
        if head and heads is not None and len(heads) == result.sizes[head]:
            result = result.assign_coords({head: heads})
        if "prompt" in result.dims:
            order = [p for unit in self._units for p in unit.prompt_ids]
            result = result.assign_coords(prompt=order).sortby("prompt")
            lengths = np.asarray(self.manifest.prompts.lengths)
            result = result.assign_coords(length=("prompt", lengths))
        return result.rename(name)

    def units(self) -> Iterator[Unit]:
        """Yield each unit as it lies: prompts of one length, nothing padded."""
        yield from self._units

    def attention(self, layer: int) -> Attention:
        """Return the attention of one layer over ``[prompt, head, query_pos, key_pos]``.

        Raises
        ------
        NeedError
            If the store has no whole patterns of that layer.
        """
        lengths = None if self.manifest.uniform else self.manifest.prompts.lengths
        return attention_of(self, self.manifest, layer, lengths)

    @property
    def has_weights(self) -> bool:
        """Whether the model's weights are there."""
        return bool(self._weights)

    @property
    def weights(self) -> xr.Dataset:
        """The model's weights by their TransformerLens names, lazy.

        Raises
        ------
        NeedError
            If the store does not hold them.
        """
        return self._weights.dataset
