"""Which tokens are decomposed: whole prompts where they fit, chosen by the seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

#: Prompts that are looked at, if there are as many: fewer cannot be split in halves that differ.
_LEAST_PROMPTS = 8


@dataclass(frozen=True)
class Sample:
    """Tokens of some prompts, in the order of prompts and positions.

    Attributes
    ----------
    prompt, position : ndarray of int [token]
    text : list of str
        Literal text of each token.
    left_out : int
        Tokens of the store that were not taken.
    """

    prompt: Ints
    position: Ints
    text: list[str]
    left_out: int

    @property
    def prompts(self) -> Ints:
        """Ids of the prompts, ascending."""
        return np.asarray(np.unique(self.prompt))

    def remark(self, plugin: str) -> list[str]:
        """Say how many tokens were left out, and what decides it."""
        if not self.left_out:
            return []
        taken = len(self.text)
        return [
            f"{self.left_out:,} of {taken + self.left_out:,} tokens were left out; "
            f"-o {plugin}.max_tokens={taken + self.left_out} takes all."
        ]

    def positions_of(self, prompt: int) -> Ints:
        """Return the positions that were taken of one prompt."""
        return np.asarray(self.position[self.prompt == prompt])


def choose(store: Any, name: str, *, most: int, seed: int, exclude_first: bool) -> Sample:
    """Choose tokens: all of them, or those of prompts drawn by the seed.

    At least eight prompts are drawn where there are as many; each gives its first tokens up to a
    common bound.

    Parameters
    ----------
    store : View or Store
    name : str
        The activation whose positions are on offer.
    most : int
        Tokens at most.
    seed : int
    exclude_first : bool
        Leave out the first position of every prompt that has others.
    """
    offered: dict[int, Ints] = {}
    for unit in store.units():
        labels = np.asarray(unit[name]["pos"].values, dtype=np.int64)
        if exclude_first and len(labels) > 1:
            labels = labels[labels > 0]
        offered |= {int(p): labels for p in unit.prompt_ids}
    prompts = np.array(sorted(offered))
    sizes = np.array([len(offered[p]) for p in prompts])
    count = min(len(prompts), max(_LEAST_PROMPTS, most // max(int(np.median(sizes)), 1)))
    if count < len(prompts):
        rng = np.random.default_rng([seed, 1])
        chosen = np.sort(rng.permutation(len(prompts))[:count])
    else:
        chosen = np.arange(len(prompts))
    bound = _bound(sizes[chosen], most)
    prompt, position, text = [], [], []
    for p in prompts[chosen]:
        taken = offered[p][:bound]
        words = store.token_strings(int(p))
        prompt.append(np.full(len(taken), p))
        position.append(taken)
        text += [words[i] for i in taken]
    return Sample(
        np.concatenate(prompt), np.concatenate(position), text, int(sizes.sum()) - len(text)
    )


def _bound(sizes: Ints, most: int) -> int:
    """Return the largest common bound on a prompt's tokens that keeps their sum within `most`."""
    low, high = 1, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(sizes, middle).sum()) <= most:
            low = middle
        else:
            high = middle - 1
    return low


def blocks(store: Any, name: str, sample: Sample, elements: int) -> Iterator[Any]:
    """Read an activation with heads in blocks of tokens, as ``[layer * head, token, feature]``.

    Blocks come in the order of the sample, each of at most about `elements` numbers, or of one
    prompt.

    Parameters
    ----------
    store : View or Store
    name : {"result", "z"}
    sample : Sample
    elements : int

    Yields
    ------
    ndarray
        Float32 or wider.
    """
    homes = {int(p): (unit, i) for unit in store.units() for i, p in enumerate(unit.prompt_ids)}
    opened: dict[int, Any] = {}
    for run in _runs(homes, sample):
        unit = homes[run[0]][0]
        data = opened.setdefault(unit.id, unit[name])
        place = np.searchsorted(data["pos"].values, sample.positions_of(run[0]))
        sizes = data.sizes
        one = sizes["layer"] * sizes["head"] * sizes[data.dims[-1]] * len(place)
        step = max(elements // max(one, 1), 1)
        for start in range(0, len(run), step):
            rows = [homes[p][1] for p in run[start : start + step]]
            part = data.isel(prompt=rows, pos=place).transpose(
                "layer", "head", "prompt", "pos", ...
            )
            values = part.values
            yield values.reshape(values.shape[0] * values.shape[1], -1, values.shape[-1])


def _runs(homes: dict[int, Any], sample: Sample) -> Iterator[list[int]]:
    """Group consecutive prompts of one unit that give equally many tokens."""
    run: list[int] = []
    key: tuple[int, int] | None = None
    for prompt in sample.prompts.tolist():
        this = (homes[prompt][0].id, len(sample.positions_of(prompt)))
        if run and this != key:
            yield run
            run = []
        run, key = [*run, prompt], this
    if run:
        yield run
