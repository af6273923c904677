"""What a store says about itself: ``manifest.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attnlens.errors import (
    DamagedStoreError,
    IncompleteStoreError,
    StoreError,
    StoreVersionError,
)
from attnlens.store.files import write_atomically

#: The version of the layout that this code writes and reads.
SCHEMA: Final = "attnlens/1"

MANIFEST: Final = "manifest.json"
UNITS: Final = "units"
WEIGHTS: Final = "weights"
VOCABULARY: Final = "vocabulary.json"

#: The manifest's checksum of itself, a key of ``manifest.json`` alone.
CHECKSUM: Final = "checksum"
TWINS: Final = "twins"
CORPORA: Final = "corpora"

#: Fields that may differ between an interrupted run and the run that finishes it.
_NOT_IDENTITY: Final = frozenset(
    {"command", "created", "notes", "sealed", "weights", "vocabulary",
     "vocabulary_hash"}
)  # fmt: skip


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class UnitSpec(_Part):
    """One unit: a run of prompts of one length.

    Attributes
    ----------
    id : int
        Its number, and the name of its folder.
    prompts : list of int
        Ids of its prompts, in the order in which they lie.
    length : int
        Tokens in each of them.
    """

    id: int = Field(ge=0)
    prompts: list[int] = Field(min_length=1)
    length: int = Field(ge=1)

    @property
    def folder(self) -> str:
        """Name of the unit's folder."""
        return f"{self.id:06d}"


class ActivationSpec(_Part):
    """How one activation is stored, and which part of it.

    Attributes
    ----------
    dtype : str
        ``"float16"``, ``"float32"`` or ``"float64"``.
    layers : list of int
        Layers, in the order of the ``layer`` dimension.
    heads : list of int or None
        Heads (or key-value heads), in the order of their dimension; None for all.
    positions : list of int or None
        Positions kept along ``pos`` or ``query_pos``, negative ones counted from the end; None
        for all. ``key_pos`` is always whole.
    """

    dtype: str = Field(pattern="^float(16|32|64)$")
    layers: list[int] = Field(min_length=1)
    heads: list[int] | None = None
    positions: list[int] | None = None


class PromptsSpec(_Part):
    """The frozen order of the prompts.

    Attributes
    ----------
    n : int
    hash : str
        sha256 over lengths and tokens.
    lengths : list of int
        Tokens of each prompt, by prompt id.
    period : int or None
        Of repeated random tokens: after how many tokens they repeat.
    """

    n: int = Field(ge=1)
    hash: str = ""
    lengths: list[int]
    period: int | None = None

    @model_validator(mode="after")
    def _agree(self) -> PromptsSpec:
        if len(self.lengths) != self.n:
            raise ValueError(f"{self.n} prompts, but {len(self.lengths)} lengths")
        return self


class Manifest(_Part):
    """Everything that a store says about itself.

    Attributes
    ----------
    schema_ : str
        Version of the layout; ``"schema"`` in the file.
    model : dict
        ``ModelFacts.to_json()``; empty for arrays in memory.
    corpus : dict
        Where the prompts are from.
    prompts : PromptsSpec
    activations : dict from name to ActivationSpec
    statistics : list of str
    layers, heads : list of int or None
        Which layers and heads the statistics cover; None for all.
    units : list of UnitSpec
    batch_size : int
        Prompts that went through the model together.
    lean : bool
        Whether the model ran without attention matrices.
    seed : int
    versions : dict from package to version
    command : list of str
    created : str
        ISO 8601.
    notes : list of str
        For people.
    weights : list of str
        Names of the stored weights; filled in when they are written.
    vocabulary : bool
        Whether ``vocabulary.json`` belongs to the store.
    vocabulary_hash : str
        sha256 of that file.
    sealed : bool
        Whether everything is there.
    """

    schema_: str = Field(default=SCHEMA, alias="schema")
    model: dict[str, Any] = Field(default_factory=dict)
    corpus: dict[str, Any] = Field(default_factory=dict)
    prompts: PromptsSpec
    activations: dict[str, ActivationSpec] = Field(default_factory=dict)
    statistics: list[str] = Field(default_factory=list)
    layers: list[int] | None = None
    heads: list[int] | None = None
    units: list[UnitSpec]
    batch_size: int = Field(default=1, ge=1)
    lean: bool = False
    seed: int = 0
    versions: dict[str, str] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    created: str = ""
    notes: list[str] = Field(default_factory=list)
    weights: list[str] = Field(default_factory=list)
    vocabulary: bool = False
    vocabulary_hash: str = ""
    sealed: bool = False

    @model_validator(mode="after")
    def _units_cover_the_prompts(self) -> Manifest:
        seen = [p for unit in self.units for p in unit.prompts]
        if sorted(seen) != list(range(self.prompts.n)):
            raise ValueError("the units do not hold each prompt exactly once")
        if len({unit.id for unit in self.units}) != len(self.units):
            raise ValueError("two units have the same id")
        for unit in self.units:
            if any(self.prompts.lengths[p] != unit.length for p in unit.prompts):
                raise ValueError(f"unit {unit.id} holds prompts of another length")
        return self

    @property
    def uniform(self) -> bool:
        """Whether all prompts have the same length."""
        return len({unit.length for unit in self.units}) == 1

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompts.lengths)

    def dump(self) -> str:
        """Return the text of ``manifest.json``, its own checksum included."""
        data = json.loads(json.dumps(self.model_dump(by_alias=True)))
        data[CHECKSUM] = checksum(data)
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` into `folder` in one step."""
        write_atomically(folder / MANIFEST, self.dump().encode())

    def differences(self, other: Manifest) -> Iterator[str]:
        """Yield, for people, each field that makes `other` another capture than this one."""
        ours, theirs = self.model_dump(by_alias=True), other.model_dump(by_alias=True)
        for field in ours:
            if field not in _NOT_IDENTITY:
                yield from _differences(field, ours[field], theirs[field])


def _differences(place: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}, key=str):
            yield from _differences(f"{place}.{key}", ours.get(key), theirs.get(key))
    elif ours != theirs:
        yield f"{place} was {_short(ours)}, now {_short(theirs)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def checksum(data: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's content, whatever the file's layout."""
    content = {key: value for key, value in data.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json`` of the store at `folder`.

    Raises
    ------
    StoreError
        If there is no store.
    StoreVersionError
        If another version of the layout wrote it.
    DamagedStoreError
        If the manifest cannot be read.
    """
    file = folder / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise _no_store(folder) from None
    except UnicodeDecodeError as error:
        raise DamagedStoreError(f"{file} is not UTF-8: {error}.") from error
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise DamagedStoreError(
            f"{file} is not JSON: {error}.", hint="Restore it from a copy, or capture again."
        ) from error
    _check_version(file, data)
    try:
        manifest = Manifest.model_validate({k: v for k, v in data.items() if k != CHECKSUM})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"]) or "manifest"
        raise DamagedStoreError(
            f"{file} does not make sense: {place}: {first['msg']}.",
            hint="Restore it from a copy, or capture again.",
        ) from error
    if data.get(CHECKSUM) != checksum(data):
        raise DamagedStoreError(
            f"{file} was altered: its checksum does not fit its content.",
            hint="Restore it from a copy, or capture again.",
        )
    return manifest


def _no_store(folder: Path) -> StoreError:
    if not folder.exists():
        return StoreError(f"There is no store at {folder}.", hint="Check the path.")
    if (folder / "store.attn" / MANIFEST).exists():
        return StoreError(
            f"{folder} is the folder of a run, not a store.", hint=f"Use {folder / 'store.attn'}."
        )
    if (folder / UNITS).exists():
        return IncompleteStoreError(
            f"{folder} has units but no {MANIFEST}.",
            hint="Restore it from a copy, or capture again with --overwrite.",
        )
    return StoreError(f"{folder} is no attnlens store: it has no {MANIFEST}.")


def _check_version(file: Path, data: Any) -> None:
    found = data.get("schema") if isinstance(data, dict) else None
    if found == SCHEMA:
        return
    versions = data.get("versions") if isinstance(data, dict) else None
    maker = versions.get("attnlens") if isinstance(versions, dict) else None
    by = f" by attnlens {maker}" if maker else ""
    if found is None:
        raise StoreVersionError(
            f"{file} names no version of the layout; this attnlens reads {SCHEMA!r}.",
            hint="If it is an attnlens store, it is damaged or was made by a version before the "
            "first release: capture again.",
        )
    raise StoreVersionError(
        f"{file.parent} was made{by} as {found!r}; this attnlens reads {SCHEMA!r}.",
        hint="Open it with the attnlens that made it, or capture again."
        if not _newer(found)
        else "Update attnlens: pip install --upgrade attnlens.",
    )


def _newer(found: Any) -> bool:
    kind, _, number = str(found).partition("/")
    return kind == "attnlens" and number.isdigit() and int(number) > int(SCHEMA.split("/")[1])


def resolve_positions(
    positions: list[int] | None, length: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Find where the chosen positions lie in a prompt.

    Parameters
    ----------
    positions : list of int or None
        As in :class:`ActivationSpec`; None for all.
    length : int
        Tokens of the prompt.

    Returns
    -------
    which : ndarray of int
        Indices into `positions` of those that the prompt has.
    where : ndarray of int
        Their positions in the prompt, counted from its start.
    """
    if positions is None:
        everything = np.arange(length)
        return everything, everything
    absolute = np.array([p + length if p < 0 else p for p in positions], dtype=np.intp)
    which = np.flatnonzero((absolute >= 0) & (absolute < length))
    return which, absolute[which]
