"""The thread behind the forward pass: bounded, prompt about errors, quiet once left."""

from __future__ import annotations

import threading
import time

import pytest

from attnlens.recorder.background import Background


def test_calls_run_in_order_and_all_have_run_when_the_block_ends() -> None:
    seen: list[int] = []
    with Background() as background:
        for i in range(50):
            background.submit(lambda i=i: seen.append(i))  # type: ignore[misc]
    assert seen == list(range(50))


def test_a_fast_caller_is_held_back() -> None:
    gate = threading.Event()
    submitted: list[int] = []

    def caller() -> None:
        with Background(depth=3) as background:
            for i in range(10):
                background.submit(lambda: gate.wait(5) and None)
                submitted.append(i)

    thread = threading.Thread(target=caller)
    thread.start()
    time.sleep(0.2)
    # Three wait, and one is being worked on.
    assert len(submitted) == 4
    gate.set()
    thread.join(5)
    assert len(submitted) == 10


def test_an_error_is_raised_at_the_next_call_and_stops_the_work() -> None:
    seen: list[str] = []

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), Background() as background:
        background.submit(fail)
        for _ in range(100):
            time.sleep(0.01)
            background.submit(lambda: seen.append("after"))
        raise AssertionError("the error never surfaced")
    assert "after" not in seen


def test_an_error_in_the_last_call_is_raised_on_leaving() -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), Background() as background:
        background.submit(fail)


def test_after_an_interrupt_nothing_runs_any_more() -> None:
    seen: list[int] = []
    started = threading.Event()

    def slow(i: int) -> None:
        started.set()
        time.sleep(0.05)
        seen.append(i)

    with pytest.raises(KeyboardInterrupt), Background(depth=8) as background:
        for i in range(8):
            background.submit(lambda i=i: slow(i))  # type: ignore[misc]
        started.wait(5)
        raise KeyboardInterrupt
    count = len(seen)
    assert count < 8
    time.sleep(0.2)
    assert len(seen) == count
