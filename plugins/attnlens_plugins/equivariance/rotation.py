"""Rotation symmetry of the residual stream: whether it has a preferred basis.

Everything that reads the residual stream is linear once the norm before it has divided by a length,
so that ``x -> x R`` can be undone in the weights, if the norm commutes with R: an RMSNorm does (its
gain, on the side of the weights, folds into them), a LayerNorm only if R keeps the direction of the
all-ones vector, whose share it removes. A norm whose output is added to the stream (Gemma 2, BERT)
has its gain on the wrong side, where no rotation passes.

The model's own norms are tried: called on the rotated stream, with the rotation undone behind
their division, before the gain where the gain folds, and after it where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlens_plugins.equivariance.groups import random_orthogonal
from attnlens_plugins.equivariance.rounding import unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor

#: Norms of a block by TransformerLens' names, and whether they may write to the stream.
_NORMS = ("ln1", "ln1_post", "ln2", "ln2_post")


class Rotation:
    """Gathers how every norm takes a rotation of the residual stream.

    Parameters
    ----------
    model : Model
    seed : int
    pre_norm : bool
        Whether the blocks' norms come before attention and MLP; if not, they write to the stream.

    Attributes
    ----------
    error : float64[layer]
        Largest departure of the layer's norms from commuting, relative to their output's length;
        NaN in a layer whose norms cannot be reached. The final norm counts as its own.
    kept_error : float64[layer]
        The same for rotations that keep the all-ones direction.
    tolerance : float
    worst : list of str, one for each layer
        The norm that departs most.
    final_error : float
        Of the norm before the unembedding.
    logits_change, kept_change, allowed : float
        Largest change of a logit over the largest logit, when all norms get the rotated stream;
        when the rotation keeps the all-ones direction; and what rounding may do.
    """

    def __init__(self, model: Any, seed: int, *, pre_norm: bool) -> None:
        facts = model.facts
        self.model = model
        self.pre_norm = pre_norm
        generator = np.random.default_rng([seed, 5])
        self.any = random_orthogonal(facts.d_model, generator)
        self.kept = keeping_ones(facts.d_model, generator)
        self.error = np.full(facts.n_layers, np.nan)
        self.kept_error = np.full(facts.n_layers, np.nan)
        self.worst = [""] * facts.n_layers
        self.final_error = float("nan")
        self.logits_change = self.kept_change = self.allowed = float("nan")
        import torch

        dtype = getattr(torch, facts.dtype, torch.float32)
        # Products with R sum d_model terms, and so does the length that the norm divides by; norms
        # work in float32 even where the weights are float64.
        eps = max(unit_roundoff(dtype), unit_roundoff(torch.float32))
        self.tolerance = 16 * eps * facts.d_model**0.5

    def run(self, tokens: Any) -> None:
        """Run the model over tokens [prompt, pos]: once as it is, and once for each rotation."""
        import torch

        places = self._places()
        with ExitStack() as stack:
            for layer, name, norm, writes in places:
                for which in ("error", "kept_error"):
                    hook = self._watch(layer, name, writes, which)
                    stack.callback(norm.register_forward_hook(hook).remove)
            logits = self.model.forward(tokens)
        size = float(logits.double().abs().max()) or 1.0

        def change(matrix: Any) -> float:
            with ExitStack() as stack:
                for _, _, norm, writes in places:
                    hook = self._turn(matrix, writes)
                    stack.callback(norm.register_forward_hook(hook).remove)
                moved = self.model.forward(tokens)
            return float((moved.double() - logits.double()).abs().max()) / size

        if places:
            self.logits_change = change(self.any)
            self.kept_change = change(self.kept)
            # What rounding alone does: the norms' output moved by as much as products may be off.
            noise = self._noise(places, tokens, logits) / size
            self.allowed = 16 * noise + 16 * unit_roundoff(torch.float32)

    def _places(self) -> list[tuple[int, str, Any, bool]]:
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

    def _watch(self, layer: int, name: str, writes: bool, which: str) -> Callable[..., None]:
        matrix = self.any if which == "error" else self.kept
        turned = _Turner(matrix, writes)

        def watch(norm: Any, args: Any, output: Tensor) -> None:
            import torch

            if turned.busy:
                return
            new = turned(norm, args)
            off = torch.linalg.vector_norm((new - output).double(), dim=-1)
            size = torch.linalg.vector_norm(output.double(), dim=-1).mean().clamp_min(1e-30)
            found = float(off.max() / size)
            if layer < 0:
                if which == "error":
                    self.final_error = found
                return
            values = getattr(self, which)
            if not values[layer] >= found:
                values[layer] = found
                if which == "error":
                    self.worst[layer] = name

        return watch

    def _turn(self, matrix: Any, writes: bool) -> Callable[..., Any]:
        turned = _Turner(matrix, writes)

        def turn(norm: Any, args: Any, output: Tensor) -> Any:
            return None if turned.busy else turned(norm, args)

        return turn

    def _noise(self, places: Any, tokens: Any, logits: Tensor) -> float:
        import torch

        generator = torch.Generator().manual_seed(0)

        def jitter(norm: Any, args: Any, output: Tensor) -> Tensor:
            drawn = torch.randn(output.shape, generator=generator).to(output)
            scale = output.double().square().mean(-1, keepdim=True).sqrt().to(output)
            moved: Tensor = output + drawn * scale * (self.tolerance / 16)
            return moved

        with ExitStack() as stack:
            for _, _, norm, _ in places:
                stack.callback(norm.register_forward_hook(jitter).remove)
            moved = self.model.forward(tokens)
        return float((moved.double() - logits.double()).abs().max())


class _Turner:
    """Calls a norm on the rotated stream and turns its output back."""

    def __init__(self, matrix: Any, writes: bool) -> None:
        self.matrix = matrix
        self.writes = writes
        self.busy = False
        self._here: dict[Any, Tensor] = {}

    def __call__(self, norm: Any, args: Any) -> Tensor:
        import torch

        x = args[0]
        key = (x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
        if key not in self._here:
            self._here[key] = torch.as_tensor(self.matrix).to(x.device, key[1])
        turn = self._here[key]
        self.busy = True
        try:
            new = norm((x.to(turn.dtype) @ turn).to(x.dtype), *args[1:]).to(turn.dtype)
        finally:
            self.busy = False
        gain, bias = (1.0, 0.0) if self.writes else _affine(norm, new)
        back: Tensor = ((new - bias) / gain @ turn.T * gain + bias).to(x.dtype)
        return back


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
