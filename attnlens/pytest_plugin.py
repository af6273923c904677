"""The pytest fixture ``attnlens_check``. Importing it leaves torch and attnlens's core unloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from attnlens.analysis import Analysis


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line(
        "markers",
        "attnlens(analysis=..., expected_failures={}): run attnlens's checks on an analysis, "
        "through the fixture attnlens_check; expected_failures maps a check's name to the reason.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each check."""
    if "attnlens_check" not in metafunc.fixturenames:
        return
    from attnlens.testing import CHECKS

    marks = list(metafunc.definition.iter_markers("attnlens"))
    if not marks:
        raise pytest.UsageError(
            f"{metafunc.function.__name__} uses attnlens_check without "
            "@pytest.mark.attnlens(analysis=...)"
        )
    cases = []
    for mark in marks:
        analysis: type[Analysis] | Analysis = mark.kwargs["analysis"]
        expected = mark.kwargs.get("expected_failures", {})
        for name in CHECKS:
            xfail = (
                [pytest.mark.xfail(reason=expected[name], strict=True)] if name in expected else []
            )
            label = f"{analysis.name}-{name}"
            cases.append(pytest.param((analysis, name), id=label, marks=xfail))
    metafunc.parametrize("attnlens_check", cases, indirect=True)


@pytest.fixture
def attnlens_check(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Return one check of one analysis, to be called."""
    from attnlens.testing import CHECKS, maker

    analysis, name = request.param
    return lambda: CHECKS[name](maker(analysis))
