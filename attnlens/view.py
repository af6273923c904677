"""What an analysis sees of a store: what it declared, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnlens.activations import ACTIVATIONS
from attnlens.errors import NeedError, UndeclaredNeedError
from attnlens.needs import Need

if TYPE_CHECKING:
    import xarray as xr

    from attnlens.attention import Attention
    from attnlens.store import Store, Unit


class UnitView:
    """One unit of a store: prompts of one length, nothing padded.

    ``unit[name]`` is a declared activation as a lazy DataArray over the unit's prompts;
    ``name in unit`` asks whether it was declared and is there.

    Parameters
    ----------
    unit : Unit
    view : View
        The view that it comes from, which says what was declared.
    """

    def __init__(self, unit: Unit, view: View) -> None:
        self._unit = unit
        self._view = view

    def __repr__(self) -> str:
        return f"<UnitView of {self._unit!r}>"

    def __contains__(self, name: object) -> bool:
        return name in self._view and name in self._unit

    def __getitem__(self, name: str) -> xr.DataArray:
        """Return a declared activation, lazily; its dimensions are those of ``store[name]``.

        Raises
        ------
        UndeclaredNeedError
            If it was not declared.
        NeedError
            If the store does not hold it.
        """
        self._view.check(name)
        return self._unit[name]

    @property
    def id(self) -> int:
        """Its number."""
        return self._unit.id

    @property
    def length(self) -> int:
        """Tokens in each of its prompts."""
        return self._unit.length

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of its prompts, in the order of the ``prompt`` dimension."""
        return self._unit.prompt_ids

    @property
    def tokens(self) -> xr.DataArray:
        """Token ids ``[prompt, pos]``, int32, without padding."""
        return self._unit.tokens

    def attention(self, layer: int, prompts: slice = slice(None)) -> Attention:
        """Return the attention of one layer over ``[prompt, head, query_pos, key_pos]``.

        Parameters
        ----------
        layer : int
            The layer's number in the model.
        prompts : slice, optional
            Which of the unit's prompts, by their place in it; only these are read.
        """
        self._view.check("pattern")
        return self._unit.attention(layer, prompts)


class View:
    """A store as one analysis sees it.

    Everything that was declared in ``requires`` is there; reading anything else raises
    :class:`~attnlens.errors.UndeclaredNeedError`, so that an analysis which works alone also works
    beside others. Tokens, lengths, vocabulary and the model's facts are always there.
    ``store[name]`` is a declared activation, lazily, or a statistic, as a DataArray with named
    dimensions over all prompts; ``name in store`` asks whether it was declared and is there.

    Parameters
    ----------
    store : Store
        What is looked at.
    needs : sequence of Need
        What the analysis declared, as :meth:`attnlens.Analysis.needs` parses it.
    analysis : str
        Its name, for error messages.
    results : mapping from str to xarray.Dataset
        Results of the analyses that it requires.
    model : object, optional
        The live model.
    corpus : str, optional
        Which of the corpora this view is of; the run's own by default.

    Attributes
    ----------
    refused : list of str
        What was asked for without having been declared, here and in the views of the twins and of
        other corpora: the analysis may have caught the error.
    """

    def __init__(
        self,
        store: Store,
        needs: Sequence[Need],
        *,
        analysis: str,
        results: Mapping[str, xr.Dataset] | None = None,
        model: Any = None,
        corpus: str | None = None,
    ) -> None:
        self.refused: list[str] = []
        self._store = store
        self._needs = tuple(needs)
        self._analysis = analysis
        self._results = dict(results or {})
        self._model = model
        self._corpus = corpus
        self._names = {
            n.name
            for n in needs
            if n.kind in ("activation", "statistic") and (n.corpus or None) == corpus
        }

    def __repr__(self) -> str:
        return f"<View of {self._store!r} for {self._analysis}: {', '.join(sorted(self._names))}>"

    def check(self, name: str) -> None:
        """Refuse an activation or statistic that was not declared.

        Raises
        ------
        UndeclaredNeedError
        """
        if name in self._names:
            return
        corpus = self._corpus
        raise self._refuse(
            repr(name) + (f" of {corpus}" if corpus else ""), f"{name}@{corpus}" if corpus else name
        )

    def _has(self, kind: str) -> bool:
        return any(n.kind == kind for n in self._needs)

    def _refuse(self, what: str, declare: str) -> UndeclaredNeedError:
        self.refused.append(declare)
        return UndeclaredNeedError(
            f"{self._analysis} read {what}, which it did not declare.",
            hint=f"Add {declare!r} to its `requires`.",
        )

    def __contains__(self, name: object) -> bool:
        return name in self._names and name in self._store

    def __getitem__(self, name: str) -> xr.DataArray:
        """Return a declared activation, lazily, or a statistic, over all prompts.

        Raises
        ------
        UndeclaredNeedError
            If it was not declared.
        NeedError
            If the store does not hold it.
        """
        self.check(name)
        return self._store[name]

    def units(self) -> Iterator[UnitView]:
        """Yield each unit as it lies: prompts of one length, nothing padded."""
        for unit in self._store.units():
            yield UnitView(unit, self)

    def attention(self, layer: int) -> Attention:
        """Return the attention of one layer over ``[prompt, head, query_pos, key_pos]``.

        Parameters
        ----------
        layer : int
            The layer's number in the model.
        """
        self.check("pattern")
        return self._store.attention(layer)

    @property
    def tokens(self) -> xr.DataArray:
        """Token ids ``[prompt, pos]``, int32, -1 beyond a prompt's length."""
        return self._store.tokens

    @property
    def lengths(self) -> xr.DataArray:
        """Number of tokens of each prompt, ``[prompt]``."""
        return self._store.lengths

    @property
    def vocabulary(self) -> list[str] | None:
        """Literal text of every token id; None without a tokenizer."""
        return self._store.vocabulary

    def token_strings(self, prompt: int) -> list[str]:
        """Return the literal text of one prompt's tokens.

        Parameters
        ----------
        prompt : int
            Its place along ``prompt``.
        """
        return self._store.token_strings(prompt)

    @property
    def facts(self) -> Any:
        """Facts of the model (:class:`attnlens.models.ModelFacts`); None for arrays in memory."""
        return self._store.facts

    @property
    def manifest(self) -> Any:
        """What the store says of itself (:class:`attnlens.store.schema.Manifest`).

        ``manifest.activations`` has the layers, heads, positions and dtype of each activation,
        ``manifest.prompts`` their number and origin, ``manifest.corpus`` the corpus.
        """
        return self._store.manifest

    @property
    def seed(self) -> int:
        """The run's seed: the only source of randomness that an analysis should use."""
        return int(self._store.manifest.seed)

    @property
    def has_weights(self) -> bool:
        """Whether the weights were declared and are there."""
        return self._has("weights") and self._store.has_weights

    @property
    def weights(self) -> xr.Dataset:
        """The model's weights by their TransformerLens names."""
        if not self._has("weights"):
            raise self._refuse("the weights", "weights")
        return self._store.weights

    @property
    def model(self) -> Any:
        """The live model (:class:`attnlens.models.Model`)."""
        if not self._has("model"):
            raise self._refuse("the live model", "model")
        if self._model is None:
            raise NeedError(
                f"{self._analysis} needs the live model, which a store alone does not hold.",
                hint="Use `attnlens run` (attnlens.run): it captures and analyses in one go.",
            )
        return self._model

    @property
    def results(self) -> Mapping[str, xr.Dataset]:
        """Results of the analyses that were declared with ``"analysis:NAME"``."""
        return {n.name: self._results[n.name] for n in self._needs if n.kind == "analysis"}

    @property
    def twins(self) -> list[View]:
        """The same needs, met on models of the same configuration with fresh random weights.

        An empty list where the run was asked to make none (``--twins 0``); then nothing can be
        judged by chance.
        """
        if not self._has("twin"):
            raise self._refuse("the twins", "twin")
        return [self._beside(twin, corpus=self._corpus) for twin in self._store.twins]

    def corpus(self, name: str) -> View:
        """Return the view of another corpus that was declared with ``"NEED@corpus"``.

        Parameters
        ----------
        name : str
            For example ``"repeated-random"``.
        """
        if not any(n.corpus == name for n in self._needs):
            raise self._refuse(f"the corpus {name!r}", f"pattern@{name}")
        return self._beside(
            self._store.corpus(name), results=self._results, model=self._model, corpus=name
        )

    def _beside(self, store: Store, **given: Any) -> View:
        other = View(store, self._needs, analysis=self._analysis, **given)
        other.refused = self.refused
        return other


def missing(store: Store, needs: Iterable[Need]) -> list[str]:
    """List what `needs` asks for and `store` cannot give, in the words of ``requires``."""
    lacking = []
    for need in needs:
        # Twins may be none: --twins 0 asks for that, and then nothing is judged by them.
        if need.optional or need.kind in ("model", "analysis", "twin"):
            continue
        try:
            place = store.corpus(need.corpus) if need.corpus else store
        except NeedError:
            lacking.append(f"{need.name}@{need.corpus}")
            continue
        if need.kind == "weights":
            if not place.has_weights:
                lacking.append("weights")
        elif need.name not in place:
            sources = ACTIVATIONS[need.name].derived_from if need.name in ACTIVATIONS else ()
            lacking.append(need.name + (f" (from {', '.join(sources)})" if sources else ""))
    return lacking
