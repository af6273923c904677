"""Rotation symmetry of the residual stream: whether it has a preferred basis.

Everything that reads the residual stream is linear once the norm before it has divided by a length,
so that ``x -> x R`` can be undone in the weights, if the norm commutes with R: an RMSNorm does (its
gain, on the side of the weights, folds into them), a LayerNorm only if R keeps the direction of the
all-ones vector, whose share it removes. A norm whose output is added to the stream (Gemma 2, BERT)
has its gain on the wrong side, where no rotation passes.

The stream is carried rotated through the whole model, by hooks that do what rotated weights would:
what enters the first block, and what attention and MLP write, is multiplied by R; what is read is
turned back, behind the norm's division and before its gain. Whatever else acts on the stream acts
on the rotated one. Then every layer is tried alone, on its own input.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlens_plugins.equivariance.groups import random_orthogonal
from attnlens_plugins.equivariance.live import first_of
from attnlens_plugins.equivariance.rounding import unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor

#: Norms of a block by TransformerLens' names, and whether they may write to the stream.
_NORMS = ("ln1", "ln1_post", "ln2", "ln2_post")


class Rotation:
    """Gathers how every layer takes a rotation of the residual stream.

    Parameters
    ----------
    model : Model
    seed : int
    pre_norm : bool
        Whether the blocks' norms come before attention and MLP; if not, they write to the stream.

    Attributes
    ----------
    error, kept_error : float64[layer]
        Largest departure of what the layer makes of a rotated stream, turned back, over the length
        of what it adds to the stream; for any rotation, and for one that keeps the all-ones
        direction.
    tolerance : float64[layer]
        What rounding may do to it.
    carried : bool[layer]
        Whether all that the layer writes could be reached: attention and MLP are modules that the
        model calls. Where they are not, nothing was tested.
    norm_error : float64[layer]
        Largest departure of the layer's norms, relative to their output; NaN without any.
    worst : list of str, one for each layer
        The norm that departs most.
    logits_change, kept_change, allowed : float
        Largest change of a logit over the largest logit, when the whole model carries the rotated
        stream; when the rotation keeps the all-ones direction; and what rounding may do.
    """

    def __init__(self, model: Any, seed: int, *, pre_norm: bool) -> None:
        facts = model.facts
        self.model = model
        self.pre_norm = pre_norm
        generator = np.random.default_rng([seed, 5])
        self.any = random_orthogonal(facts.d_model, generator)
        self.kept = keeping_ones(facts.d_model, generator)
        self.error, self.kept_error = (np.full(facts.n_layers, np.nan) for _ in range(2))
        self.tolerance = np.full(facts.n_layers, np.nan)
        self.norm_error = np.full(facts.n_layers, np.nan)
        self.carried = np.zeros(facts.n_layers, dtype=bool)
        self.worst = [""] * facts.n_layers
        self.logits_change = self.kept_change = self.allowed = float("nan")
        import torch

        dtype = getattr(torch, facts.dtype, torch.float32)
        # Products with R sum d_model terms, and so does the length that the norm divides by; norms
        # work in float32 even where the weights are float64.
        eps = max(unit_roundoff(dtype), unit_roundoff(torch.float32))
        self.rounding = eps * facts.d_model**0.5

    def run(self, tokens: Any) -> None:
        """Run the model over tokens [prompt, pos]: as it is, and for each rotation."""
        import torch

        with ExitStack() as stack:
            for layer, name, norm, writes in self._norms():
                if layer >= 0:
                    hook = self._watch(layer, name, writes)
                    stack.callback(norm.register_forward_hook(hook).remove)
            streams = self._streams(stack)
            called = self._called(stack)
            logits = self.model.forward(tokens).double()
        self.carried = np.array([{"attn", "mlp"} <= names for names in called])
        size = float(logits.abs().max()) or 1.0

        def moved(attach: Callable[[ExitStack], None]) -> float:
            with ExitStack() as stack:
                attach(stack)
                return float((self.model.forward(tokens).double() - logits).abs().max()) / size

        def alone(attach: Callable[[ExitStack], None], matrix: Any) -> Any:
            with ExitStack() as stack:
                attach(stack)
                found = self._each_alone(stack, streams, matrix)
                self.model.forward(tokens)
            return np.array(found)

        self.logits_change = moved(lambda stack: self._carry(stack, self.any))
        self.kept_change = moved(lambda stack: self._carry(stack, self.kept))
        self.error = alone(lambda stack: self._carry(stack, self.any, enters=False), self.any)
        self.kept_error = alone(
            lambda stack: self._carry(stack, self.kept, enters=False), self.kept
        )
        # What rounding alone does: what is read and written is moved by as much.
        self.allowed = 16 * moved(self._jitter) + 16 * unit_roundoff(torch.float32)
        noise = alone(self._jitter, None)
        self.tolerance = 16 * (noise + self.rounding * self._stream_over_added(streams))

    def _norms(self) -> list[tuple[int, str, Any, bool]]:
        """List the norms: layer (-1 for the final one), name, module, whether it writes."""
        bridge, facts = self.model.bridge, self.model.facts
        found = []
        for layer, block in enumerate(bridge.blocks):
            for name in _NORMS:
                norm = _modules(block).get(name)
                if norm is not None and _usable(norm, facts.d_model):
                    found.append((layer, name, norm, name.endswith("_post") or not self.pre_norm))
        final = _modules(bridge).get("ln_final")
        if final is not None and self.pre_norm and _usable(final, facts.d_model):
            found.append((-1, "ln_final", final, False))
        return found

    def _streams(self, stack: ExitStack) -> list[tuple[Tensor, Tensor]]:
        """Gather what goes into each block and what comes out of it."""
        found: list[tuple[Tensor, Tensor]] = []

        def keep(block: Any, args: Any, kwargs: Any, output: Any) -> None:
            found.append((_stream(args, kwargs).detach(), first_of(output).detach()))

        for block in self.model.bridge.blocks:
            handle = block.register_forward_hook(keep, with_kwargs=True)
            stack.callback(handle.remove)
        return found

    def _called(self, stack: ExitStack) -> list[set[str]]:
        """Gather which of attention and MLP each block calls as a module."""
        found: list[set[str]] = []
        for block in self.model.bridge.blocks:
            names: set[str] = set()
            found.append(names)
            for name in ("attn", "mlp"):
                part = _modules(block).get(name)
                if part is not None:

                    def note(*_: Any, name: str = name, names: set[str] = names) -> None:
                        names.add(name)

                    stack.callback(part.register_forward_hook(note).remove)
        return found

    def _each_alone(self, stack: ExitStack, streams: Any, matrix: Any) -> list[float]:
        """Give each block its own input, rotated, and compare what comes out."""
        turn = _Turn(np.eye(self.model.facts.d_model) if matrix is None else matrix)
        found: list[float] = []
        for block, (given, made) in zip(self.model.bridge.blocks, streams, strict=True):

            def enter(block: Any, args: Any, kwargs: Any, given: Tensor = given) -> Any:
                return _with_stream(args, kwargs, turn(given))

            def leave(
                block: Any, args: Any, output: Any, given: Tensor = given, made: Tensor = made
            ) -> None:
                found.append(_largest(turn.back(first_of(output)), made, _added(given, made)))

            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        return found

    def _stream_over_added(self, streams: Any) -> Any:
        return np.array([float(b.double().norm(dim=-1).max() / _added(a, b)) for a, b in streams])

    def _carry(self, stack: ExitStack, matrix: Any, *, enters: bool = True) -> None:
        """Let the model carry its stream rotated."""
        turn = _Turn(matrix)
        bridge = self.model.bridge
        if enters:
            first = bridge.blocks[0].register_forward_pre_hook(
                lambda block, args, kwargs: _with_stream(args, kwargs, turn(_stream(args, kwargs))),
                with_kwargs=True,
            )
            stack.callback(first.remove)
        for _, _, norm, writes in self._norms():
            if not writes:
                turned = _TurnedNorm(matrix)
                stack.callback(norm.register_forward_hook(turned.hook).remove)
        for block in bridge.blocks:
            for name in ("attn", "mlp"):
                part = _modules(block).get(name)
                if part is None:
                    continue
                if not self.pre_norm or not self._reads_a_norm(block, name):
                    reader = part.register_forward_pre_hook(
                        lambda part, args, kwargs: _with_stream(
                            args, kwargs, turn.back(_stream(args, kwargs))
                        ),
                        with_kwargs=True,
                    )
                    stack.callback(reader.remove)
                writer = part.register_forward_hook(turn.written, with_kwargs=True)
                stack.callback(writer.remove)
        if enters and not self.pre_norm:
            last = bridge.blocks[-1].register_forward_hook(
                lambda block, args, output: _with_first(output, turn.back(first_of(output)))
            )
            stack.callback(last.remove)

    def _reads_a_norm(self, block: Any, name: str) -> bool:
        """Whether attention or MLP reads a norm's output: with one norm, both read it."""
        own = _modules(block)
        return own.get("ln1") is not None or (name == "mlp" and own.get("ln2") is not None)

    def _watch(self, layer: int, name: str, writes: bool) -> Callable[..., None]:
        turned = _TurnedNorm(self.any, writes=writes)

        def watch(norm: Any, args: Any, output: Tensor) -> None:
            if turned.busy:
                return
            size = output.double().norm(dim=-1).mean().clamp_min(1e-30)
            found = float((turned(norm, args) - output).double().norm(dim=-1).max() / size)
            if not self.norm_error[layer] >= found:
                self.norm_error[layer], self.worst[layer] = found, name

        return watch

    def _jitter(self, stack: ExitStack) -> None:
        """Move what norms give and what is written by about what rounding does to products."""
        import torch

        generator = torch.Generator().manual_seed(0)

        def moved(output: Tensor) -> Tensor:
            drawn = torch.randn(output.shape, generator=generator).to(output)
            scale = output.double().square().mean(-1, keepdim=True).sqrt().to(output)
            new: Tensor = output + drawn * scale * self.rounding
            return new

        def jitter(part: Any, args: Any, output: Any) -> Any:
            return _with_first(output, moved(first_of(output)))

        parts = [norm for _, _, norm, _ in self._norms()]
        for block in self.model.bridge.blocks:
            parts += [m for n, m in _modules(block).items() if n in ("attn", "mlp")]
        for part in parts:
            stack.callback(part.register_forward_hook(jitter).remove)


class _Turn:
    """Multiplies by a rotation, in float32 or better."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self._here: dict[Any, Tensor] = {}

    def _times(self, x: Tensor, *, inverse: bool) -> Tensor:
        import torch

        key = (x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
        if key not in self._here:
            self._here[key] = torch.as_tensor(self.matrix).to(x.device, key[1])
        matrix = self._here[key]
        return (x.to(key[1]) @ (matrix.T if inverse else matrix)).to(x.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._times(x, inverse=False)

    def back(self, x: Tensor) -> Tensor:
        return self._times(x, inverse=True)

    def written(self, part: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Turn what a module adds to the stream; what it is handed to add to stays (BLOOM)."""
        value = first_of(output)
        handed = [
            v for v in [*args[1:], *(v for n, v in kwargs.items() if n != "hidden_states")]
            if getattr(v, "shape", None) == value.shape
        ]  # fmt: skip
        base = sum(handed[1:], handed[0]) if handed else None
        new = self(value) if base is None else base + self(value - base)
        return _with_first(output, new)


def _stream(args: Any, kwargs: Any) -> Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]  # type: ignore[no-any-return]


def _with_stream(args: Any, kwargs: Any, value: Tensor) -> tuple[Any, Any]:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": value}
    return (value, *args[1:]), kwargs


def _with_first(output: Any, value: Tensor) -> Any:
    return type(output)([value, *output[1:]]) if isinstance(output, (tuple, list)) else value


def _added(given: Tensor, made: Tensor) -> float:
    """Return the longest vector that a block adds to the stream."""
    added = (made.double() - given.double()).norm(dim=-1).max()
    return float(added.clamp_min(1e-6 * given.double().norm(dim=-1).max() + 1e-30))


def _largest(new: Tensor, old: Tensor, size: float) -> float:
    return float((new.double() - old.double()).norm(dim=-1).max()) / size


class _TurnedNorm:
    """A norm of the rotated stream, turned back behind its division.

    Where its gain folds into what reads it, it is turned back before the gain; else after it.
    """

    def __init__(self, matrix: Any, *, writes: bool = False) -> None:
        self.turn = _Turn(matrix)
        self.writes = writes
        self.busy = False

    def __call__(self, norm: Any, args: Any) -> Tensor:
        """Call the norm on its input, rotated."""
        return self._back(norm, self._again(norm, (self.turn(args[0]), *args[1:])))

    def hook(self, norm: Any, args: Any, output: Tensor) -> Tensor:
        """Turn the output of a norm whose input is rotated already."""
        return self._back(norm, output)

    def _again(self, norm: Any, args: Any) -> Tensor:
        self.busy = True
        try:
            return norm(*args)  # type: ignore[no-any-return]
        finally:
            self.busy = False

    def _back(self, norm: Any, output: Tensor) -> Tensor:
        import torch

        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        gain, bias = (1.0, 0.0) if self.writes else _affine(norm, output.to(wide))
        back: Tensor = self.turn.back((output.to(wide) - bias) / gain) * gain + bias
        return back.to(output.dtype)


def _affine(norm: Any, like: Tensor) -> tuple[Any, Any]:
    """Return a norm's gain, as it acts, and its bias; gains of 0 count as 1 (nothing is there)."""
    import torch

    weight = norm.weight.detach().to(like)
    if getattr(norm, "uses_weight_offset", False):
        weight = weight + 1
    bias = getattr(norm.original_component, "bias", None)
    offset = torch.zeros_like(weight) if bias is None else bias.detach().to(like)
    return torch.where(weight == 0, torch.ones_like(weight), weight), offset


def _modules(owner: Any) -> dict[str, Any]:
    return dict(getattr(owner, "_modules", {}))


def _usable(norm: Any, d_model: int) -> bool:
    weight = getattr(norm, "weight", None)
    return weight is not None and tuple(getattr(weight, "shape", ())) == (d_model,)


def keeping_ones(n: int, generator: np.random.Generator) -> Any:
    """Return a random orthogonal matrix that leaves the all-ones vector as it is, [n, n]."""
    basis = np.linalg.qr(np.column_stack([np.ones(n), generator.normal(size=(n, n - 1))]))[0]
    inner = np.eye(n)
    if n > 1:
        inner[1:, 1:] = random_orthogonal(n - 1, generator)
    return basis @ inner @ basis.T
