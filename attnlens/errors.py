"""Every exception that attnlens raises on purpose.

::

    AttnlensError                      exit 1
     ├─ UsageError                     exit 2   what was asked for makes no sense
     │   ├─ OptionError                         an option's name or value
     │   ├─ UnknownPluginError                  no plugin of that name
     │   ├─ NeedError                           an activation or statistic that is not there
     │   ├─ CorpusError                         prompts that cannot be read or used
     │   └─ OutputError                         the folder to write to
     ├─ ModelError                     exit 1   the model cannot be had
     │   ├─ UnknownModelError
     │   ├─ OfflineError
     │   ├─ GatedModelError
     │   ├─ UnsupportedModelError
     │   ├─ DamagedModelError
     │   └─ OutOfMemoryError
     ├─ CaptureError                   exit 1
     │   ├─ MissingActivationError              a hook that never fired
     │   ├─ NonFiniteError                      NaN or infinity inside the model
     │   └─ PlanRefusedError                    it would not fit
     ├─ StoreError                     exit 1
     │   ├─ IncompleteStoreError
     │   ├─ DamagedStoreError
     │   ├─ StoreVersionError
     │   └─ StoreLockedError
     ├─ PluginError                    exit 1
     │   ├─ BrokenPluginError
     │   ├─ PluginConflictError
     │   └─ PluginVersionError
     ├─ AnalysisError                  exit 1
     │   ├─ UndeclaredNeedError                 an analysis read what it did not declare
     │   └─ ResultError                         an analysis returned something unusable
     └─ DecompositionError             exit 1
"""

from __future__ import annotations

from typing import ClassVar


class AttnlensError(Exception):
    """Base of all errors of attnlens.

    Parameters
    ----------
    message : str
        What was wrong, with the offending value.
    hint : str, optional
        What to do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[AttnlensError], message: str, hint: str | None) -> AttnlensError:
    return kind(message, hint=hint)


class UsageError(AttnlensError):
    """What was asked for makes no sense."""

    exit_code = 2


class OptionError(UsageError):
    """An option's name or value is wrong."""


class UnknownPluginError(UsageError):
    """No plugin of that name is installed."""


class NeedError(UsageError, KeyError):
    """An activation, statistic or other need that this store cannot give."""


class CorpusError(UsageError):
    """Prompts that cannot be read or used."""


class OutputError(UsageError):
    """The folder to write to is unusable."""


class ModelError(AttnlensError):
    """The model cannot be had."""


class UnknownModelError(ModelError):
    """Neither a folder, nor an alias, nor a repository of the hub."""


class OfflineError(ModelError):
    """The model is not on this machine and the hub cannot be reached."""


class GatedModelError(ModelError):
    """The hub refuses the model to this user."""


class UnsupportedModelError(ModelError):
    """TransformerLens has no adapter for the architecture, or attnlens cannot capture it."""


class DamagedModelError(ModelError):
    """The model's files are incomplete or unreadable."""


class OutOfMemoryError(ModelError):
    """The device's memory ran out."""


class CaptureError(AttnlensError):
    """The capturing pass failed."""


class MissingActivationError(CaptureError):
    """A requested activation that never arrived."""


class NonFiniteError(CaptureError):
    """NaN or infinity in a captured tensor."""


class PlanRefusedError(CaptureError):
    """The plan does not fit this machine."""


class StoreError(AttnlensError):
    """The store cannot be read or written."""


class IncompleteStoreError(StoreError):
    """The store was not finished."""


class DamagedStoreError(StoreError):
    """Part of the store is missing or altered."""


class StoreVersionError(StoreError):
    """The store was made by another version of the format."""


class StoreLockedError(StoreError):
    """Another process is writing the store."""


class PluginError(AttnlensError):
    """A plugin cannot be used."""


class BrokenPluginError(PluginError):
    """A plugin that fails to load."""


class PluginConflictError(PluginError):
    """Two distributions offer a plugin of one name."""


class PluginVersionError(PluginError):
    """A plugin written for another version of the interface."""


class AnalysisError(AttnlensError):
    """An analysis failed."""


class UndeclaredNeedError(AnalysisError):
    """An analysis read something that it did not declare."""


class ResultError(AnalysisError):
    """An analysis returned something that cannot be kept."""


class DecompositionError(AttnlensError):
    """A tensor that cannot be decomposed as asked."""
