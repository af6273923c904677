"""What every analysis must keep, one check for each promise."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from attnlens.analysis import Analysis, Skip
from attnlens.contract import check_class
from attnlens.drawing import draw_all
from attnlens.errors import AttnlensError, PluginError, ResultError, UndeclaredNeedError
from attnlens.results import (
    check_findings,
    check_highlights,
    check_result,
    load_result,
    save_result,
)
from attnlens.selection import select
from attnlens.store import Store
from attnlens.testing.stores import make_store, permuted
from attnlens.testing.surroundings import changed_state, class_state, kept, watched
from attnlens.view import View

#: How a check is run: with something that makes a fresh analysis, and whose ``func`` is its class.
Make: TypeAlias = functools.partial[Analysis]


class CheckFailed(AssertionError):
    """An analysis does not keep one of the promises that all analyses make."""


def compute(analysis: Analysis, store: Store) -> xr.Dataset:
    """Compute as a run does: through a view that shows what was declared and nothing else.

    The results that it requires from other analyses are computed first, from installed plugins.
    """
    return check_result(analysis.compute(_view(analysis, store)), analysis.name)


def _view(analysis: Analysis, store: Store) -> View:
    results: dict[str, xr.Dataset] = {}
    for one in select([analysis])[:-1]:
        results[one.name] = compute(one.analysis, store)
    return View(store, analysis.needs(), analysis=analysis.name, results=results)


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


def construction(make: Make) -> None:
    """Have a name and `requires`; store the options on construction and nothing else, anywhere."""
    check_class(make.func)
    before = class_state(make.func, Analysis)  # type: ignore[arg-type]
    with watched(anywhere=True) as changes:
        one, two = make(), make()
    after = class_state(make.func, Analysis)  # type: ignore[arg-type]
    changes += [f"changed {name}" for name in changed_state(before, after)]
    _demand(not changes, f"__init__ {', '.join(changes)}")
    _demand(
        set(vars(one)) <= {"options"}, f"__init__ stores {sorted(set(vars(one)) - {'options'})}"
    )
    _demand(one.options == two.options, "two analyses made alike have different options")
    one.needs()


def options_are_described(make: Make) -> None:
    """Say what each option is, for the command line, the reference and error messages."""
    fields = make().Options.model_fields
    bare = [name for name, field in fields.items() if not (field.description or "").strip()]
    _demand(not bare, f"no description: {', '.join(bare)}; write Field(..., description='...')")


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
    analysis = make()
    view = _view(analysis, make_store())
    check_result(analysis.compute(view), analysis.name)
    _demand_declared(view)


def _demand_declared(view: View, where: str = "") -> None:
    read = ", ".join(dict.fromkeys(view.refused))
    _demand(
        not read,
        f"{where}it asked for {read} without having declared it, and caught the error; declare "
        "what may be missing with a question mark, as in 'q_rot?'",
    )


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
        analysis = make()
        view = _view(analysis, make_store(**shape))
        try:
            result = check_result(analysis.compute(view), analysis.name)
            check_findings(analysis.findings(result), analysis.name)
        except (UndeclaredNeedError, ResultError, PluginError) as fault:
            raise CheckFailed(f"{name}: {fault}") from fault
        except (Skip, AttnlensError) as reason:
            _demand(bool(str(reason).strip()), f"{name}: refused without a reason")
        except Exception as error:
            raise CheckFailed(f"{name}: {type(error).__name__}: {error}") from error
        _demand_declared(view, f"{name}: ")


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
    """Survive pickling, before and after computing, as when it is sent to another process."""
    analysis = make()
    for when in ("before", "after"):
        again = pickle.loads(pickle.dumps(analysis))
        _demand(
            again.options == analysis.options, f"its options do not survive pickling {when} compute"
        )
        if when == "before":
            compute(analysis, make_store())


def leaves_the_process_alone(make: Make) -> None:
    """Change nothing that others share: settings, seeds, files where they work, what is printed."""
    with kept():  # what is imported on the way may settle things once
        _everything(make)
    with watched() as changes:
        _everything(make)
    _demand(not changes, f"it {', '.join(changes)}")


def _everything(make: Make) -> None:
    analysis = make()
    result = compute(analysis, make_store())
    check_findings(analysis.findings(result), analysis.name)
    for kind, show in (
        ("figure", analysis.draw),
        ("table", analysis.tabulate),
        ("highlight", lambda name, of: check_highlights(getattr(analysis, name)(of), name)),
    ):
        for drawing in analysis.drawings(kind):
            with contextlib.suppress(Skip):
                show(drawing.name, result)


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
    """Follow a permutation of the heads and change nothing else, where `permutes_heads` says so."""
    if not make().permutes_heads:
        return
    order = [2, 0, 3, 1]
    plain = compute(make(), make_store()).reset_coords()
    shuffled = compute(make(), permuted(make_store(), order)).reset_coords()
    for name, values in plain.data_vars.items():
        if "head" in values.dims:
            expected = values.isel(head=order)
            wrong = f"{name} does not follow a permutation of the heads"
        else:
            expected = values
            wrong = f"{name} has no dimension `head`, and changes when the heads are permuted"
        _demand(name in shuffled and _alike(shuffled[name], expected), wrong)


def _alike(a: xr.DataArray, b: xr.DataArray) -> bool:
    if a.shape != b.shape:
        return False
    if b.dtype.kind in "fciub":
        return bool(np.allclose(a.values, b.values, rtol=1e-4, atol=1e-6, equal_nan=True))
    return _same(a, b)


def claims_nothing_of_a_random_model(make: Make) -> None:
    """Claim nothing of a model whose weights are random, over several seeds."""
    for seed in range(8):
        analysis = make()
        try:
            result = compute(analysis, make_store(seed=seed, n_heads=6, length=24))
        except Skip:
            continue
        made = [f for f in check_findings(analysis.findings(result), analysis.name) if f.holds]
        _demand(not made, f"seed {seed}: " + "; ".join(f"{f.claim}: {f.text}" for f in made))


def _apart(check: Callable[[Make], None]) -> Callable[[Make], None]:
    @functools.wraps(check)
    def run(make: Make) -> None:
        with kept():
            check(make)

    return run


#: Every check by its name.
CHECKS: Mapping[str, Callable[[Make], None]] = {
    check.__name__.replace("_", "-"): _apart(check)
    for check in (
        construction,
        declares_what_it_reads,
        options_are_described,
        options_round_trip,
        leaves_the_store_alone,
        deterministic,
        small_and_odd_inputs,
        named_and_finite,
        saves_loads_draws,
        pickles,
        leaves_the_process_alone,
        imports_no_torch,
        permuting_heads_permutes_the_result,
        claims_nothing_of_a_random_model,
    )
}

#: Checks without which the others would only say the same again.
FOUNDATIONS = ("construction", "declares-what-it-reads")


def _fingerprint(store: Store) -> str:
    digest = hashlib.sha256()
    for place in (store, *store.twins, *store.corpora.values()):
        for name in place.manifest.activations:
            digest.update(np.ascontiguousarray(place[name].values).tobytes())
        if place.has_weights:
            for values in place.weights.values():
                digest.update(np.ascontiguousarray(values.values).tobytes())
    return digest.hexdigest()


def _same(a: xr.DataArray, b: xr.DataArray) -> bool:
    if b.dtype.kind in "fc":
        return bool(np.array_equal(a.values, b.values, equal_nan=True))
    return bool((a.values.astype(str) == b.values.astype(str)).all())
