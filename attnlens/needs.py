"""What an analysis may ask for: the words of ``Analysis.requires``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from attnlens.activations import ACTIVATIONS, nearest
from attnlens.errors import NeedError

Kind = Literal["activation", "statistic", "weights", "model", "analysis", "twin"]

#: Kinds of which there are many.
_NAMED: Final = ("activation", "statistic")

_ROWS: Final = ("prompt", "layer", "head")
_VECTORS: Final = {"q": "head", "k": "kv_head", "v": "kv_head", "z": "head"}

#: The built-in statistics: their dimensions, and what they are. Their classes live in
#: :mod:`attnlens.statistics`, which loads torch.
STATISTICS_DESCRIBED: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "pattern.entropy": (
        _ROWS, "Shannon entropy of attention, mean over query rows, in nats."
    ),
    "pattern.entropy_share": (
        _ROWS, "Each row's entropy over ln(visible keys), mean over the rows that see two keys or "
        "more."
    ),
    "pattern.max": (_ROWS, "Largest weight of each row, mean over query rows."),
    "pattern.received": (
        ("layer", "head", "key_pos"),
        "Mean weight that a key gets from the queries that can see it.",
    ),
    "pattern.by_offset": (
        ("layer", "head", "offset"),
        "Mean weight at distance query - key, over the rows that have a key at that distance.",
    ),
    **{
        f"{of}.mean": (("layer", head, "d_head"), f"Mean vector of a head, per token. Of {of}.")
        for of, head in _VECTORS.items()
    },
    **{
        f"{of}.second_moment": (
            ("layer", head, "d_head", "d_head_2"),
            f"Uncentred second moment of a head's vectors, per token. Of {of}.",
        )
        for of, head in _VECTORS.items()
    },
}  # fmt: skip

#: Names of the built-in statistics.
BUILTIN_STATISTICS = frozenset(STATISTICS_DESCRIBED)


@dataclass(frozen=True)
class Need:
    """One thing that an analysis asks for.

    Attributes
    ----------
    kind : {"activation", "statistic", "weights", "model", "analysis", "twin"}
    name : str
        The activation's, statistic's or analysis's name; the kind's own name otherwise.
    corpus : str or None
        Another corpus than the run's, as in ``"pattern@repeated-random"``.
    optional : bool
        Taken where it can be had, as in ``"q_rot?"``; the analysis asks ``"q_rot" in store``.
    """

    kind: Kind
    name: str
    corpus: str | None = None
    optional: bool = False

    @classmethod
    def parse(
        cls,
        text: str,
        statistics: Collection[str] = (),
        *,
        offered: Collection[Kind] = get_args(Kind),
    ) -> Need:
        """Read one item of ``requires``.

        Parameters
        ----------
        text : str
            For example ``"pattern"``, ``"pattern.entropy@repeated-random"``, ``"q_rot?"``,
            ``"analysis:cp"``.
        statistics : collection of str
            Names of the statistics that the analysis brings itself.
        offered : collection of str
            The kinds that the message for an unknown name lists.

        Raises
        ------
        NeedError
            If nothing of that name exists; the message names the nearest.
        """
        optional = text.endswith("?")
        name, _, corpus = text.removesuffix("?").partition("@")
        if name in ("weights", "model", "twin"):
            return cls(name, name, corpus or None, optional)  # type: ignore[arg-type]
        if name.startswith("analysis:"):
            return cls("analysis", name.removeprefix("analysis:"))
        if name in ACTIVATIONS:
            return cls("activation", name, corpus or None, optional)
        known = BUILTIN_STATISTICS | set(statistics)
        if name in known:
            return cls("statistic", name, corpus or None, optional)
        names: dict[Kind, Collection[str]] = {
            "activation": ACTIVATIONS, "statistic": known, "analysis": ("analysis:NAME",)
        }  # fmt: skip
        choices = {name for kind in offered for name in names.get(kind, (kind,))}
        near = nearest(name, choices)
        raise NeedError(
            f"{text!r} names no {' or '.join(k for k in offered if k in _NAMED)}.",
            hint=(f"Did you mean {near!r}? " if near else "")
            + f"Known are: {', '.join(sorted(choices))}.",
        )


@dataclass
class Request:
    """What one store must hold: the union of the needs of the analyses for one corpus.

    Attributes
    ----------
    activations, statistics : set of str
    weights : bool
    """

    activations: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)
    weights: bool = False

    def add(self, need: Need) -> None:
        """Add one need, resolving what a derived activation is computed from."""
        if need.kind == "statistic":
            self.statistics.add(need.name)
        elif need.kind == "weights":
            self.weights = True
        elif need.kind == "activation":
            sources = ACTIVATIONS[need.name].derived_from or (need.name,)
            for source in sources:
                if source == "weights":
                    self.weights = True
                else:
                    self.activations.add(source)

    def __bool__(self) -> bool:
        return bool(self.activations or self.statistics or self.weights)


#: The run's own corpus, in the mappings from corpus to :class:`Request`.
MAIN = ""


def requests(
    needs: Iterable[Iterable[Need]],
) -> tuple[Mapping[str, Request], Mapping[str, Request]]:
    """Gather the needs of several analyses.

    Parameters
    ----------
    needs : iterable of iterable of Need
        One inner iterable for each analysis.

    Returns
    -------
    model, twins : mapping from corpus name to Request
        What to capture from the model, and what from its twins. The run's own corpus has the
        name ``""``.
    """
    model: dict[str, Request] = {MAIN: Request()}
    twins: dict[str, Request] = {}
    for one in needs:
        items = list(one)
        targets = [model]
        if any(n.kind == "twin" for n in items):
            targets.append(twins)
        for need in items:
            if need.kind in ("activation", "statistic", "weights"):
                for target in targets:
                    target.setdefault(need.corpus or MAIN, Request()).add(need)
    return model, twins
