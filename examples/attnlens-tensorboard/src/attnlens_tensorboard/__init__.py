"""An observer for attnlens that writes scalars, histograms and figures to TensorBoard.

Observers are imported on every run, so this module imports nothing that takes time.
"""

from __future__ import annotations

from typing import Any

import attnlens

__all__ = ["attnlens_after_analysis", "attnlens_analysis_failed"]


@attnlens.hookimpl
def attnlens_after_analysis(name: str, result: Any) -> None:
    """Write what the analysis `name` found."""
    from attnlens_tensorboard.writing import write_result

    write_result(name, result)


@attnlens.hookimpl
def attnlens_analysis_failed(name: str, error: Exception) -> None:
    """Write why the analysis `name` failed."""
    from attnlens_tensorboard.writing import write_failure

    write_failure(name, error)
