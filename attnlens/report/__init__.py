"""The page that a person reads: one self-contained ``report.html`` for a run."""

from __future__ import annotations

from attnlens.report.write import write_report

__all__ = ["write_report"]
