"""A hooked model: what captures and analyses see of TransformerLens."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlens.activations import ACTIVATIONS, nearest
from attnlens.errors import CaptureError, MissingActivationError, UnsupportedModelError
from attnlens.models import gauge, lean
from attnlens.models.facts import ModelFacts
from attnlens.models.memory import memory_errors
from attnlens.models.probe import (
    TOLERANCE,
    Findings,
    Provider,
    capture_all,
    judge,
    probe_tokens,
    user_hooks_off,
)
from attnlens.models.tokens import token_texts
from attnlens.models.weights import weights_of

#: Called with an activation's name, the layer, and the value in the vocabulary's layout.
Sink = Callable[[str, int, Tensor], None]


class Model:
    """A model whose attention can be captured.

    Made by `load_model`. Nothing of the user's is changed by using it: hooks are removed after
    use, a model in training mode is put into evaluation mode only while it runs, and the device,
    dtype and mode stay as found.

    Parameters
    ----------
    facts : ModelFacts
    bridge : transformer_lens.model_bridge.TransformerBridge
    tokenizer : transformers tokenizer or None
        None where the model came without one; it then takes tokens only.
    notes : list of str, optional
        What people should know about how the model was loaded.
    head : bool, optional
        Whether the unembedding was in the checkpoint.
    """

    def __init__(
        self,
        facts: ModelFacts,
        bridge: Any,
        tokenizer: Any = None,
        notes: Iterable[str] = (),
        *,
        head: bool = True,
    ) -> None:
        self.facts = facts
        self.bridge = bridge
        self.tokenizer = tokenizer
        self.notes: list[str] = list(notes)
        self.has_head = head
        self._takes_cache = _accepts(bridge, "use_cache")
        self._takes_attentions = _accepts(bridge, "output_attentions")
        self._found = self._probe()
        self._lean_problem: tuple[str | None] | None = None

    def __repr__(self) -> str:
        f = self.facts
        return (
            f"<Model {f.name}: {f.architecture}, {f.n_layers} layers x {f.n_heads} heads, "
            f"{f.dtype} on {f.device}>"
        )

    def forward(self, tokens: Any) -> Tensor:
        """Run the model once over the tokens, without a key-value cache.

        Hooks fire as usual; patterns that the bridge keeps are freed layer by layer.

        Parameters
        ----------
        tokens : Tensor[batch, pos] or array of int
            Without padding; moved to where the model takes its input.

        Returns
        -------
        Tensor[batch, pos, d_vocab]
            Logits, on the model's device. Meaningless where `has_head` is false.

        Raises
        ------
        CaptureError
            If an id is outside the vocabulary, or the tokens exceed the model's context.
        OutOfMemoryError
        """
        ids = self._checked(tokens)
        options: dict[str, Any] = {}
        if self._takes_cache:
            options["use_cache"] = False
        if self._takes_attentions:
            options["output_attentions"] = False
        shape = "x".join(str(n) for n in ids.shape)
        with (
            self._evaluating(),
            self._freeing(),
            memory_errors(self.facts, f"running it on {shape} tokens", "Use a smaller batch size."),
            torch.inference_mode(),
        ):
            logits = self.bridge(ids.to(self.facts.device), return_type="logits", **options)
        if not isinstance(logits, Tensor):
            raise UnsupportedModelError(
                f"{self.facts.name!r} returns {type(logits).__name__}, not logits"
            )
        return logits

    def hooks(
        self, fwd_hooks: Sequence[tuple[str, Callable[..., Any]]]
    ) -> AbstractContextManager[Any]:
        """Attach hooks by TransformerLens' names for the length of a with block.

        They are removed on any exception; hooks of the user's own stay.
        """
        context: AbstractContextManager[Any] = self.bridge.hooks(fwd_hooks=list(fwd_hooks))
        return context

    @contextmanager
    def record(
        self, activations: Iterable[str], sink: Sink, *, layers: Iterable[int] | None = None
    ) -> Iterator[None]:
        """Hand activations to `sink` as they arise in forward passes inside a with block.

        This is the one way that gives every activation of `available()`, those included that no
        single hook has (GPT-NeoX's ``q_rot``).

        Parameters
        ----------
        activations : iterable of str
        sink : callable(name, layer, value)
            Called in the order in which the model computes them, with values in the layout of
            the vocabulary without ``layer``: [batch, pos, head, d_head], [batch, head,
            query_pos, key_pos], [batch, pos, d_model]. They are live: copy what is kept, change
            nothing. Masked cells of ``scores`` hold `attnlens.activations.MASKED_SCORE`.
        layers : iterable of int, optional
            All by default.

        Raises
        ------
        MissingActivationError
        """
        chosen = range(self.facts.n_layers) if layers is None else list(layers)
        wanted = [
            (name, layer, self._provider(name, layer)) for name in activations for layer in chosen
        ]
        hooks = [hook for item in wanted for hook in _recorders(*item, sink)]
        with self.hooks(hooks):
            yield

    def hook_name(self, activation: str, layer: int) -> str:
        """Return TransformerLens' hook point that gives the activation in this model.

        Raises
        ------
        MissingActivationError
            If it never fires here, or no single hook gives it (use `record`).
        """
        provider = self._provider(activation, layer)
        if len(provider.hooks) > 1:
            raise MissingActivationError(
                f"no single hook gives {activation!r} in {self.facts.architecture}; it is computed "
                f"from {', '.join(hook.format(layer=layer) for hook in provider.hooks)}",
                hint="Model.record computes it.",
            )
        return provider.hooks[0].format(layer=layer)

    def available(self) -> frozenset[str]:
        """Return the activations that `record` gives, found by running the model."""
        return frozenset(self._found.providers)

    def lean(self) -> AbstractContextManager[None]:
        """Run without any n x n tensor inside a with block.

        Hooks fire as ever but for those of scores and patterns, which do not exist. Logits and
        activations agree with an ordinary pass to rounding. See `attnlens.models.lean`.

        Raises
        ------
        UnsupportedModelError
            Where `lean_problem` gives a reason.
        """
        problem = self.lean_problem()
        if problem is not None:
            raise UnsupportedModelError(
                f"{self.facts.name!r} ({self.facts.architecture}) cannot run lean: {problem}"
            )
        return lean.lean(self.bridge, self.facts)

    def lean_problem(self) -> str | None:
        """Return why the model cannot run lean, for people; None if it can.

        Found by running a few tokens both ways, at the first call.
        """
        watched = lean.watched(self.bridge)
        if watched is not None:
            return f"there are hooks on {watched}"
        if self._lean_problem is None:
            tokens = self._probe_tokens()
            with user_hooks_off(self.bridge):
                found = lean.find_problem(
                    self.bridge,
                    self.facts,
                    lambda: self.forward(tokens),
                    n=tokens.shape[1],
                    tolerance=TOLERANCE.get(getattr(torch, self.facts.dtype), 1e-4),
                )
            self._lean_problem = (found,)
        return self._lean_problem[0]

    def clear(self, layer: int) -> None:
        """Free the attention pattern that the bridge keeps of a layer."""
        attention = getattr(self.bridge.blocks[layer], "attn", None)
        if attention is not None:
            attention._pattern = None
            attention._attn_scores = None

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the model's matrices, in float32: see `attnlens.models.weights.weights_of`."""
        with memory_errors(self.facts, "copying its weights", "Use a machine with more memory."):
            return weights_of(
                self.bridge, self.facts, pre_norm=self._found.pre_norm, head=self.has_head
            )

    def head_weights(self, layer: int, names: Sequence[str] | None = None) -> gauge.Weights:
        """Return one layer's attention weights exactly: see `attnlens.models.gauge`."""
        return gauge.head_weights(self.bridge, self.facts, layer, names)

    def replaced_weights(
        self, values: Mapping[tuple[str, int], Any]
    ) -> AbstractContextManager[None]:
        """Run with other attention weights inside a with block; the old ones always return.

        `values` are for example ``{("W_Q", 0): array[head, d_model, d_head]}``, in the layout of
        `head_weights`: see `attnlens.models.gauge.replaced_weights`.
        """
        return gauge.replaced_weights(self.bridge, self.facts, values)

    def token_texts(self) -> list[str] | None:
        """Return the literal text of every vocabulary id, or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return token_texts(self.tokenizer, self.facts.d_vocab)

    def twin(self, seed: int) -> Model:
        """Return a model of the same configuration with fresh random weights.

        The weights are those that the architecture's own initialisation draws under `seed`: the
        same seed gives the same bytes. Device, dtype and tokenizer are this model's, and torch's
        global random state is left as it was.
        """
        from attnlens.models.wrapping import make_twin

        return make_twin(self, seed)

    def _provider(self, activation: str, layer: int) -> Provider:
        here = self._found.providers
        provider = here.get(activation)
        if provider is None:
            what = (
                f"{activation!r} is not computed by {self.facts.architecture} in a way that can be "
                "captured"
                if activation in ACTIVATIONS
                else f"there is no activation {activation!r}"
            )
            close = nearest(activation, here)
            listed = f"This model gives {', '.join(sorted(here))}."
            raise MissingActivationError(
                what, hint=f"Did you mean {close}? {listed}" if close else listed
            )
        if not 0 <= layer < self.facts.n_layers:
            raise MissingActivationError(
                f"there is no layer {layer} to take {activation!r} from",
                hint=f"{self.facts.name} has layers 0 to {self.facts.n_layers - 1}.",
            )
        return provider

    def _checked(self, tokens: Any) -> Tensor:
        ids = torch.as_tensor(tokens)
        if ids.ndim != 2 or ids.is_floating_point() or ids.numel() == 0:
            raise CaptureError(
                f"tokens must be whole numbers in [batch, pos], not {ids.dtype} in "
                f"{tuple(ids.shape)}"
            )
        ids = ids.to(torch.long)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.facts.d_vocab:
            raise CaptureError(
                f"token {low if low < 0 else high} is outside the vocabulary of "
                f"{self.facts.name!r}",
                hint=f"Its ids are 0 to {self.facts.d_vocab - 1}.",
            )
        if self.facts.positions == "absolute" and ids.shape[1] > self.facts.n_ctx:
            raise CaptureError(
                f"{ids.shape[1]} tokens are more than the {self.facts.n_ctx} positions of "
                f"{self.facts.name!r}",
                hint="Cut the prompts (--length).",
            )
        return ids

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch dropout off while the model runs, and leave each module's mode as it was."""
        roots = (self.bridge, self.bridge.original_model)
        training = {m for root in roots for m in root.modules() if m.training}
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def _freeing(self) -> Iterator[None]:
        """Free each layer's pattern as soon as its attention has run."""

        def free(module: Any, inputs: Any, output: Any) -> None:
            module._pattern = None

        attentions = [getattr(block, "attn", None) for block in self.bridge.blocks]
        handles = [a.register_forward_hook(free) for a in attentions if a is not None]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _probe_tokens(self) -> Tensor:
        config = getattr(self.bridge.original_model, "config", None)
        return probe_tokens(self.facts, getattr(config, "pad_token_id", None))

    def _probe(self) -> Findings:
        tokens = self._probe_tokens()
        with user_hooks_off(self.bridge):
            seen = capture_all(self.bridge, self.facts, lambda: self.forward(tokens))
        self.probe_logits = seen["logits"]
        found = judge(seen, self.facts, self.bridge, tokens.shape[1])
        if not found.providers.keys() & {"q", "k", "v", "z", "pattern"}:
            raise UnsupportedModelError(
                f"no attention of {self.facts.name!r} ({self.facts.architecture}) can be captured "
                "through TransformerLens in every layer",
                hint="Models without attention, or with it in some layers only, are not supported.",
            )
        # What was seen outweighs what the configuration says.
        self.facts = dataclasses.replace(self.facts, causal=found.causal)
        if "q_rot" not in found.providers:
            self.facts = dataclasses.replace(self.facts, alibi_slopes=None)
        self.notes.extend(found.notes)
        return found


def _recorders(
    name: str, layer: int, provider: Provider, sink: Sink
) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the hooks that together make one activation of one layer."""
    names = [hook.format(layer=layer) for hook in provider.hooks]
    seen: dict[str, Tensor] = {}

    def keeper(hook_name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: Any) -> None:
            seen[hook_name] = value
            if len(seen) == len(names):
                made = provider.value(seen, layer)
                seen.clear()
                if made is not None:
                    sink(name, layer, made)

        return keep

    for hook_name in names:
        yield hook_name, keeper(hook_name)


def _accepts(bridge: Any, option: str) -> bool:
    """Whether the wrapped model's forward takes an option, by name or among others."""
    parameters = inspect.signature(bridge.original_model.forward).parameters.values()
    return any(p.name == option or p.kind is p.VAR_KEYWORD for p in parameters)
