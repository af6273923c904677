"""The base classes of a plugin: what an analysis needs, computes, draws and claims."""

from __future__ import annotations

import contextlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from attnlens.activations import nearest
from attnlens.errors import OptionError
from attnlens.hookspecs import API_VERSION
from attnlens.needs import Need
from attnlens.wording import beside

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

    from attnlens.statistics import Statistic
    from attnlens.view import View


class Skip(Exception):
    """Raised by an analysis, figure or table that has nothing to say here, with the reason."""


class Options(BaseModel):
    """Base of an analysis's options: a pydantic model whose fields carry descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def read(cls, values: Mapping[str, Any], *, prefix: str = "") -> Options:
        """Build the options from strings or typed values, refusing what does not fit.

        A string is read as JSON where that validates (``8``, ``0.5``, ``true``), then as it is,
        then as a list separated by commas.

        Parameters
        ----------
        values : mapping
            Option name to value.
        prefix : str
            The analysis's name, for error messages.

        Raises
        ------
        OptionError
            For an unknown name (with the nearest right one) or a value that does not fit.
        """
        typed: dict[str, Any] = {}
        for name, value in values.items():
            label = f"{prefix}.{name}" if prefix else name
            known = cls.model_fields.get(name)
            if known is None:
                near = nearest(name, cls.model_fields)
                offered = ", ".join(cls.model_fields) or "none"
                raise OptionError(
                    f"There is no option {label!r}.",
                    hint=(f"Did you mean {near!r}? " if near else "") + f"Options: {offered}.",
                )
            typed[name] = cls._read_one(name, value, label)
        try:
            return cls(**typed)
        except pydantic.ValidationError as error:
            raise OptionError(
                f"The options of {prefix or cls.__name__} do not fit together: {_reason(error)}"
            ) from error

    @classmethod
    def _read_one(cls, name: str, value: Any, label: str) -> Any:
        attempts = [value]
        if isinstance(value, str):
            attempts.append(value.split(","))
            with contextlib.suppress(ValueError):
                attempts.insert(0, json.loads(value))
        reason = ""
        for attempt in attempts:
            wrong = cls._complaint(name, attempt)
            if wrong is None:
                return attempt
            if attempt is value:
                reason = wrong
        what = cls.model_fields[name].description
        raise OptionError(
            f"{label}={value!r} is not valid: {reason}.",
            hint=f"{label}: {what}" if what else None,
        )

    @classmethod
    def _complaint(cls, name: str, value: Any) -> str | None:
        """Return what is wrong with one field's value, whatever the others hold."""
        try:
            cls(**{name: value})
        except pydantic.ValidationError as error:
            own = [e for e in error.errors(include_url=False) if e["loc"][:1] == (name,)]
            return _told(own) or None
        return None


def _reason(error: pydantic.ValidationError) -> str:
    return _told(error.errors(include_url=False))


def _told(errors: Iterable[Any]) -> str:
    """Join pydantic's messages, without the class of the error that a validator raised."""
    return "; ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in errors))


class Finding(BaseModel):
    """A claim about the model, with the numbers that support it.

    Attributes
    ----------
    claim : str
        A short stable word, such as ``"low-rank-heads"``.
    holds : bool
        Whether the claim is made.
    text : str
        The claim, or its absence, in a sentence for people.
    evidence : dict
        The numbers it rests on.
    null : dict
        The same numbers by chance, from the twins or a closed form.
    analysis : str
        Which analysis makes the claim; filled in by the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str = Field(min_length=1, pattern=r"^[a-z0-9][a-z0-9.-]*$")
    holds: bool
    text: str = Field(min_length=1)
    evidence: dict[str, Any] = {}
    null: dict[str, Any] = {}
    analysis: str = ""

    def _repr_html_(self) -> str:
        mark = "✓" if self.holds else "–"
        rows = "".join(
            f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value or '–')}</td>"
            f"<td>{escape(chance or '–')}</td></tr>"
            for name, value, chance in beside(self.evidence, self.null)
        )
        numbers = (
            "<table style='text-align:left'><thead><tr><th scope='col'></th>"
            "<th scope='col'>this model</th><th scope='col'>by chance</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
        return (
            f"<div>{mark} <code>{escape(self.analysis)} {escape(self.claim)}</code> "
            f"{escape(self.text)}{numbers if rows else ''}</div>"
        )

    @pydantic.field_validator("evidence", "null", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return plain(value)


def plain(value: Any) -> Any:
    """Turn numpy and xarray scalars and arrays into what JSON can hold; NaN becomes None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


@dataclass(frozen=True)
class Drawing:
    """A method of an analysis that shows its result, as the report lists it.

    Attributes
    ----------
    kind : {"figure", "table", "highlight"}
    name : str
        The method's name, and the file's.
    title : str
    """

    kind: str
    name: str
    title: str


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _marker(kind: str, title: str) -> Callable[[_Method], _Method]:
    def mark(method: _Method) -> _Method:
        method.__attnlens_drawing__ = Drawing(kind, method.__name__, title)  # type: ignore[attr-defined]
        return method

    return mark


def figure(title: str) -> Callable[[_Method], _Method]:
    """Mark a method ``(self, result, figure)`` that draws on a matplotlib Figure.

    A string that the method returns is the figure's alternative text, for those who cannot see
    it: what is to be seen, with the main numbers. Otherwise the title, the axes' labels and the
    range of the data serve.
    """
    return _marker("figure", title)


def table(title: str) -> Callable[[_Method], _Method]:
    """Mark a method ``(self, result)`` that returns a pandas DataFrame."""
    return _marker("table", title)


def highlight(title: str) -> Callable[[_Method], _Method]:
    """Mark a method ``(self, result)`` that returns :class:`Highlight` rows: weighted tokens."""
    return _marker("highlight", title)


class Highlight(BaseModel):
    """One line of text whose tokens are coloured by a weight.

    Attributes
    ----------
    label : str
    tokens : list of str
        Literal text of each token.
    weights : list of float
        One for each token; the sign decides the hue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    tokens: list[str]
    weights: list[float]

    @pydantic.model_validator(mode="after")
    def _same_length(self) -> Highlight:
        if len(self.tokens) != len(self.weights):
            raise ValueError(f"{len(self.tokens)} tokens for {len(self.weights)} weights")
        return self


class Analysis(ABC):
    """Turns a store into a labelled result, and draws and judges that result.

    Subclasses set `name` and `requires` and write `compute`; the rest is optional. Options are
    keyword arguments: ``LookBack(normalize=False).compute(store)``.

    Attributes
    ----------
    name : str
        Its one name: for selecting, listing and options; the same as its entry point's.
    requires : tuple of str
        What it reads: activations, statistics, ``"weights"``, ``"model"``, ``"analysis:NAME"``,
        ``"twin"``, each optionally on another corpus (``"pattern@repeated-random"``). With ``?``
        at the end it is taken where it can be had (``"q_rot?"``). It may be a property that looks
        at ``self.options``.
    statistics : tuple of type
        Statistics of its own, each a :class:`attnlens.statistics.Statistic`.
    requires_api : int
        The lowest :data:`attnlens.hookspecs.API_VERSION` that it works with.
    permutes_heads : bool
        Whether permuting the heads of a store permutes its result along ``head`` and changes
        nothing else; :func:`attnlens.testing.check_analysis` holds it to that.
    options : Options
        The validated options.

    Raises
    ------
    OptionError
        If an option is unknown or does not fit.
    """

    name: ClassVar[str]
    requires: tuple[str, ...] = ()
    statistics: ClassVar[tuple[type[Statistic], ...]] = ()
    requires_api: ClassVar[int] = API_VERSION
    permutes_heads: ClassVar[bool] = False
    Options: ClassVar[type[Options]] = Options

    def __init__(self, **options: Any) -> None:
        self.options: Any = self.Options.read(options, prefix=getattr(self, "name", ""))

    def __repr__(self) -> str:
        chosen = self.options.model_fields_set
        given = ", ".join(f"{name}={value!r}" for name, value in self.options if name in chosen)
        return f"{type(self).__name__}({given})"

    @abstractmethod
    def compute(self, store: View) -> xr.Dataset:
        """Read the store and return one labelled dataset. Never draws."""

    def findings(self, result: xr.Dataset) -> Iterable[Finding]:
        """Judge the result: which claims hold, with the numbers and what they are by chance."""
        return ()

    def memory(self, facts: Any, tokens: int) -> int:
        """Estimate the bytes that `compute` holds at once, for the plan; 0 where it is little.

        Parameters
        ----------
        facts : ModelFacts
        tokens : int
            Tokens of all prompts together.
        """
        return 0

    def needs(self) -> list[Need]:
        """Parse `requires`.

        Raises
        ------
        NeedError
            If an item names nothing that exists.
        """
        own = [s.name for s in self.statistics]
        return [Need.parse(text, own) for text in self.requires]

    @classmethod
    def title(cls) -> str:
        """First line of the class's docstring."""
        text = cls.__dict__.get("__doc__")
        return inspect.cleandoc(text).splitlines()[0].rstrip(".") if text else cls.name

    @classmethod
    def drawings(cls, kind: str) -> list[Drawing]:
        """List its figures, tables or highlights in the order of their definition."""
        found: dict[str, Drawing] = {}
        for base in reversed(cls.__mro__):
            for name, member in vars(base).items():
                drawing = getattr(member, "__attnlens_drawing__", None)
                if drawing is None:
                    found.pop(name, None)
                elif drawing.kind == kind:
                    found[name] = drawing
        return list(found.values())

    def draw(self, name: str, result: xr.Dataset) -> Figure:
        """Draw one figure of a result that may have been reloaded from disk.

        Parameters
        ----------
        name : str
            The figure's name, one of ``drawings("figure")``.
        result : xarray.Dataset

        Raises
        ------
        OptionError
            If it has no such figure.
        Skip
            If there is nothing to draw.
        """
        from attnlens.figures import new_figure, style

        offered = [d.name for d in self.drawings("figure")]
        if name not in offered:
            raise OptionError(
                f"{self.name} has no figure {name!r}.", hint=f"Figures: {', '.join(offered)}."
            )
        with style():
            drawn = new_figure()
            alt = getattr(self, name)(result, drawn)
        if isinstance(alt, str):
            drawn.set_gid(alt)
        return drawn

    def tabulate(self, name: str, result: xr.Dataset) -> pd.DataFrame:
        """Return one table of a result."""
        frame: pd.DataFrame = getattr(self, name)(result)
        return frame
