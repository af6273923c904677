"""The model's own attention, called again on changed input while the model runs.

One forward pass stops after every layer's attention and hands over a :class:`Call`: what went in,
what came out, and a way to call the very same module again with the tokens in another order, with
positions or mask left behind, with other weights or with hooks. Nothing is re-implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import attnlens

if TYPE_CHECKING:
    from torch import Tensor

#: What is recorded of a call, where the model gives it.
_RECORDED = ("q", "k", "v", "q_rot", "k_rot", "pattern", "z")

Hooks = Sequence[tuple[str, Callable[..., Any]]]


@dataclass
class Call:
    """One layer's attention on one batch of prompts.

    Attributes
    ----------
    model : Model
    layer : int
    seen : dict of str to Tensor
        Activations of the model's own pass, as in the vocabulary: ``pattern`` [prompt, head,
        query_pos, key_pos], ``q``, ``k``, ``v``, ``q_rot``, ``k_rot``, ``z`` [prompt, pos, head or
        kv_head, d_head]; those that the model gives. ``out`` [prompt, pos, d_model] is what the
        module returned.
    x : Tensor[prompt, pos, d_model]
        What went into attention, after the norm.
    visible : Tensor[query_pos, key_pos] of bool
        Which keys each query sees.
    """

    model: Any
    layer: int
    seen: dict[str, Tensor]
    x: Tensor
    visible: Tensor
    _module: Any
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]
    _tap: _Tap
    _mask: Tensor | None = None

    @property
    def n(self) -> int:
        """Number of positions."""
        return int(self.x.shape[1])

    @property
    def masked(self) -> bool:
        """Whether there is any key that some query does not see."""
        return not bool(self.visible.all())

    def tables(self) -> list[Any]:
        """Return the tables of positions that attention is given, float64[pos, column] each."""
        given = self._kwargs.get("position_embeddings") or ()
        return [t.double().cpu().numpy().reshape(-1, self.n, t.shape[-1])[0] for t in given]

    def slopes(self) -> Any:
        """Return ALiBi's slope of each head, float64[head]; None where it is not handed over."""
        heads = self.model.facts.n_heads
        for name in ("alibi", "position_bias"):
            table: Any = self._kwargs.get(name)
            if hasattr(table, "reshape"):
                rows = table.double().cpu().numpy().reshape(-1, heads, self.n)[0]
                return (rows[:, -1] - rows[:, 0]) / (self.n - 1)
        return None

    def parameter(self, name: str) -> Any:
        """Return a parameter of the model's own attention, such as ``q_norm.weight``, or None."""
        owner: Any = own(self._module)
        for part in name.split("."):
            owner = getattr(own(owner), part, None)
        return owner

    def again(
        self,
        order: Tensor | None = None,
        *,
        x: Tensor | None = None,
        positions: bool = True,
        mask: bool = True,
        shift: Tensor | None = None,
        hooks: Hooks = (),
    ) -> dict[str, Tensor]:
        """Call the layer's attention again and return what it computed.

        Parameters
        ----------
        order : Tensor[pos] of int, optional
            The token at place i of the new call is the one that was at ``order[i]``.
        x : Tensor[prompt, pos, d_model], optional
            The new input; by default the old one in the new order.
        positions, mask : bool
            Whether positional encodings, and the mask, go along with the tokens.
        shift : Tensor[..., query_pos, 1], optional
            Added to every row of the scores, through the mask.
        hooks : sequence of (name, function), optional

        Returns
        -------
        dict of str to Tensor
            As `seen`.
        """
        args, kwargs = list(self._args), dict(self._kwargs)
        if order is not None:
            for i, value in enumerate(args):
                args[i] = _moved_rows(value, order, self.x.shape)
            for name, value in kwargs.items():
                if name == "hidden_states":
                    kwargs[name] = _moved_rows(value, order, self.x.shape)
                elif positions and name in _POSITIONAL:
                    kwargs[name] = _moved(value, order, _POSITIONAL[name], self.n)
        if x is not None:
            if "hidden_states" in kwargs:
                kwargs["hidden_states"] = x
            else:
                args[0] = x
        table = self._mask
        if table is not None and order is not None and mask:
            table = table[..., order, :][..., :, order]
        if shift is not None:
            zero = self.x.new_zeros(1, 1, self.n, self.n) if table is None else table
            table = zero + shift
        if table is not None:
            self._put_mask(args, kwargs, table)
        with self.model.hooks(list(hooks)):
            return self._tap.record(self._module, args, kwargs)

    def _put_mask(self, args: list[Any], kwargs: dict[str, Any], table: Tensor) -> None:
        place = _mask_place(args)
        if "attention_mask" not in kwargs and place is not None:
            args[place] = table
        else:
            kwargs["attention_mask"] = table


#: Keyword arguments that tell attention where tokens are, and the dimensions that are positions.
_POSITIONAL: Mapping[str, tuple[int, ...]] = {
    "position_embeddings": (-2,),
    "position_ids": (-1,),
    "alibi": (-1,),
    "position_bias": (-2, -1),
}


def _moved(value: Any, order: Tensor, dims: tuple[int, ...], n: int) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, order, dims, n) for v in value)
    if not hasattr(value, "index_select"):
        return value
    for dim in dims:
        if value.ndim >= -dim and value.shape[dim] == n:
            value = value.index_select(dim, order.to(value.device))
    return value


def _moved_rows(value: Any, order: Tensor, shape: Any) -> Any:
    if not hasattr(value, "index_select") or tuple(value.shape) != tuple(shape):
        return value
    return value.index_select(1, order.to(value.device))


def _mask_place(args: Sequence[Any]) -> int | None:
    """Return which positional argument is the mask: the second one, where it may be one."""
    if len(args) > 1 and (args[1] is None or getattr(args[1], "ndim", 0) == 4):
        return 1
    return None


@dataclass
class _Tap:
    """Where recorded activations go: into the pass's own dict, or into a further call's."""

    into: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    busy: bool = False

    def keep(self, name: str, layer: int, value: Tensor) -> None:
        self.into[name, layer] = value.detach().clone()

    def record(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        own, self.into, self.busy = self.into, {}, True
        try:
            output = module(*args, **kwargs)
            found = {name: value for (name, _), value in self.into.items()}
            return {**found, "out": first_of(output).detach()}
        finally:
            self.into, self.busy = own, False


def each_attention(model: Any, tokens: Any, visit: Callable[[Call], None]) -> Tensor:
    """Run the model once, calling `visit` after each layer's attention.

    Parameters
    ----------
    model : Model
    tokens : array of int, [prompt, pos]
    visit : callable(Call)

    Returns
    -------
    Tensor[prompt, pos, d_vocab]
        The logits.
    """
    tap = _Tap()
    names = [name for name in _RECORDED if name in model.available()]
    inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def before(layer: int) -> Callable[..., None]:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not tap.busy:
                inputs[layer] = args, dict(kwargs)

        return keep

    def after(layer: int) -> Callable[..., None]:
        def hand_over(module: Any, args: Any, output: Any) -> None:
            if tap.busy:
                return
            given, named = inputs.pop(layer)
            seen = {name: tap.into.pop((name, layer)) for name in names}
            x = named["hidden_states"] if "hidden_states" in named else given[0]
            seen["out"] = first_of(output).detach()
            refuse_what_is_not_finite(seen, layer)
            table, visible = _mask_of(model.facts, layer, x, given, named)
            visit(Call(model, layer, seen, x, visible, module, given, named, tap, table))

        return hand_over

    with ExitStack() as stack:
        for layer, block in enumerate(model.bridge.blocks):
            attention = block.attn
            for handle in (
                attention.register_forward_pre_hook(before(layer), with_kwargs=True),
                attention.register_forward_hook(after(layer)),
            ):
                stack.callback(handle.remove)
        stack.enter_context(model.record(names, tap.keep))
        logits: Tensor = model.forward(tokens)
    if not bool(logits.isfinite().all()):
        raise attnlens.errors.NonFiniteError(
            "The logits hold NaN or infinity, though every layer's attention is "
            f"finite{_culprit(model)}",
            hint="Something behind the last attention overflows, or the dtype is too narrow.",
        )
    return logits


def _culprit(model: Any) -> str:
    """Name the first parameter that is not finite, to end a sentence."""
    for name, parameter in model.bridge.original_model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f": {name.replace('._original_component', '')!r} is not."
    return "."


def refuse_what_is_not_finite(seen: Mapping[str, Tensor], layer: int) -> None:
    """Refuse a layer in which something is NaN or infinite: nothing can be certified of it.

    Raises
    ------
    NonFiniteError
        With the layer, and the head where one can be named.
    """
    for name, value in seen.items():
        wrong = ~value.isfinite()
        if not bool(wrong.any()):
            continue
        axis = {"pattern": 1, "scores": 1, "out": None}.get(name, 2)
        where = f"layer {layer}"
        if axis is not None:
            head = int(wrong.movedim(axis, 0).flatten(1).any(1).nonzero()[0])
            kind = "key-value head" if name in ("k", "v", "k_rot") else "head"
            where = f"{kind} {layer}.{head}"
        raise attnlens.errors.NonFiniteError(
            f"{name!r} of {where} holds NaN or infinity, so that no symmetry can be checked.",
            hint="Look at that layer's weights and at what comes before it, or use a wider dtype.",
        )


def own(module: Any) -> Any:
    """Return the module that stands behind the library's hooked one."""
    while getattr(module, "_modules", {}).get("_original_component") is not None:
        module = module._modules["_original_component"]
    return module


def first_of(output: Any) -> Tensor:
    """Return what a module writes, of all that it returns."""
    return output[0] if isinstance(output, (tuple, list)) else output  # type: ignore[no-any-return]


def _mask_of(
    facts: Any, layer: int, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor]:
    """Return the additive mask of a call, [prompt or 1, 1, query_pos, key_pos], and what is seen.

    Where the model leaves it to attention to hide later keys, the same mask is written out.
    """
    import torch

    n = x.shape[1]
    place = _mask_place(args)
    given = kwargs.get("attention_mask", None if place is None else args[place])
    if getattr(given, "ndim", 0) == 4 and tuple(given.shape[-2:]) == (n, n):
        if given.dtype == torch.bool:
            given = torch.zeros_like(given, dtype=x.dtype).masked_fill(
                ~given, torch.finfo(x.dtype).min
            )
        return given, (given[0, 0] > torch.finfo(given.dtype).min / 2)
    back = torch.arange(n, device=x.device)[:, None] - torch.arange(n, device=x.device)[None, :]
    window = facts.windows[layer]
    visible = torch.ones(n, n, dtype=torch.bool, device=x.device)
    if facts.causal:
        visible &= back >= 0
    if window is not None:
        visible &= back.abs() < window
    if bool(visible.all()):
        return None, visible
    table = torch.zeros(1, 1, n, n, dtype=x.dtype, device=x.device)
    return table.masked_fill(~visible, torch.finfo(x.dtype).min), visible


def batches(tokens: Any, size: int) -> Iterator[Any]:
    """Yield the prompts in batches of at most `size`."""
    for start in range(0, len(tokens), size):
        yield tokens[start : start + size]
