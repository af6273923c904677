"""Where a model is: its folder on this machine, fetched from the hub first where need be.

Whatever the user named ends as one local folder, so that transformers never asks the network by
itself, and as the commit that the folder holds.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from attnlens.errors import (
    DamagedModelError,
    GatedModelError,
    ModelError,
    OfflineError,
    OptionError,
    UnknownModelError,
)
from attnlens.models.aliases import ALIASES, DEMO, is_known, nearest_names, repository_of
from attnlens.models.quiet import log, quiet_hub

Files = Literal["all", "tokenizer", "config"]

_TOKENIZER_FILES: Final = frozenset(
    (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
    )
)
_CONFIG_FILES: Final = frozenset(("config.json", "generation_config.json"))
_SAFE: Final = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?$")
_PICKLED: Final = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?$")
_REPOSITORY: Final = re.compile(r"[\w.-]+(/[\w.-]+)?$")


@dataclass(frozen=True)
class Source:
    """One model's place.

    Attributes
    ----------
    name : str
        As the user gave it, without the revision.
    origin : str
        The repository's full name, or the folder's absolute path.
    revision : str or None
        The commit for a repository.
    folder : Path
        Holds config.json and, unless only the configuration was asked for, the weights.
    """

    name: str
    origin: str
    revision: str | None
    folder: Path


def is_offline() -> bool:
    """Whether the hub was switched off, by the environment now or when it was imported."""
    from huggingface_hub import constants

    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    on = any(os.environ.get(s, "").upper() in ("1", "ON", "YES", "TRUE") for s in switches)
    return on or bool(constants.HF_HUB_OFFLINE)


def find_source(
    name: str, *, revision: str | None = None, files: Files = "all", code: bool = False
) -> Source:
    """Find the folder that holds the model `name`.

    Parameters
    ----------
    name : str
        ``"demo"``, a folder, an alias, a repository, or one of them with ``@revision`` added.
    revision : str, optional
        A branch, tag or commit of the hub's repository.
    files : {"all", "tokenizer", "config"}, optional
        What is needed beside the configuration: everything, the tokenizer, or nothing.
    code : bool, optional
        Fetch the repository's Python files too (for models with code of their own).

    Raises
    ------
    UnknownModelError, OfflineError, GatedModelError, DamagedModelError
    OptionError
        If two revisions are asked for, or one of a folder, which has none.
    """
    given = str(name)
    if not given.strip():
        raise UnknownModelError(
            "the model's name is empty", hint="Give a name such as gpt2-small, or a folder."
        )
    path = Path(given).expanduser()
    if not path.exists() and "@" in given:
        given, _, attached = given.rpartition("@")
        if revision is not None and revision != attached:
            raise OptionError(
                f"two revisions are asked for: {attached!r} in the name and {revision!r} beside it",
                hint="Give the revision once.",
            )
        revision, path = attached, Path(given).expanduser()
        if not revision:
            raise OptionError(f"{name!r} ends in @ with no revision after it")
    # A folder that merely has a model's name (an output folder, say) does not hide the model.
    named = given == DEMO or given.lower() in ALIASES
    if path.exists() and not (named and path.is_dir() and not _holds_model(path)):
        return _folder(given, path, revision)
    if given == DEMO:
        return _demo(revision)
    if _is_path(given):
        near = nearest_names(path.name, also=_folders_beside(path))
        raise UnknownModelError(
            f"there is no folder {given!r}", hint=_suggest(near) or "Check the path."
        )
    return _from_hub(given, revision, files=files, code=code)


def _is_path(given: str) -> bool:
    return given.startswith((".", "/", "~")) or "\\" in given or given.count("/") > 1


def _holds_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / "snapshots").is_dir()


def _folders_beside(path: Path) -> list[str]:
    try:
        return [p.name for p in path.absolute().parent.iterdir() if p.is_dir()]
    except OSError:
        return []


def _suggest(near: list[str]) -> str:
    return f"Did you mean {' or '.join(near)}?" if near else ""


def _demo(revision: str | None) -> Source:
    folder = Path(__file__).resolve().parents[1] / "demo" / "model"
    if revision is not None:
        raise OptionError("the bundled demo model has no revisions", hint="Leave out @revision.")
    if not (folder / "config.json").is_file():
        raise UnknownModelError(
            "the bundled demo model is not part of this installation",
            hint="Install attnlens again, or name another model.",
        )
    return Source(DEMO, DEMO, None, folder)


def _folder(given: str, path: Path, revision: str | None) -> Source:
    folder = path.resolve()
    if not folder.is_dir():
        raise UnknownModelError(
            f"{given!r} is a file, not a folder",
            hint="Give the folder that holds config.json and the weights.",
        )
    if (folder / "snapshots").is_dir() and not (folder / "config.json").exists():
        return _cache_folder(given, folder, revision)
    if revision is not None:
        raise OptionError(
            f"revision {revision!r} was asked for, but {given!r} is a folder, which has none",
            hint="Leave out the revision, or name the hub's repository.",
        )
    return Source(given, str(folder), None, folder)


def _cache_folder(given: str, folder: Path, revision: str | None) -> Source:
    """Resolve a repository's folder of the hub's cache, which keeps several revisions."""
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    commit = reference.read_text().strip() if reference.is_file() else wanted
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        held = sorted(p.name for p in (folder / "snapshots").iterdir() if p.is_dir())
        raise UnknownModelError(
            f"{given!r} holds no revision {wanted!r}",
            hint=f"It holds {', '.join(held) or 'none'}.",
        )
    return Source(given, str(folder), commit, snapshot)


def _from_hub(given: str, revision: str | None, *, files: Files, code: bool) -> Source:
    repository = repository_of(given)
    if not _REPOSITORY.match(repository):
        raise UnknownModelError(
            f"{given!r} is neither a folder nor a possible name on the hub",
            hint=_suggest(nearest_names(given)) or "Names look like gpt2 or EleutherAI/pythia-70m.",
        )
    if is_offline():
        return _from_cache(given, repository, revision, "the hub is switched off (HF_HUB_OFFLINE)")
    import huggingface_hub

    wanted = revision or "main"
    try:
        with quiet_hub():
            # Asked first because, unlike downloads, it is not tried again and again when the
            # network is down.
            info = huggingface_hub.HfApi().model_info(repository, revision=revision, timeout=20)
            config = Path(
                huggingface_hub.hf_hub_download(repository, "config.json", revision=wanted)
            )
            commit = config.parent.name
            listed = [sibling.rfilename for sibling in info.siblings or ()]
            for file in _needed(listed, files, code=code):
                huggingface_hub.hf_hub_download(repository, file, revision=commit)
    except Exception as error:
        return _explain(error, given, repository, revision)
    return Source(given, repository, commit, config.parent)


def _needed(listed: list[str], files: Files, *, code: bool) -> list[str]:
    """Choose the files to fetch: safetensors where there are any, else torch's own format."""
    programs = [f for f in listed if code and f.endswith(".py")]
    if files == "config":
        return programs
    words = [f for f in listed if f in _TOKENIZER_FILES]
    if files == "tokenizer":
        return [*words, *programs]
    safe = [file for file in listed if _SAFE.match(file)]
    pickled = [file for file in listed if _PICKLED.match(file)]
    settings = [f for f in listed if f in _CONFIG_FILES]
    return [*settings, *words, *programs, *(safe or pickled)]


def _from_cache(given: str, repository: str, revision: str | None, why: str) -> Source:
    import huggingface_hub

    try:
        with quiet_hub():
            config = Path(
                huggingface_hub.hf_hub_download(
                    repository, "config.json", revision=revision or "main", local_files_only=True
                )
            )
    except Exception as error:
        if _status(error) in (401, 403):
            raise _gated(repository, _status(error)) from error
        near = [n for n in nearest_names(given) if n.lower() != given.lower()]
        if "/" not in repository and repository not in ALIASES.values():
            raise UnknownModelError(
                f"{given!r} is neither a folder, nor a known short name, and {why}",
                hint=_suggest(near) or "Give a folder, or a name such as gpt2-small.",
            ) from error
        also = "" if is_known(repository) else _suggest(near)
        at = f" at revision {revision!r}" if revision else ""
        raise OfflineError(
            f"{repository!r}{at} is not on this machine, and {why}",
            hint=f"Fetch it once with a connection, or give a folder. {also}".strip(),
        ) from error
    return Source(given, repository, config.parent.name, config.parent)


def _explain(error: Exception, given: str, repository: str, revision: str | None) -> Source:
    """Say in one error of ours what the hub's error means, or fall back on the cache.

    Raises
    ------
    ModelError
        Of the kind that fits; the hub being out of reach is no error where the cache has the
        model.
    """
    from huggingface_hub import errors as hub

    if isinstance(error, ModelError):
        raise error
    status = _status(error)
    near = [n for n in nearest_names(given) if n.lower() != given.lower()]
    page = _page(repository)
    gated = _gated(repository, status)
    if isinstance(error, hub.GatedRepoError | hub.DisabledRepoError):
        raise gated from error
    if isinstance(error, hub.RevisionNotFoundError):
        raise UnknownModelError(
            f"{repository!r} has no revision {revision!r}",
            hint=f"Its branches and tags are at {page}/tree/main.",
        ) from error
    if isinstance(error, hub.RepositoryNotFoundError):
        # Without a login the hub answers 401 for what is not there and for what is private
        # alike; only its own word "RepoNotFound", or our table, tells them apart.
        if status == 401 and (is_known(repository) or _code(error) != "RepoNotFound"):
            raise gated from error
        raise UnknownModelError(
            f"{given!r} is neither a folder nor a model on the hub",
            hint=_suggest(near) or "If it is private, log in with `hf auth login`.",
        ) from error
    if status in (401, 403):
        raise gated from error
    if status == 404 and not isinstance(error, hub.EntryNotFoundError):
        raise UnknownModelError(
            f"{given!r} is neither a folder nor a model on the hub", hint=_suggest(near) or None
        ) from error
    if isinstance(error, hub.EntryNotFoundError) and not isinstance(
        error, hub.LocalEntryNotFoundError
    ):
        raise DamagedModelError(
            f"the repository {repository!r} has no config.json, so it is no model in Hugging "
            "Face's format",
            hint=_suggest(near) or f"Look at its files at {page}/tree/main.",
        ) from error
    if isinstance(error, hub.HFValidationError):
        raise UnknownModelError(
            f"{given!r} is not a possible name on the hub", hint=_suggest(near) or None
        ) from error
    log.debug("the hub could not be used: %s", error)
    reason = f"the hub answered HTTP {status}" if status else "the hub cannot be reached"
    if isinstance(error, OSError) and "No space left" in str(error):
        raise ModelError(f"the disk is full: {error}", hint="Free some space.") from error
    return _from_cache(given, repository, revision, reason)


def _page(repository: str) -> str:
    return f"https://huggingface.co/{repository}"


def _gated(repository: str, status: int | None) -> GatedModelError:
    return GatedModelError(
        f"the hub refuses {repository!r} to you (HTTP {status or 401})",
        hint=f"Accept its terms at {_page(repository)}, then log in with `hf auth login` or set "
        "HF_TOKEN.",
    )


def _status(error: BaseException) -> int | None:
    """Return the HTTP status behind an error, looking through its causes."""
    seen: Any = error
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        seen = seen.__cause__
    return None


def _code(error: BaseException) -> str:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    return str(headers.get("X-Error-Code", ""))
