"""One unit, and the labels of what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from attnlens.activations import ACTIVATIONS
from attnlens.errors import NeedError
from attnlens.store.blocks import Block
from attnlens.store.lazy import HeadOutputs, OuterArray, Single
from attnlens.store.rebuilt import Rebuilt
from attnlens.store.rules import derived_spec, key_places, rule_of
from attnlens.store.schema import ActivationSpec, Manifest, UnitSpec, resolve_positions
from attnlens.store.weights import Weights

if TYPE_CHECKING:
    from attnlens.attention import Attention

State = dict[str, npt.NDArray[Any]]


class Unit:
    """Prompts of one length, as they lie in the store: nothing padded.

    ``unit[name]`` is an activation as a lazy DataArray; ``name in unit`` asks whether it is there.

    Parameters
    ----------
    spec : UnitSpec
    manifest : Manifest
    blocks : mapping from str to Block
        Its arrays, ``tokens`` and the activations.
    weights : Weights
        Of the store.
    states : mapping from str to dict, or None
        Partial sums of the stored statistics.
    """

    def __init__(
        self,
        spec: UnitSpec,
        manifest: Manifest,
        blocks: Mapping[str, Block],
        weights: Weights,
        states: Mapping[str, State] | None = None,
    ) -> None:
        self.spec = spec
        self.blocks = blocks
        self._manifest = manifest
        self._weights = weights
        self._states = states

    def __repr__(self) -> str:
        return f"<Unit {self.id}: {len(self.prompt_ids)} prompts of {self.length} tokens>"

    @property
    def id(self) -> int:
        """Its number."""
        return self.spec.id

    @property
    def length(self) -> int:
        """Tokens in each of its prompts."""
        return self.spec.length

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of its prompts, in the order of the ``prompt`` dimension."""
        return list(self.spec.prompts)

    @property
    def tokens(self) -> xr.DataArray:
        """Token ids ``[prompt, pos]``, int32."""
        block = self.blocks["tokens"]
        values = np.empty(block.shape, dtype=np.int32)
        block.read_into([np.arange(n) for n in block.shape], values)
        return xr.DataArray(
            values,
            dims=("prompt", "pos"),
            coords={"prompt": self.prompt_ids, "pos": np.arange(self.length)},
            name="tokens",
        )

    def state(self, name: str) -> State:
        """Return the partial sums of a stored statistic."""
        return (self._states or {})[name]

    def __contains__(self, name: object) -> bool:
        z = self._manifest.activations.get("z")
        return (
            name in self._manifest.activations
            or derived_spec(self._manifest, str(name)) is not None
            or (name == "result" and z is not None and self._weights.covers(z))
        )

    def lazy(self, name: str) -> OuterArray:
        """Return an activation as a lazy array, over all its dimensions.

        Raises
        ------
        NeedError
            If the unit does not hold it.
        """
        if name in self._manifest.activations:
            return Single(self.blocks[name])
        if name == "result" and "z" in self._manifest.activations:
            return HeadOutputs(self.lazy("z"), self._weights.w_o(self._manifest.activations["z"]))
        if derived_spec(self._manifest, name) is not None:
            lengths = np.full(len(self.prompt_ids), self.length)
            return rebuilt(self, self._manifest, name, lengths)
        raise NeedError(
            f"The store holds no {name}.",
            hint=f"It holds {', '.join(self._manifest.activations) or 'no activations'}.",
        )

    def __getitem__(self, name: str) -> xr.DataArray:
        array = self.lazy(name)
        spec = spec_of(self._manifest, name)
        _, positions = resolve_positions(spec.positions, self.length)
        return label(
            array, name, spec, self.prompt_ids, [self.length] * len(self.prompt_ids), positions
        )

    def attention(self, layer: int, prompts: slice = slice(None)) -> Attention:
        """Return the attention of one layer over ``[prompt, head, query_pos, key_pos]``.

        Parameters
        ----------
        layer : int
            The layer's number in the model.
        prompts : slice, optional
            Which of the unit's prompts, by their place in it; only these are read.
        """
        return attention_of(self, self._manifest, layer, None, prompts)


def spec_of(manifest: Manifest, name: str) -> ActivationSpec:
    """Return which layers and heads a store gives of an activation, held or derived."""
    held = manifest.activations
    return held.get(name) or derived_spec(manifest, name) or held["z"]


def rebuilt(source: Any, manifest: Manifest, name: str, lengths: npt.NDArray[Any]) -> Rebuilt:
    """Return ``pattern`` or ``scores`` of stored queries and keys, lazily.

    Parameters
    ----------
    source : Store or Unit
        Whose ``lazy`` gives ``q_rot`` and ``k_rot``.
    manifest : Manifest
        Of which `derived_spec` gives something for `name`.
    name : {"pattern", "scores"}
    lengths : ndarray of int, [prompt]
    """
    spec = spec_of(manifest, name)
    q, k = source.lazy("q_rot"), source.lazy("k_rot")
    rules = [rule_of(manifest.model, layer) for layer in spec.layers]
    return Rebuilt(
        "scores" if name == "scores" else "pattern",
        q,
        k,
        rules=[rule for rule in rules if rule is not None],
        heads=range(q.shape[3]) if spec.heads is None else spec.heads,
        places=key_places(manifest, q.shape[3], k.shape[3]),
        lengths=lengths,
    )


def attention_of(
    source: Any,
    manifest: Manifest,
    layer: int,
    lengths: npt.ArrayLike | None,
    prompts: slice = slice(None),
) -> Attention:
    """Make the handle over one layer's attention.

    Parameters
    ----------
    source : Store or Unit
    manifest : Manifest
    layer : int
        The layer's number in the model.
    lengths : array_like of int, or None
        Of the prompts, where they differ.
    prompts : slice
        Which of the prompts, by their place.

    Raises
    ------
    NeedError
        If the store has no whole patterns of that layer.
    """
    from attnlens.attention import Attention

    spec = manifest.activations.get("pattern") or derived_spec(manifest, "pattern")
    if spec is None:
        raise NeedError(
            "The store holds no pattern, so there is no attention to look at.",
            hint="Capture with pattern among the activations, or q_rot and k_rot.",
        )
    if spec.positions is not None:
        raise NeedError(
            "The store holds only some of the pattern's query positions.",
            hint="Capture without --positions, or use the pattern itself.",
        )
    if layer not in spec.layers:
        raise NeedError(
            f"The store holds no pattern of layer {layer}.",
            hint=f"It holds layers {', '.join(map(str, spec.layers))}.",
        )
    lengths = None if lengths is None else np.asarray(lengths)[prompts]
    rule = rule_of(manifest.model, layer)
    if "pattern" not in manifest.activations and rule is not None:
        q, k = (
            np.moveaxis(source[name].sel(layer=layer).isel(prompt=prompts).values, 2, 1)
            for name in ("q_rot", "k_rot")
        )
        if spec.heads is not None:  # not every group of heads is whole
            k = k[:, key_places(manifest, q.shape[1], k.shape[1])]
        return rule.attention(q, k, spec.heads, lengths)
    pattern = source["pattern"].sel(layer=layer).isel(prompt=prompts).values
    windows = manifest.model.get("windows") or ()
    return Attention.from_pattern(
        pattern,
        causal=manifest.model.get("causal"),
        window=windows[layer] if layer < len(windows) else None,
        lengths=lengths,
    )


def label(
    array: OuterArray,
    name: str,
    spec: ActivationSpec,
    prompts: Sequence[int],
    lengths: Sequence[int],
    positions: npt.ArrayLike,
) -> xr.DataArray:
    """Turn a lazy array into a DataArray with coordinates.

    Parameters
    ----------
    array : OuterArray
    name : str
        Of the activation.
    spec : ActivationSpec
        Which layers and heads it holds.
    prompts, lengths : sequence of int
        Ids and lengths along ``prompt``.
    positions : array_like of int
        Labels along ``pos`` or ``query_pos``.
    """
    activation = ACTIVATIONS[name]
    sizes = dict(zip(activation.dims, array.shape, strict=True))
    coords: dict[str, Any] = {
        "prompt": np.asarray(prompts),
        "layer": np.asarray(spec.layers),
        "length": ("prompt", np.asarray(lengths)),
    }
    if activation.head_dim:
        heads = spec.heads if spec.heads is not None else range(sizes[activation.head_dim])
        coords[activation.head_dim] = np.asarray(heads)
    for dim in ("pos", "query_pos"):
        if dim in sizes:
            coords[dim] = np.asarray(positions)
    if "key_pos" in sizes:
        coords["key_pos"] = np.arange(sizes["key_pos"])
    return xr.DataArray(
        array.variable(activation.dims),
        coords=coords,
        name=name,
        attrs={"long_name": activation.what},
    )
