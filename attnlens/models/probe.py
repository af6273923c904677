"""Which activations a model really gives, found by running it on a few tokens.

TransformerLens lists hooks that never fire and gives one name to different things, by
architecture. So nothing is believed: every activation has candidates, each is tried on a tiny
forward pass, and the first that fits what the activation means is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attnlens.activations import MASKED_SCORE
from attnlens.models.facts import ModelFacts
from attnlens.models.weights import output_projection

#: How far probabilities may be off, by dtype; float16 and bfloat16 round in every step.
TOLERANCE: Final = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
}


@dataclass(frozen=True)
class Provider:
    """How one activation is had: from which hooks, and what is done with their values.

    Attributes
    ----------
    hooks : tuple of str
        Hook points, ``{layer}`` to be filled in, in the order in which they fire.
    compute : callable or None
        Makes the activation of the hooks' values; None where the one hook gives it as it is.
    """

    hooks: tuple[str, ...]
    compute: Callable[..., Tensor] | None = None

    def value(self, values: Mapping[str, Tensor], layer: int) -> Tensor | None:
        """Return the activation from captured `values`, or None if a hook did not fire."""
        found = [values.get(hook.format(layer=layer)) for hook in self.hooks]
        if any(v is None for v in found):
            return None
        try:
            return self.compute(*found) if self.compute else found[0]
        except (RuntimeError, IndexError):
            # Shapes that do not go together: this is not how the model does it.
            return None


@dataclass
class Findings:
    """What a probe found.

    Attributes
    ----------
    providers : dict
        Activation name -> how it is had. What is not here cannot be captured.
    causal : bool
        Whether no key that comes later than its query has any weight.
    pre_norm : bool
        Whether ``ln1`` normalises the input of the block (not so in BERT).
    notes : list of str
        What people should know.
    """

    providers: dict[str, Provider] = field(default_factory=dict)
    causal: bool = True
    pre_norm: bool = False
    notes: list[str] = field(default_factory=list)


def masked_scores(scores: Tensor) -> Tensor:
    """Return scores in float32 with masked cells at the one documented value.

    Parameters
    ----------
    scores : Tensor[..., query_pos, key_pos]
        As the model has them: masked cells hold the dtype's minimum, or minus infinity in
        compatibility mode and wherever adding the two overflowed.
    """
    floor = torch.finfo(scores.dtype).min / 2
    wide = scores.to(torch.float32)
    return wide.masked_fill(scores <= floor, MASKED_SCORE)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings in the half-split layout of GPT-NeoX and Llama.

    Parameters
    ----------
    x : Tensor[batch, pos, head, d_head]
        Queries or keys; only the first ``cos.shape[-1]`` dimensions are rotated.
    cos, sin : Tensor[batch or 1, pos, rotary_dim]

    References
    ----------
    Su et al.: RoFormer, arXiv:2104.09864, equation 34.
    """
    n = cos.shape[-1]
    turned, kept = x[..., :n], x[..., n:]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = torch.cat((-turned[..., n // 2 :], turned[..., : n // 2]), dim=-1)
    return torch.cat((turned * cos + half * sin, kept), dim=-1).to(x.dtype)


def _swap(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


_ATTN: Final = "blocks.{layer}.attn."
_COS_SIN: Final = (_ATTN + "hook_cos", _ATTN + "hook_sin")


def _candidates() -> dict[str, tuple[Provider, ...]]:
    one = {name: (Provider((_ATTN + f"hook_{name}",)),) for name in ("q", "k", "v", "z", "pattern")}

    def rotated(which: str) -> tuple[Provider, ...]:
        return (
            Provider((_ATTN + f"hook_rot_{which}",)),
            Provider((_ATTN + f"hook_rot_{which}",), _swap),
            Provider((_ATTN + f"hook_{which}", *_COS_SIN), rotate),
            Provider((_ATTN + f"hook_{which}_normed",), _swap),
            Provider((_ATTN + f"hook_{which}",)),
        )

    return one | {
        "q_rot": rotated("q"),
        "k_rot": rotated("k"),
        "scores": (Provider((_ATTN + "hook_attn_scores",), masked_scores),),
        "resid_pre": (Provider(("blocks.{layer}.hook_resid_pre",)),),
        # Where a norm or the residual is added before hook_attn_out (Gemma 2, BERT), the
        # output of W_O is what heads add up to.
        "attn_out": (
            Provider(("blocks.{layer}.hook_attn_out",)),
            Provider((_ATTN + "hook_out",)),
            Provider((_ATTN + "o.hook_out",)),
        ),
    }


_CANDIDATES: Final = _candidates()
_LN1: Final = "blocks.{layer}.ln1.hook_in"


def probe_tokens(facts: ModelFacts, pad: int | None) -> Tensor:
    """Return two short rows of ordinary tokens, of a length that no other dimension has."""
    taken = {facts.n_heads, facts.n_kv_heads, facts.d_head, facts.d_model, 2}
    lengths = [n for n in (7, 9, 11, 13, 5, 6, 4, 3) if n <= facts.n_ctx]
    length = next((n for n in lengths if n not in taken), min(facts.n_ctx, 3))
    drawn = np.random.default_rng(0).integers(0, facts.d_vocab, size=(2, length))
    if pad is not None and facts.d_vocab > 1:
        drawn[drawn == pad] = (pad + 1) % facts.d_vocab
    return torch.as_tensor(drawn)


@contextmanager
def user_hooks_off(bridge: Any) -> Iterator[None]:
    """Take the user's own hooks off for a while, so that a probe neither fires nor obeys them."""
    points = {id(point): point for point in bridge.hook_dict.values()}
    kept = {key: (p._forward_hooks, p._forward_pre_hooks) for key, p in points.items()}
    for point in points.values():
        point._forward_hooks = type(point._forward_hooks)()
        point._forward_pre_hooks = type(point._forward_pre_hooks)()
    try:
        yield
    finally:
        for key, point in points.items():
            point._forward_hooks, point._forward_pre_hooks = kept[key]


def capture_all(bridge: Any, facts: ModelFacts, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Run the model once and keep what every candidate hook gave."""
    templates = {h for group in _CANDIDATES.values() for provider in group for h in provider.hooks}
    wanted = [t.format(layer=i) for t in (*templates, _LN1) for i in range(facts.n_layers)]
    seen: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(value: Any, hook: Any) -> None:
            if isinstance(value, Tensor):
                seen[name] = value.detach().to("cpu", copy=True)

        return keep

    listed = bridge.hook_dict
    with bridge.hooks(fwd_hooks=[(name, keeper(name)) for name in wanted if name in listed]):
        seen["logits"] = run().detach().to("cpu")
    return seen


def judge(seen: Mapping[str, Tensor], facts: ModelFacts, bridge: Any, length: int) -> Findings:
    """Choose a provider for every activation that the model gives in every layer."""
    found = Findings(causal=facts.causal)
    sizes = {
        "head": facts.n_heads,
        "kv_head": facts.n_kv_heads,
        "pos": length,
        "query_pos": length,
        "key_pos": length,
        "d_head": facts.d_head,
        "d_model": facts.d_model,
    }
    shapes = {name: tuple(sizes[d] for d in dims) for name, dims in _DIMS.items()}
    layers = range(facts.n_layers)

    def fits(name: str, provider: Provider) -> bool:
        values = [provider.value(seen, layer) for layer in layers]
        return all(v is not None and tuple(v.shape[1:]) == shapes[name] for v in values)

    for name in ("q", "k", "v", "z", "pattern", "resid_pre"):
        for provider in _CANDIDATES[name]:
            if fits(name, provider):
                found.providers[name] = provider
    judge = _Judge(seen, facts, found, fits)
    judge.pattern()
    judge.scores()
    judge.rotated()
    judge.attn_out(bridge)
    found.pre_norm = judge.pre_norm()
    return found


_DIMS: Final = {
    "q": ("pos", "head", "d_head"),
    "k": ("pos", "kv_head", "d_head"),
    "v": ("pos", "kv_head", "d_head"),
    "q_rot": ("pos", "head", "d_head"),
    "k_rot": ("pos", "kv_head", "d_head"),
    "z": ("pos", "head", "d_head"),
    "scores": ("head", "query_pos", "key_pos"),
    "pattern": ("head", "query_pos", "key_pos"),
    "resid_pre": ("pos", "d_model"),
    "attn_out": ("pos", "d_model"),
}


@dataclass
class _Judge:
    """Holds candidates against what each activation means."""

    seen: Mapping[str, Tensor]
    facts: ModelFacts
    found: Findings
    fits: Callable[[str, Provider], bool]

    def values(self, name: str, provider: Provider | None = None) -> list[Tensor]:
        chosen = provider or self.found.providers[name]
        layers = range(self.facts.n_layers)
        found = [chosen.value(self.seen, layer) for layer in layers]
        return [v.to(torch.float32) for v in found if v is not None]

    def tolerance(self) -> float:
        return TOLERANCE.get(getattr(torch, self.facts.dtype, torch.float32), 1e-4)

    def pattern(self) -> None:
        """Rows must be probabilities; whether later keys have any is seen here."""
        if "pattern" not in self.found.providers:
            return
        for value in self.values("pattern"):
            sums = value.sum(-1)
            short = bool((sums < 1 - 10 * self.tolerance()).any())
            if bool((value < 0).any()) or bool((sums > 1 + 10 * self.tolerance()).any()):
                del self.found.providers["pattern"]
                self.found.notes.append("hook_pattern gives no probabilities; it is not captured")
                return
            if short and not self.facts.sinks:
                self.found.notes.append("rows of the attention pattern do not sum to 1")
        later = [bool(value.triu(1).any()) for value in self.values("pattern")]
        self.found.causal = not any(later)
        self.facts = dataclasses.replace(self.facts, causal=self.found.causal)

    def scores(self) -> None:
        """Softmax of the scores must be the pattern, and they must not be it themselves."""
        (provider,) = _CANDIDATES["scores"]
        if "pattern" not in self.found.providers or not self.fits("scores", provider):
            return
        for scores, pattern in zip(
            self.values("scores", provider), self.values("pattern"), strict=True
        ):
            off = (scores.softmax(-1) - pattern).abs().max()
            same = (scores - pattern).abs().max() <= 1e-6
            if bool(same) or bool(off > self.tolerance()):
                return
        self.found.providers["scores"] = provider

    def rotated(self) -> None:
        """Softmax of scale q_rot . k_rot, bent and masked as the model does, must be the pattern.

        Queries and keys are tried in pairs of one kind.
        """
        if "pattern" not in self.found.providers or self.facts.sinks:
            return
        for q, k in zip(_CANDIDATES["q_rot"], _CANDIDATES["k_rot"], strict=True):
            if self.fits("q_rot", q) and self.fits("k_rot", k) and self._rebuilds(q, k):
                self.found.providers |= {"q_rot": q, "k_rot": k}
                return
        self.found.notes.append(
            "the queries and keys that the scores use cannot be had: q_rot and k_rot are not "
            "captured"
        )

    def _rebuilds(self, q: Provider, k: Provider) -> bool:
        for layer, pattern in enumerate(self.values("pattern")):
            queries = q.value(self.seen, layer)
            keys = k.value(self.seen, layer)
            if queries is None or keys is None:
                return False
            rebuilt, largest = rebuild_pattern(queries, keys, self.facts, layer)
            # The model rounds its scores to its own dtype, the more the larger they are.
            rounding = 4 * torch.finfo(queries.dtype).eps * largest
            if bool((rebuilt - pattern).abs().max() > min(self.tolerance() + rounding, 0.5)):
                return False
        return True

    def attn_out(self, bridge: Any) -> None:
        """Find where the sum of the heads, z W_O + b_O, is to be had."""
        fitting = [p for p in _CANDIDATES["attn_out"] if self.fits("attn_out", p)]
        if not fitting:
            return
        if "z" in self.found.providers:
            projections = [
                output_projection(bridge, layer, self.facts) for layer in range(self.facts.n_layers)
            ]
            if all(p is not None for p in projections):
                sums = [
                    torch.einsum("bphd,hde->bpe", z, p[0]) + p[1]
                    for z, p in zip(self.values("z"), projections, strict=True)
                    if p is not None
                ]
                for provider in fitting:
                    pairs = zip(self.values("attn_out", provider), sums, strict=True)
                    if all(_close(a, b, self.tolerance()) for a, b in pairs):
                        self.found.providers["attn_out"] = provider
                        return
                self.found.notes.append(
                    "the output of attention is not z W_O + b_O; results of heads do not add up "
                    "to it"
                )
        self.found.providers["attn_out"] = fitting[0]

    def pre_norm(self) -> bool:
        if "resid_pre" not in self.found.providers:
            return False
        into = [self.seen.get(_LN1.format(layer=i)) for i in range(self.facts.n_layers)]
        return all(
            a is not None and torch.equal(a.to(torch.float32), b)
            for a, b in zip(into, self.values("resid_pre"), strict=True)
        )


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))


def rebuild_pattern(q: Tensor, k: Tensor, facts: ModelFacts, layer: int) -> tuple[Tensor, float]:
    """Return attention as the facts say it is made, in float32.

    Parameters
    ----------
    q : Tensor[batch, pos, head, d_head]
    k : Tensor[batch, pos, kv_head, d_head]
    facts : ModelFacts
    layer : int

    Returns
    -------
    Tensor[batch, head, query_pos, key_pos]
    float
        The largest score, in absolute value.
    """
    groups = facts.n_heads // facts.n_kv_heads
    keys = k.to(torch.float32).repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(torch.float32), keys) * facts.scales[layer]
    if facts.soft_cap is not None:
        scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
    largest = float(scores.abs().max())
    n = scores.shape[-1]
    back = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    if facts.alibi_slopes is not None:
        scores = scores - torch.tensor(facts.alibi_slopes)[:, None, None] * back
    window = facts.windows[layer]
    if facts.causal:
        scores = scores.masked_fill(back < 0, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(back.abs() >= window, -torch.inf)
    return scores.softmax(-1), largest
