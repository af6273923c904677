"""The bundled model and text, so that everything runs without a download.

``python -m attnlens.demo.train`` makes the model again from :data:`TEXT_FILE` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: Folder of the trained model, as Hugging Face lays it out.
MODEL_FOLDER: Final = Path(__file__).parent / "model"

#: Chapters of the King James Bible, public domain: one verse a line, UTF-8.
TEXT_FILE: Final = Path(__file__).parent / "text.txt"

__all__ = ["MODEL_FOLDER", "TEXT_FILE"]
