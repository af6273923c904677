"""What is settled before a pass begins: analyses, needs, prompts and the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.corpora import CorpusSpec, Prompts, as_corpus, load_prompts
from attnlens.errors import NeedError
from attnlens.needs import MAIN, Need, requests
from attnlens.plan import Plan, make_plan
from attnlens.plan.derivation import Abilities, Lean
from attnlens.plan.machine import readable_bytes
from attnlens.selection import Selected

if TYPE_CHECKING:
    from attnlens.models import ModelFacts
    from attnlens.statistics import Statistic

#: Up to how many parameters several twins are made; a larger model gets one.
_SMALL_MODEL = 50_000_000

#: Prompts of a corpus that an analysis asks for beside the run's own.
_OTHER_SAMPLES = 16


def number_of_twins(n_params: int) -> int:
    """Return how many twins are made unless told otherwise: three, or one of a large model."""
    return 3 if n_params <= _SMALL_MODEL else 1


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What one pass over a model is for.

    Attributes
    ----------
    selected : sequence of Selected
        The analyses whose needs are met.
    needs : sequence of Need
        Further needs, of nobody in particular.
    spec : CorpusSpec or Prompts
    twins : int or None
        None: :func:`number_of_twins`.
    layers, heads, positions, batch_size, dtypes, lean
        As :func:`attnlens.plan.make_plan` takes them.
    """

    selected: Sequence[Selected] = ()
    needs: Sequence[Need] = ()
    spec: CorpusSpec | Prompts
    twins: int | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    positions: Any = None
    batch_size: int | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    lean: Lean = "auto"

    @property
    def statistics(self) -> dict[str, type[Statistic]]:
        """Statistics that the analyses bring."""
        return {s.name: s for one in self.selected for s in one.analysis.statistics}

    def plan(
        self,
        facts: ModelFacts,
        tokenizer: Any,
        out: Path | None,
        available: Collection[str] | None = None,
        lean_problem: Callable[[], str | None] | None = None,
    ) -> tuple[Plan, dict[str, Prompts]]:
        """Plan the pass over this model.

        Parameters
        ----------
        facts : ModelFacts
        tokenizer : transformers.PreTrainedTokenizerBase or None
        out : pathlib.Path or None
            Where the store will lie.
        available : collection of str, optional
            Activations that the model gives; optional needs for others are dropped.
        lean_problem : callable, optional
            Says why the model cannot run lean; None if it can.

        Returns
        -------
        plan : Plan
        prompts : dict from corpus name to Prompts
            The run's own corpus has the name ``""``.
        """
        needs = [*(s.needs for s in self.selected), self._own_needs()]
        wanted, of_twins = requests(
            [n for n in one if not _out_of_reach(n, available)] for one in needs
        )
        count = number_of_twins(facts.n_params) if self.twins is None else self.twins
        prompts = self._prompts([*wanted, *of_twins], facts, tokenizer)
        plan = make_plan(
            facts,
            prompts,
            wanted,
            of_twins if count else {},
            n_twins=count,
            batch_size=self.batch_size,
            layers=self.layers,
            heads=self.heads,
            positions=self.positions,
            dtypes=self.dtypes,
            out=out,
            lean=self.lean,
            abilities=Abilities(
                available, lean_problem, {n: s.of for n, s in self.statistics.items()}
            ),
        )
        notes = (*prompts[MAIN].notes, *plan.notes, *self._memory(facts, prompts[MAIN]))
        return replace(plan, notes=notes), prompts

    def _memory(self, facts: ModelFacts, own: Prompts) -> list[str]:
        """Tell, for people, what the analyses will hold in memory after the pass."""
        tokens = sum(own.lengths)
        notes = []
        for one in self.selected:
            try:
                size = int(one.analysis.memory(facts, tokens))
            except Exception as error:
                notes.append(f"{one.name} cannot tell its memory: {type(error).__name__}: {error}")
                continue
            if size:
                notes.append(
                    f"{one.name}: about {readable_bytes(size)} of memory while it computes."
                )
        return notes

    def _own_needs(self) -> list[Need]:
        # Twins that were asked for by number are made even if no analysis wants them.
        asked = bool(self.twins) and bool(self.needs)
        return [*self.needs, *([Need("twin", "twin")] if asked else [])]

    def _prompts(
        self, corpora: Iterable[str], facts: ModelFacts, tokenizer: Any
    ) -> dict[str, Prompts]:
        own = self.spec
        if not isinstance(own, Prompts):
            own = load_prompts(own, tokenizer=tokenizer, facts=facts)
        prompts = {MAIN: own}
        for name in corpora:
            if name != MAIN and name not in prompts:
                spec = CorpusSpec(
                    name=name,
                    samples=min(len(own.tokens), _OTHER_SAMPLES),
                    length=max(16, min(max(own.lengths), facts.n_ctx or 16)),
                    seed=own.seed,
                )
                prompts[name] = load_prompts(spec, tokenizer=tokenizer, facts=facts)
        return prompts


def _out_of_reach(need: Need, available: Collection[str] | None) -> bool:
    """Tell whether an optional need asks for what the model does not give."""
    if not need.optional or available is None or need.kind not in ("activation", "statistic"):
        return False
    return need.name.partition(".")[0] not in available


def corpus_of(value: Any, *, seed: int, **fields: Any) -> CorpusSpec | Prompts:
    """Make a spec of whatever a person passes as a corpus; loaded prompts stay as they are."""
    if isinstance(value, Prompts):
        return value
    given = {name: field for name, field in fields.items() if field is not None}
    if not isinstance(value, CorpusSpec):
        given["seed"] = seed
    return as_corpus(value, **given)


def parse_needs(words: Iterable[str]) -> list[Need]:
    """Read needs that a person names, refusing what is no part of a store.

    Raises
    ------
    NeedError
    """
    needs = [Need.parse(word, offered=("activation", "statistic", "weights")) for word in words]
    for need in needs:
        if need.kind in ("analysis", "model"):
            raise NeedError(
                f"{need.name!r} is nothing that a store can hold.",
                hint="Name activations, statistics or weights.",
            )
    return needs
