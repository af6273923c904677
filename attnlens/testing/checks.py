"""What every analysis must keep, one check for each promise."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from attnlens.analysis import Analysis, Finding, Skip
from attnlens.errors import AttnlensError
from attnlens.results import check_result, load_result, save_result
from attnlens.store import Store
from attnlens.testing.stores import make_store
from attnlens.view import View

#: How a check is run: with something that makes a fresh analysis.
Make = Callable[[], Analysis]


class CheckFailed(AssertionError):
    """An analysis does not keep one of the promises that all analyses make."""


def compute(analysis: Analysis, store: Store) -> xr.Dataset:
    """Compute as a run does: through a view that shows what was declared and nothing else.

    The results that it requires from other analyses are computed first, from installed plugins.
    """
    from attnlens.selection import select

    results: dict[str, xr.Dataset] = {}
    for one in select([analysis])[:-1]:
        results[one.name] = compute(one.analysis, store)
    view = View(store, analysis.needs(), analysis=analysis.name, results=results)
    return check_result(analysis.compute(view), analysis.name)


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


def construction(make: Make) -> None:
    """Store the options on construction and nothing else."""
    one, two = make(), make()
    _demand(
        set(vars(one)) <= {"options"}, f"__init__ stores {sorted(set(vars(one)) - {'options'})}"
    )
    _demand(one.options == two.options, "two analyses made alike have different options")
    _demand(bool(one.name) and isinstance(one.requires, tuple), "name and requires must be set")
    one.needs()


def options_round_trip(make: Make) -> None:
    """Read each option back from a string, as -o does."""
    analysis = make()
    written = {}
    for name, value in analysis.options.model_dump(mode="json").items():
        if value is not None:
            written[name] = value if isinstance(value, str) else json.dumps(value)
    again = type(analysis).Options.read(written, prefix=analysis.name)
    for name in written:
        _demand(
            getattr(again, name) == getattr(analysis.options, name),
            f"{name}={written[name]!r} reads back as {getattr(again, name)!r}",
        )


def declares_what_it_reads(make: Make) -> None:
    """Read nothing that `requires` does not name; the view refuses it."""
    compute(make(), make_store())


def leaves_the_store_alone(make: Make) -> None:
    """Change nothing in the store."""
    store = make_store()
    before = _fingerprint(store)
    compute(make(), store)
    _demand(_fingerprint(store) == before, "compute changed the store")


def deterministic(make: Make) -> None:
    """Give the same bytes for the same store, whatever the global random state."""
    state = np.random.get_state()
    try:
        np.random.seed(1)
        first = compute(make(), make_store())
        np.random.seed(2)
        second = compute(make(), make_store())
    finally:
        np.random.set_state(state)
    _demand(first.identical(second), "computing twice gave two results")


def small_and_odd_inputs(make: Make) -> None:
    """Give a result, or a reason (Skip, AttnlensError), for small and odd stores."""
    for name, shape in ODD_STORES.items():
        try:
            compute(make(), make_store(**shape))
        except (Skip, AttnlensError) as reason:
            _demand(bool(str(reason).strip()), f"{name}: refused without a reason")
        except Exception as error:
            raise CheckFailed(f"{name}: {type(error).__name__}: {error}") from error


#: The small and odd stores, as arguments of :func:`attnlens.testing.make_store`.
ODD_STORES: dict[str, dict[str, Any]] = {
    "grouped-query": {"n_heads": 4, "n_kv_heads": 2},
    "float16": {"dtype": np.float16},
    "one layer": {"n_layers": 1},
    "one head": {"n_heads": 1},
    "one prompt": {"n_prompts": 1},
    "one token": {"length": 1},
    "two tokens": {"length": 2},
    "ragged": {"lengths": [3, 12, 7, 5]},
    "ragged with one token": {"lengths": [1, 12, 1, 2]},
    "no twins": {"twins": 0},
    "one twin": {"twins": 1},
    "uniform": {"kind": "uniform"},
    "identity": {"kind": "identity"},
    "previous-token": {"kind": "previous-token"},
    "induction": {"kind": "induction"},
    "planted-cp": {"kind": "planted-cp", "n_heads": 6},
}


def named_and_finite(make: Make) -> None:
    """Name all dimensions, and give finite numbers."""
    result = compute(make(), make_store())
    for name, values in result.data_vars.items():
        nameless = [d for d in values.dims if str(d).startswith("dim_")]
        _demand(not nameless, f"{name} has nameless dimensions {nameless}")
        if values.dtype.kind == "f":
            _demand(bool(np.isfinite(values).all()), f"{name} holds NaN or infinity")


def saves_loads_draws(make: Make) -> None:
    """Survive the disk, and draw everything from what was read back."""
    from attnlens.drawing import draw_all

    analysis = make()
    result = compute(analysis, make_store())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / analysis.name
        save_result(result, place)
        loaded = load_result(place)
        _demand(
            all(_same(loaded[n], result[n]) for n in result.variables),
            "the result read back differs from the one that was saved",
        )
        shown = draw_all(make(), loaded, place)
    _demand(not shown["errors"], "; ".join(e["message"] for e in shown["errors"]))


def pickles(make: Make) -> None:
    """Survive pickling, as when it is sent to another process."""
    analysis = make()
    again = pickle.loads(pickle.dumps(analysis))
    _demand(again.options == analysis.options, "its options do not survive pickling")


def leaves_matplotlib_alone(make: Make) -> None:
    """Leave no pyplot figure open and no setting of matplotlib changed."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    opened = _open_figures()
    saves_loads_draws(make)
    _demand(_open_figures() == opened, "a pyplot figure was left open: draw on the one given")
    changed = [k for k, v in matplotlib.rcParams.items() if before.get(k) != v]
    _demand(not changed, f"matplotlib settings were changed: {changed}")


def imports_no_torch(make: Make) -> None:
    """Leave torch unloaded on import, so that `attnlens plot` is quick."""
    module = type(make()).__module__
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    _demand(done.returncode == 0, f"importing {module} imports torch (or fails): {done.stderr}")


def permuting_heads_permutes_the_result(make: Make) -> None:
    """Follow a permutation of the heads, where `permutes_heads` says so."""
    if not make().permutes_heads:
        return
    order = [2, 0, 3, 1]
    plain, shuffled = compute(make(), make_store()), compute(make(), _permuted(make_store(), order))
    for name, values in plain.data_vars.items():
        if "head" in values.dims and values.dtype.kind in "fiub":
            expected = values.isel(head=order).values
            _demand(
                bool(np.allclose(shuffled[name].values, expected, rtol=1e-4, atol=1e-6)),
                f"{name} does not follow a permutation of the heads",
            )


def claims_nothing_of_a_random_model(make: Make) -> None:
    """Claim nothing of a model whose weights are random, over several seeds."""
    for seed in range(8):
        analysis = make()
        try:
            result = compute(analysis, make_store(seed=seed, n_heads=6, length=24))
        except Skip:
            continue
        made = [f for f in analysis.findings(result) if Finding.model_validate(f).holds]
        _demand(not made, f"seed {seed}: " + "; ".join(f"{f.claim}: {f.text}" for f in made))


#: Every check by its name.
CHECKS: Mapping[str, Callable[[Make], None]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        construction,
        options_round_trip,
        declares_what_it_reads,
        leaves_the_store_alone,
        deterministic,
        small_and_odd_inputs,
        named_and_finite,
        saves_loads_draws,
        pickles,
        leaves_matplotlib_alone,
        imports_no_torch,
        permuting_heads_permutes_the_result,
        claims_nothing_of_a_random_model,
    )
}


def check_analysis(
    analysis: type[Analysis] | Analysis, *, expected_failures: Mapping[str, str] | None = None
) -> None:
    """Hold an analysis to everything that a run, a report and a notebook rely on.

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
    unknown = set(expected) - set(CHECKS)
    if unknown:
        raise CheckFailed(f"There are no checks {sorted(unknown)}; there are {sorted(CHECKS)}.")
    make = maker(analysis)
    failed = []
    for name, check in CHECKS.items():
        try:
            check(make)
        except Exception as error:
            if name not in expected:
                failed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if name in expected:
                failed.append(f"{name}: expected to fail ({expected[name]}), and holds")
    if failed:
        raise CheckFailed("\n".join(failed))


def maker(analysis: type[Analysis] | Analysis) -> Make:
    """Return a function that makes the analysis afresh."""
    if isinstance(analysis, Analysis):
        kind, options = type(analysis), analysis.options.model_dump(exclude_unset=True)
        return lambda: kind(**options)
    return analysis


def _fingerprint(store: Store) -> str:
    digest = hashlib.sha256()
    for place in (store, *store.twins, *store.corpora.values()):
        for name in place.manifest.activations:
            digest.update(np.ascontiguousarray(place[name].values).tobytes())
        if place.has_weights:
            for values in place.weights.values():
                digest.update(np.ascontiguousarray(values.values).tobytes())
    return digest.hexdigest()


def _permuted(store: Store, order: list[int]) -> Store:
    """Return the store with its heads in another order, with its twins and corpora."""
    arrays: dict[str, Any] = {}
    for name in store.manifest.activations:
        values = store[name]
        heads = [d for d in values.dims if d in ("head", "kv_head")]
        arrays[name] = values.isel(dict.fromkeys(heads, order)).values
    weights = {
        str(name): values.isel({d: order for d in ("head", "kv_head") if d in values.dims}).values
        for name, values in store.weights.data_vars.items()
    }
    return Store.from_arrays(
        tokens=store.tokens.values,
        vocabulary=store.vocabulary,
        weights=weights,
        model=store.facts,
        period=store.manifest.prompts.period,
        twins=[_permuted(t, order) for t in store.twins],
        corpora={name: _permuted(c, order) for name, c in store.corpora.items()},
        **arrays,
    )


def _same(a: xr.DataArray, b: xr.DataArray) -> bool:
    if b.dtype.kind in "fc":
        return bool(np.array_equal(a.values, b.values, equal_nan=True))
    return bool((a.values.astype(str) == b.values.astype(str)).all())


def _open_figures() -> list[int]:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return list(pyplot.get_fignums()) if pyplot else []
