"""The base classes of a plugin: what an analysis needs, computes, draws and claims."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from attnlens.errors import BrokenPluginError, NeedError, OptionError, ResultError
from attnlens.hookspecs import API_VERSION
from attnlens.needs import Need
from attnlens.options import Options, complaints
from attnlens.wording import beside

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

    from attnlens.statistics import Statistic
    from attnlens.view import View


class Skip(Exception):
    """Raised by an analysis, figure or table that has nothing to say here, with the reason."""


class _Handed(BaseModel):
    """What an analysis hands over, refused with an error of attnlens where it cannot be kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            known = type(self).model_fields
            wrong = {str(e["loc"][0]): e["input"] for e in error.errors() if e["loc"]}
            told = ", ".join(f"{n}={v!r}" for n, v in wrong.items() if n in values)
            what = [f"{n}: {known[n].description}" for n in wrong if n in known]
            raise ResultError(
                f"The {type(self).__name__.lower()} with {told or str(values)} is not valid: "
                f"{complaints(error.errors())}.",
                hint=" ".join(what) or f"It has {', '.join(known)}.",
            ) from error


class Finding(_Handed):
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

    claim: str = Field(
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description="A short stable word of lower-case letters, digits, dots and hyphens.",
    )
    holds: bool = Field(description="Whether the claim is made.")
    text: str = Field(min_length=1, description="The claim, or its absence, in a sentence.")
    evidence: dict[str, Any] = Field(
        default={}, description="The numbers that it rests on, by name."
    )
    null: dict[str, Any] = Field(default={}, description="The same numbers by chance, by name.")
    analysis: str = Field(default="", description="The analysis's name, filled in by the run.")

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
    def _plain(cls, value: Any, field: pydantic.ValidationInfo) -> Any:
        return plain(value, str(field.field_name))


def plain(value: Any, where: str = "it") -> Any:
    """Turn numpy and xarray scalars and arrays into what JSON can hold; NaN becomes None.

    Parameters
    ----------
    value : object
    where : str
        What is being turned, for the error's message.

    Raises
    ------
    ResultError
        If JSON has no form for it.
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}[{str(k)!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v, where) for v in value]
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if hasattr(value, "tolist"):
        return plain(value.tolist(), where)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ResultError(
        f"{where} holds {value!r} ({type(value).__name__}), which cannot be written to run.json.",
        hint="Use numbers, booleans, strings, arrays of them, and lists and mappings of those.",
    )


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
    if not isinstance(title, str) or not title.strip():
        raise BrokenPluginError(
            f"@attnlens.{kind} was given {title!r} as its title.",
            hint=f'Write @attnlens.{kind}("What it shows") above the method.',
        )

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


class Highlight(_Handed):
    """One line of text whose tokens are coloured by a weight.

    Attributes
    ----------
    label : str
    tokens : list of str
        Literal text of each token.
    weights : list of float
        One for each token; the sign decides the hue.
    """

    label: str = Field(description="What the line shows.")
    tokens: list[str] = Field(description="Literal text of each token.")
    weights: list[float] = Field(description="One number for each token.")

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
        Its one name: for selecting, listing and options; the same as its entry point's. Lower-case
        letters, digits and hyphens.
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
            If it is no tuple of strings, or an item names nothing that exists.
        """
        if not isinstance(self.requires, tuple) or not all(
            isinstance(text, str) for text in self.requires
        ):
            raise NeedError(
                f"`requires` of {self.name} is {self.requires!r}, not a tuple of strings.",
                hint='Write requires = ("pattern",) with the comma.',
            )
        own = [s.name for s in self.statistics]
        return [Need.parse(text, own) for text in self.requires]

    @classmethod
    def title(cls) -> str:
        """First line of the class's docstring."""
        text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        return text.partition("\n")[0].rstrip(".") or cls.name

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
        ResultError
            If the method drew nothing and did not say why.
        """
        from attnlens.figures import is_blank, new_figure, style

        offered = [d.name for d in self.drawings("figure")]
        if name not in offered:
            raise OptionError(
                f"{self.name} has no figure {name!r}.", hint=f"Figures: {', '.join(offered)}."
            )
        with style():
            drawn = new_figure()
            alt = getattr(self, name)(result, drawn)
            if is_blank(drawn):
                raise ResultError(
                    f"It drew nothing on the figure that it was given, and returned {alt!r:.80}.",
                    hint="Draw on that figure, or raise attnlens.Skip with the reason.",
                )
        if isinstance(alt, str):
            drawn.set_gid(alt)
        return drawn

    def tabulate(self, name: str, result: xr.Dataset) -> pd.DataFrame:
        """Return one table of a result.

        Raises
        ------
        ResultError
            If it is no DataFrame.
        """
        import pandas as pd

        frame = getattr(self, name)(result)
        if not isinstance(frame, pd.DataFrame):
            raise ResultError(
                f"A {type(frame).__name__} was returned instead of a pandas.DataFrame.",
                hint="Return pandas.DataFrame(...).",
            )
        return frame
