"""transformers and transformer_lens talk a lot while they load; nobody asked them to."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

log: Final = logging.getLogger("attnlens")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' bars, warnings and log lines, unless attnlens logs at debug level.

    Everything is put back as it was.
    """
    if log.isEnabledFor(logging.DEBUG):
        yield
        return
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    root = logging.getLogger()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    # transformer_lens warns through the root logger's functions, which would also install a
    # handler on it for good; a filter on the logger stops the records before that shows.
    root.addFilter(_drop)
    handlers = list(root.handlers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeFilter(_drop)
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub's library; its bars stay where a person is watching."""
    if log.isEnabledFor(logging.DEBUG):
        yield
        return
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    bars = not are_progress_bars_disabled()
    hub_logging.set_verbosity_error()
    if bars and not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if bars and are_progress_bars_disabled():
            enable_progress_bars()


def _drop(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
