"""A device that computes something else than the CPU is found out (A35), with a stand-in for it."""

from __future__ import annotations

from pathlib import Path

import torch

from attnlens.models import load_model
from attnlens.models.verification import device_problem
from tests.modelzoo import tiny


def test_the_same_numbers_are_no_problem(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    assert device_problem(load_model(folder), load_model(folder)) is None


def test_rounding_is_no_problem(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    for dtype in ("float16", "bfloat16"):
        assert device_problem(load_model(folder, dtype=dtype), load_model(folder)) is None


def test_plausible_but_wrong_numbers_are_a_problem(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    wrong = load_model(folder)
    with torch.no_grad():
        wrong.bridge.original_model.lm_head.weight.mul_(1.2)
    problem = device_problem(wrong, load_model(folder))
    assert problem is not None
    assert "--device cpu" in problem
