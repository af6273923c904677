"""All checks of one analysis together."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from attnlens.activations import nearest
from attnlens.analysis import Analysis
from attnlens.errors import AttnlensError
from attnlens.testing.checks import CHECKS, FOUNDATIONS, CheckFailed, Make


def maker(analysis: type[Analysis] | Analysis) -> Make:
    """Return a function that makes the analysis afresh."""
    if isinstance(analysis, Analysis):
        return functools.partial(type(analysis), **analysis.options.model_dump(exclude_unset=True))
    return functools.partial(analysis)


def check_analysis(
    analysis: type[Analysis] | Analysis, *, expected_failures: Mapping[str, str] | None = None
) -> None:
    """Hold an analysis to everything that a run, a report and a notebook rely on.

    Where it cannot be made, or reads what it did not declare, that is said once and the other
    checks are not made.

    Parameters
    ----------
    analysis : type or Analysis
        The class, or an instance whose options are to be used.
    expected_failures : mapping from a check's name to the reason, optional
        Checks that are known not to hold. One that does hold is reported too.

    Raises
    ------
    CheckFailed
        With every check that failed.
    """
    expected = dict(expected_failures or {})
    check_names(expected)
    make = maker(analysis)
    failed = []
    for name in CHECKS:
        wrong = _problem(name, make)
        if wrong is not None and name not in expected:
            failed.append(f"{name}: {wrong}")
            if name in FOUNDATIONS:
                failed.append("The checks that build on this one were not made.")
                break
        if wrong is None and name in expected:
            failed.append(f"{name}: expected to fail ({expected[name]}), and holds")
    if failed:
        raise CheckFailed("\n".join(failed))


def check_names(expected: Mapping[str, str]) -> None:
    """Refuse names that no check has.

    Raises
    ------
    CheckFailed
        With the nearest name.
    """
    for name in expected:
        if name not in CHECKS:
            near = nearest(name, CHECKS)
            raise CheckFailed(
                f"There is no check {name!r} that could be expected to fail. "
                + (f"Did you mean {near!r}? " if near else "")
                + f"Checks: {', '.join(CHECKS)}."
            )


@functools.cache
def failing_foundations(analysis: type[Analysis] | Analysis) -> tuple[str, ...]:
    """Name the checks that do not hold and on which all others build."""
    return tuple(n for n in FOUNDATIONS if _problem(n, maker(analysis)) is not None)


def _problem(name: str, make: Make) -> str | None:
    try:
        CHECKS[name](make)
    except (CheckFailed, AttnlensError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
