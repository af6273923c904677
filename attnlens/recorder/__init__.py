"""Capturing: a plan and a model become a store on the disk, in one pass."""

from attnlens.recorder.passes import capture_unit
from attnlens.recorder.recorder import twin_seed
from attnlens.recorder.recording import capture, record

__all__ = ["capture", "capture_unit", "record", "twin_seed"]
