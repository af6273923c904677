"""Random tokens that repeat: what induction and duplicate-token heads show themselves on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from attnlens.corpora.encode import Encoder, Tokenizer
from attnlens.corpora.prompts import TokenIds
from attnlens.corpora.spec import DEFAULT_SAMPLES, CorpusSpec
from attnlens.errors import CorpusError

if TYPE_CHECKING:
    from attnlens.models import ModelFacts

# Vocabulary entries that hold a place and were never trained.
_PLACEHOLDER: Final = re.compile(r"[\[<]\|?_?(unused|reserved|extra_id|pad)[\w-]*\|?[\]>]", re.I)


def repeated_random(
    spec: CorpusSpec, tokenizer: Tokenizer | None, facts: ModelFacts, *, length: int
) -> tuple[list[TokenIds], str, int]:
    """Draw prompts of BOS and a random stretch that repeats to the end.

    Tokens in a stretch differ, as long as the vocabulary has enough, so that each token has one
    place to look back to per round.

    Parameters
    ----------
    spec : CorpusSpec
    tokenizer : tokenizer of transformers, or None
        Without one, BOS is the ``bos_token_id`` of the model's configuration, if any.
    facts : ModelFacts
    length : int
        Tokens in each prompt, special tokens included.

    Returns
    -------
    prompts : list of ndarray [pos], int32
    bos : {"prepended", "absent"}
    period : int
        Tokens in the stretch.

    Raises
    ------
    CorpusError
        If nothing would repeat, or the vocabulary has no ordinary tokens.
    """
    if tokenizer is not None:
        encoder = Encoder(tokenizer, facts, spec.bos)
        prefix, suffix = encoder.prefix, encoder.suffix
    else:
        prefix, suffix = _configured_bos(facts, spec.bos), ()
    body = length - len(prefix) - len(suffix)
    period = spec.period if spec.period is not None else max(1, body // 2)
    if body <= period:
        raise CorpusError(
            f"A stretch of {period} tokens does not repeat within {length}.",
            hint=f"Take a length of {length - body + 2 * period} or more, or a shorter period.",
        )
    ordinary = ordinary_ids(tokenizer, facts)
    prompts = []
    for sample in range(spec.samples or DEFAULT_SAMPLES):
        rng = np.random.default_rng([spec.seed, sample])
        stretch = rng.choice(ordinary, period, replace=period > len(ordinary))
        prompts.append(np.array([*prefix, *np.resize(stretch, body), *suffix], np.int32))
    return prompts, "prepended" if prefix else "absent", period


def _configured_bos(facts: ModelFacts, bos: bool | None) -> tuple[int, ...]:
    found = facts.config.get("bos_token_id")
    # Small models often keep the default configuration's BOS, far outside their vocabulary.
    known = isinstance(found, int) and 0 <= found < facts.d_vocab and facts.causal
    if bos and not known:
        raise CorpusError(
            f"BOS was asked for, but {facts.name!r} has no such token.",
            hint="Leave the choice to the model.",
        )
    return (found,) if known and bos is not False and isinstance(found, int) else ()


def ordinary_ids(tokenizer: Tokenizer | None, facts: ModelFacts) -> npt.NDArray[np.int64]:
    """Return the ids that stand for pieces of text: no special, added or placeholder tokens.

    Returns
    -------
    ndarray [id], int64
        Ascending, all inside the vocabulary of both tokenizer and model.
    """
    if tokenizer is None:
        keys = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")
        found = [facts.config.get(key) for key in keys]
        special = {i for ids in found if ids is not None for i in np.atleast_1d(ids).tolist()}
        ids = [i for i in range(facts.d_vocab) if i not in special]
    else:
        special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        ids = sorted(
            i
            for token, i in tokenizer.get_vocab().items()
            if 0 <= i < facts.d_vocab and i not in special and not _PLACEHOLDER.fullmatch(token)
        )
    if not ids:
        raise CorpusError(f"The vocabulary of {facts.name!r} has no ordinary tokens.")
    return np.array(ids, np.int64)
