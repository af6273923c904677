"""What is captured instead of attention matrices, and whether any are made at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from attnlens.activations import ACTIVATIONS
from attnlens.errors import OptionError, UnsupportedModelError
from attnlens.needs import Request
from attnlens.store.rules import DERIVED, rule_of

if TYPE_CHECKING:
    from attnlens.models import ModelFacts

#: Whether to capture without attention matrices; ``"auto"`` decides by `LEAN_LENGTH`.
Lean = bool | Literal["auto"]

#: Prompts of so many tokens or more are captured lean, where nothing speaks against it.
LEAN_LENGTH: Final = 1024

_SOURCES: Final = ("q_rot", "k_rot")

#: What the first batch decides.
_IF_AGREEING: Final = ", if they agree with what the model gives; else stored."


@dataclass(frozen=True)
class Abilities:
    """What is known of a model beyond its facts.

    Attributes
    ----------
    available : collection of str or None
        Activations that it gives; None before it is loaded.
    lean_problem : callable or None
        Says why it cannot run lean (`attnlens.models.Model.lean_problem`); None before it is
        loaded.
    sources : mapping from str to str
        Statistics that analyses bring, and the activation that each is of.
    """

    available: Collection[str] | None = None
    lean_problem: Callable[[], str | None] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def source(self, statistic: str) -> str:
        """Return the activation that a statistic is of."""
        return self.sources.get(statistic, statistic.partition(".")[0])


@dataclass(frozen=True)
class Choice:
    """How one store does without matrices.

    Attributes
    ----------
    activations : tuple of str
        What is stored.
    derived : tuple of str
        What is asked for and computed from ``q_rot`` and ``k_rot`` on reading.
    lean : bool
    not_lean : str
        Why prompts that are long enough are not captured lean; empty elsewhere.
    notes : tuple of str
    """

    activations: tuple[str, ...]
    derived: tuple[str, ...] = ()
    lean: bool = False
    not_lean: str = ""
    notes: tuple[str, ...] = ()


def choose(
    facts: ModelFacts,
    request: Request,
    abilities: Abilities,
    *,
    length: int,
    lean: Lean,
    whole: bool,
    dtypes: Mapping[str, str],
    size: Callable[[str], int],
) -> Choice:
    """Choose what to store, and whether to capture lean.

    Parameters
    ----------
    facts : ModelFacts
    request : Request
    abilities : Abilities
    length : int
        Tokens of the longest prompt.
    lean : bool or "auto"
    whole : bool
        Whether all positions are captured.
    dtypes : mapping from str to str
        How activations were asked to be stored.
    size : callable
        Gives the bytes that an activation takes on the disk.

    Raises
    ------
    OptionError
        If lean capture was asked for, and something that cannot be had without matrices too.
    UnsupportedModelError
        If lean capture was asked for, and the model cannot run lean.
    """
    asked = tuple(name for name in ACTIVATIONS if name in request.activations)
    if not asked and not request.statistics:
        return Choice(())
    square = tuple(name for name in DERIVED if name in asked)
    obstacle = _obstacle(facts, request, square, abilities, whole=whole, dtypes=dtypes)
    if lean is True and obstacle:
        raise OptionError(
            f"Lean capture makes no attention matrices, but {obstacle}.",
            hint="Leave out lean (--no-lean captures with matrices), or what needs them.",
        )
    wanted = lean is True or (lean == "auto" and length >= LEAN_LENGTH)
    tried = abilities.lean_problem
    not_lean = ""
    if wanted:
        not_lean = obstacle or (tried() if tried is not None else None) or ""
    if lean is True and not_lean:
        raise UnsupportedModelError(
            f"{facts.name!r} ({facts.architecture}) cannot run lean: {not_lean}.",
            hint="Leave out lean (--no-lean captures with matrices).",
        )
    leanly = wanted and not not_lean
    notes: list[str] = []
    if not_lean:
        notes.append(f"Captured with attention matrices, not lean: {not_lean}.")
    added = [name for name in _SOURCES if name not in asked]
    smaller = sum(map(size, added)) < sum(map(size, square))
    # Half precision rounds in the model itself: its patterns are not quite what q and k give.
    exact = facts.dtype in ("float32", "float64")
    derive = bool(square) and not obstacle and (leanly or (exact and smaller))
    if leanly:
        doubt = "" if tried is not None else ", if it can, which is tried when it is loaded"
        notes.append(f"Lean: the model runs without attention matrices{doubt}.")
    if derive:
        asked = tuple(n for n in ACTIVATIONS if n in {*asked, *_SOURCES} and n not in square)
        notes.append(
            f"{' and '.join(square)}: computed from q_rot and k_rot on reading"
            + ("." if leanly else _IF_AGREEING)
        )
    return Choice(asked, square if derive else (), leanly, not_lean, tuple(notes))


def settled(notes: Iterable[str], stored: Collection[str]) -> list[str]:
    """Return a plan's notes after the capture, which has decided what is computed on reading.

    Parameters
    ----------
    notes : iterable of str
    stored : collection of str
        The activations that the run's own store holds.
    """
    found = []
    for note in notes:
        names, _, condition = note.partition(": computed from q_rot and k_rot on reading")
        if condition == _IF_AGREEING and {*names.split(" and ")} <= {*stored}:
            note = f"{names}: stored, for q_rot and k_rot give other weights than the model."
        elif condition == _IF_AGREEING:
            note = note.replace(condition, ", which agree with what the model gives.")
        found.append(note)
    return found


def _obstacle(
    facts: ModelFacts,
    request: Request,
    square: tuple[str, ...],
    abilities: Abilities,
    *,
    whole: bool,
    dtypes: Mapping[str, str],
) -> str | None:
    """Say why something that was asked for cannot be had from queries and keys alone."""
    if not square and not any(abilities.source(s) in DERIVED for s in request.statistics):
        return None
    for name in sorted(request.statistics):
        if abilities.source(name) == "scores":
            return f"{name} is a statistic of the scores"
    if square and not whole:
        return f"some positions of {square[0]} are asked for"
    for name in square:
        if name in dtypes:
            return f"{name} is to be stored as {dtypes[name]}"
    for name in _SOURCES:
        if square and dtypes.get(name) == "float16":
            return f"{name} is to be stored as float16, too coarse for patterns"
    rules = [rule_of(facts.to_json(), layer) for layer in range(facts.n_layers)]
    if None in rules:
        return f"the scores of {facts.architecture} are not made of queries and keys alone"
    if "scores" in square and facts.alibi_slopes is not None:
        return "scores under ALiBi are known up to a constant for each row"
    missing = [
        n for n in _SOURCES if abilities.available is not None and n not in abilities.available
    ]
    if missing:
        return f"{facts.architecture} does not give {' and '.join(missing)}"
    return None
