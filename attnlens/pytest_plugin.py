"""The pytest fixture ``attnlens_check``. Importing it leaves torch and attnlens's core unloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


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
    marks = list(metafunc.definition.iter_markers("attnlens"))
    if not marks:
        _refuse(metafunc, "it has no @pytest.mark.attnlens(analysis=...)")
    cases = []
    for mark in marks:
        cases += _cases(metafunc, mark)
    metafunc.parametrize("attnlens_check", cases, indirect=True)


def _cases(metafunc: pytest.Metafunc, mark: pytest.Mark) -> list[ParameterSet]:
    """Return one parameter for each check of the analysis that a marker names."""
    from attnlens.analysis import Analysis
    from attnlens.testing.checks import CHECKS, CheckFailed
    from attnlens.testing.kit import check_names

    unknown = set(mark.kwargs) - {"analysis", "expected_failures"}
    if mark.args or unknown:
        given = ", ".join([*map(repr, mark.args), *sorted(unknown)])
        _refuse(metafunc, f"the marker takes analysis= and expected_failures=, not {given}")
    analysis = mark.kwargs.get("analysis")
    kind = analysis if isinstance(analysis, type) else type(analysis)
    if not issubclass(kind, Analysis):
        _refuse(metafunc, f"analysis={analysis!r} is no class or instance of attnlens.Analysis")
    expected = dict(mark.kwargs.get("expected_failures") or {})
    try:
        check_names(expected)
    except CheckFailed as error:
        _refuse(metafunc, str(error))
    return [
        pytest.param(
            (analysis, name, expected),
            id=f"{getattr(kind, 'name', kind.__name__)}-{name}",
            marks=[pytest.mark.xfail(reason=expected[name], strict=True)]
            if name in expected
            else [],
        )
        for name in CHECKS
    ]


def _refuse(metafunc: pytest.Metafunc, why: str) -> NoReturn:
    """Make the module's collection fail, and nothing else's."""
    pytest.fail(
        f"{metafunc.function.__name__} uses attnlens_check, and {why}. "
        "Write @pytest.mark.attnlens(analysis=YourAnalysis).",
        pytrace=False,
    )


@pytest.fixture
def attnlens_check(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Return one check of one analysis, to be called."""
    from attnlens.testing.checks import CHECKS, FOUNDATIONS
    from attnlens.testing.kit import failing_foundations, maker

    analysis, name, expected = request.param

    def check() -> None:
        if name not in FOUNDATIONS:
            for failing in failing_foundations(analysis):
                if failing not in expected:
                    pytest.skip(f"{failing} does not hold, and this builds on it")
        CHECKS[name](maker(analysis))

    return check
