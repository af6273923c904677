"""Lean forward passes: hooked as ever, and without any n x n tensor.

TransformerLens computes attention from its scores, so that they can be hooked; over long prompts
these take most of the time and all of the memory. For the length of a ``with`` block, `lean` lets
its code run on scores that are never computed (`attnlens.models.lazyscores`): everything else that
the code does, hooks of q, k, v, z and of the rotated q and k included, happens as ever. Norms that
nobody has hooks in, and GPT-2's activation, run in one kernel each. Whether a model's code can be
run so is tried, never assumed: see `find_problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformers.activations import NewGELUActivation

from attnlens.errors import CaptureError
from attnlens.models.facts import ModelFacts
from attnlens.models.lazyscores import Lazily, LazyMask, LazyScores, LeanError, Rule
from attnlens.models.quiet import log

_SCORE_HOOKS = ("hook_attn_scores", "hook_pattern")


@contextmanager
def lean(bridge: Any, facts: ModelFacts) -> Iterator[None]:
    """Run attention without its matrix inside a with block; all is put back afterwards.

    Parameters
    ----------
    bridge : transformer_lens.model_bridge.TransformerBridge
    facts : ModelFacts

    Raises
    ------
    CaptureError
        Inside the block, where the model's code needs the matrix after all.
    """
    with ExitStack() as stack:
        for layer, block in enumerate(bridge.blocks):
            stack.enter_context(_lazy_attention(block.attn, _rule(facts, layer)))
        stack.enter_context(_lazy_masks(bridge.original_model))
        for module in bridge.original_model.modules():
            if isinstance(module, NewGELUActivation):
                stack.enter_context(_replaced(module, "forward", _gelu))
            elif isinstance(module, NormalizationBridge):
                stack.enter_context(_replaced(module, "_python_norm_forward", _norm(module)))
        try:
            yield
        except LeanError as error:
            raise CaptureError(
                f"{facts.architecture} cannot run without attention matrices: {error}.",
                hint="Capture with lean=False (--no-lean).",
            ) from error


def watched(bridge: Any) -> str | None:
    """Return the first hook point of scores or patterns that someone has hooks on, or None."""
    for layer, block in enumerate(bridge.blocks):
        for name in _SCORE_HOOKS:
            point = getattr(getattr(block, "attn", None), name, None)
            if point is not None and (point._forward_hooks or point._forward_pre_hooks):
                return f"blocks.{layer}.attn.{name}"
    return None


def find_problem(
    bridge: Any, facts: ModelFacts, run: Callable[[], Tensor], *, n: int, tolerance: float
) -> str | None:
    """Try whether a model runs lean, and computes the same.

    Parameters
    ----------
    bridge : TransformerBridge
    facts : ModelFacts
    run : callable
        Runs the model on a few tokens and returns logits.
    n : int
        How many tokens; best a number that no other dimension has.
    tolerance : float
        Of logits and z, beside their largest value.

    Returns
    -------
    str or None
        Why it does not, for people; None if it does.
    """
    if facts.mode != "raw":
        return "it is in compatibility mode"
    if facts.sinks:
        return "its attention has sinks"
    if any(getattr(block, "attn", None) is None for block in bridge.blocks):
        return "not every layer has attention"
    expected = _outputs(bridge, run)
    watch = _Watch(n)
    try:
        with lean(bridge, facts), watch:
            found = _outputs(bridge, run)
    except CaptureError as error:
        cause = error.__cause__
        return str(cause) if isinstance(cause, LeanError) else error.message
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        log.debug("a lean pass failed", exc_info=True)
        return "its attention works on the matrix of scores itself"
    if watch.seen:
        log.debug("in a lean pass, %s made a matrix", watch.seen)
        return "a step of it makes a matrix of all queries and keys"
    if found.keys() != expected.keys():
        return "some hooks do not fire"
    for name, value in expected.items():
        off = float((found[name] - value).abs().max())
        if not off <= tolerance * (1.0 + float(value.abs().max())):
            return f"{name} comes out differently, by {off:.2g}"
    return None


def _outputs(bridge: Any, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Run the model; return logits and every layer's z."""
    seen: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(value: Any, hook: Any) -> None:
            if isinstance(value, Tensor):
                seen[name] = value.detach().to("cpu", torch.float32, copy=True)

        return keep

    listed = bridge.hook_dict
    names = [f"blocks.{i}.attn.hook_z" for i in range(len(bridge.blocks))]
    with bridge.hooks(fwd_hooks=[(name, keeper(name)) for name in names if name in listed]):
        seen["logits"] = run().detach().to("cpu", torch.float32)
    return seen


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation whose result has two dimensions of n."""

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n = n
        self.seen: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor) and list(value.shape).count(self.n) > 1:
                self.seen = self.seen or str(func)
        return out


def _rule(facts: ModelFacts, layer: int) -> Rule:
    return Rule(facts.causal, facts.windows[layer])


@contextmanager
def _lazy_attention(attention: Any, rule: Rule) -> Iterator[None]:
    """Let one layer's attention run on lazy scores."""
    forward = attention.forward

    def lean_forward(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("hidden_states", args[0] if args else None)
        if not isinstance(given, Tensor):
            raise LeanError("its attention takes no hidden states")
        with Lazily(rule, given.shape[1]):
            return forward(*args, **kwargs)

    def mask(attn_scores: Any, attention_mask: Any, **_: Any) -> Any:
        if not isinstance(attn_scores, LazyScores):
            raise LeanError("its scores are computed in a way of their own")
        if attention_mask is None and attention.is_causal and rule == Rule(causal=True):
            # What TransformerLens would mask by itself.
            return attn_scores.masked(
                LazyMask(
                    lambda prompt, head, query, key: key <= query,
                    attn_scores.shape[-1],
                    attn_scores.device,
                )
            )
        if not isinstance(attention_mask, LazyMask | None):
            raise LeanError(f"its mask is a {type(attention_mask).__name__}")
        return attn_scores.masked(attention_mask)

    with (
        _replaced(attention, "forward", lean_forward),
        _replaced(attention, "_apply_reconstruct_attention_mask", mask),
    ):
        yield


def _gelu(x: Tensor) -> Tensor:
    """Compute in one kernel what GPT-2's activation spells out in eight."""
    return functional.gelu(x, approximate="tanh")


def _norm(bridge: NormalizationBridge) -> Callable[[Tensor], Tensor]:
    """Return a norm in the model's own kernel, as long as nobody has hooks inside it."""
    spelled_out, norm = bridge._python_norm_forward, bridge.original_component
    assert norm is not None
    inside = (bridge.hook_scale, bridge.hook_normalized)

    def forward(x: Tensor) -> Tensor:
        hooked = any(point._forward_hooks or point._forward_pre_hooks for point in inside)
        normalized: Tensor = spelled_out(x) if hooked else norm(x)
        return normalized

    return forward


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of the module itself hide the one of its class for a while."""
    there = name in module.__dict__
    old = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if there:
            module.__dict__[name] = old
        else:
            del module.__dict__[name]


@contextmanager
def _lazy_masks(model: Any) -> Iterator[None]:
    """Let Hugging Face make rules instead of n x n masks for this model, and this one alone."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    ours = {id(m.config) for m in model.modules() if getattr(m, "config", None) is not None}
    eager = MASKS["eager"]

    def make(**how: Any) -> Any:
        config = how.get("config")
        if not (id(config) in ours or _text_of(config) in ours):
            return eager(**how)
        padding = how.get("attention_mask")
        if how.get("use_vmap") or how.get("q_offset") or how.get("kv_offset"):
            raise LeanError("its mask is made in a way of its own")
        if padding is not None and not bool(padding.all()):
            raise LeanError("some tokens are padding")
        if how["q_length"] != how["kv_length"]:
            raise LeanError("a key-value cache is in use")
        return LazyMask(how["mask_function"], how["kv_length"], torch.device(how["device"]))

    there = "eager" in MASKS._local_mapping
    MASKS["eager"] = make
    try:
        yield
    finally:
        if there:
            MASKS["eager"] = eager
        else:
            del MASKS["eager"]


def _text_of(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return id(text)
