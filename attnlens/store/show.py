"""A store as people see it: text, a table in a notebook, a dictionary for the command line."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlens.activations import ACTIVATIONS
from attnlens.needs import STATISTICS_DESCRIBED
from attnlens.store.schema import UNITS, Manifest, load_manifest

if TYPE_CHECKING:
    from attnlens.store.read import Store


def as_text(store: Store) -> str:
    """Return the store's ``repr``."""
    lines = [f"<Store {_title(store)}>"]
    lines += [f"  {key}: {value}" for key, value in _facts(store)]
    lines += [
        f"  {name:<{_width(store)}}  {what}  {shape}".rstrip()
        for name, what, shape, _ in _rows(store)
    ]
    return "\n".join(lines)


def as_html(store: Store) -> str:
    """Return the table that a notebook shows; every text in it is escaped."""
    facts = "".join(
        f"<tr><th scope='row'>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>"
        for k, v in _facts(store)
    )
    rows = "".join(
        f"<tr><th scope='row'><code>{html.escape(name)}</code></th><td>{html.escape(what)}</td>"
        f"<td>{html.escape(shape)}</td><td>{html.escape(about)}</td></tr>"
        for name, what, shape, about in _rows(store)
    )
    return (
        "<div class='attnlens-store'>"
        f"<strong>attnlens store</strong> {html.escape(_title(store))}"
        f"<table style='text-align:left'><tbody>{facts}</tbody></table>"
        "<table style='text-align:left'><thead><tr><th scope='col'>name</th>"
        "<th scope='col'>kind</th><th scope='col'>size</th><th scope='col'>what</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _title(store: Store) -> str:
    model = store.manifest.model.get("name") or "arrays"
    return f"{model}, {store.path}" if store.path else f"{model}, in memory"


def _width(store: Store) -> int:
    return max((len(r[0]) for r in _rows(store)), default=0)


def _facts(store: Store) -> list[tuple[str, str]]:
    manifest = store.manifest
    facts = [("corpus", str(manifest.corpus.get("name", "unknown"))), ("prompts", _span(manifest))]
    model = manifest.model
    if "n_layers" in model and "n_heads" in model:
        facts.insert(0, ("model", f"{model['n_layers']} layers x {model['n_heads']} heads"))
    if store.has_weights:
        facts.append(("weights", ", ".join(str(n) for n in store.weights)))
    if store.twins:
        facts.append(("twins", str(len(store.twins))))
    if store.corpora:
        facts.append(("other corpora", ", ".join(store.corpora)))
    return facts


def _span(manifest: Manifest) -> str:
    lengths = manifest.prompts.lengths
    low, high = min(lengths), max(lengths)
    tokens = f"{high} tokens" if low == high else f"{low} to {high} tokens"
    return f"{manifest.prompts.n} of {tokens}"


def _rows(store: Store) -> list[tuple[str, str, str, str]]:
    """Return (name, kind, size, what) of everything that the store gives."""
    rows = []
    known = _sizes(store)
    for name in store.names():
        if name in ACTIVATIONS:
            array = store.lazy(name)
            dims = ACTIVATIONS[name].dims
            size = ", ".join(f"{d} {n}" for d, n in zip(dims, array.shape, strict=True))
            raw = math.prod(array.shape) * array.dtype.itemsize
            kind = "activation" if name in store.manifest.activations else "derived"
            rows.append((name, kind, f"{size}; {readable(raw)}", ACTIVATIONS[name].what))
        else:
            stored = name in store.manifest.statistics or name in store._given
            kind = "statistic" if stored else "statistic, computed on reading"
            dims, what = _statistic(store, name)
            size = ", ".join(f"{d} {known[d]}" if d in known else d for d in dims)
            rows.append((name, kind, size, what))
    return rows


def _statistic(store: Store, name: str) -> tuple[tuple[str, ...], str]:
    """Return a statistic's dimensions, and what it is."""
    if name in STATISTICS_DESCRIBED:
        return STATISTICS_DESCRIBED[name]
    own = store._own_statistics.get(name)
    if own is None:
        return tuple(map(str, store._given[name].dims)) if name in store._given else (), ""
    return own.dims, " ".join((own.__doc__ or "").partition("\n\n")[0].split())


def _sizes(store: Store) -> dict[str, int]:
    """Return the sizes of dimensions that are known without reading a statistic."""
    manifest = store.manifest
    sizes = {"prompt": manifest.prompts.n}
    for name in manifest.activations:
        sizes |= dict(zip(ACTIVATIONS[name].dims, store.lazy(name).shape, strict=True))
    for dim, fact in (("layer", "n_layers"), ("head", "n_heads"), ("d_head", "d_head")):
        if fact in manifest.model:
            sizes[dim] = int(manifest.model[fact])
    for dim, chosen in (("layer", manifest.layers), ("head", manifest.heads)):
        if chosen is not None:
            sizes[dim] = len(chosen)
    return sizes | ({"d_head_2": sizes["d_head"]} if "d_head" in sizes else {})


def readable(size: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def store_info(path: str | Path) -> dict[str, Any]:
    """Describe a store without opening its arrays; unfinished ones, too.

    Parameters
    ----------
    path : path

    Returns
    -------
    dict
        ``path``, ``schema``, ``sealed``, ``model``, ``corpus``, ``prompts``, ``lengths``,
        ``activations``, ``statistics``, ``units`` (how many, and how many are there),
        ``weights``, ``vocabulary``, ``bytes``, ``twins``, ``corpora``, ``versions``, ``seed``,
        ``created``, ``command``, ``notes``, and ``arrays``: one row for each activation and
        statistic. Plain data, fit for JSON.

    Raises
    ------
    StoreError
        If there is no store, or its manifest cannot be read.
    """
    from attnlens.store.check import companions

    folder = Path(path)
    manifest = load_manifest(folder)
    there = sum((folder / UNITS / u.folder).is_dir() for u in manifest.units)
    lengths = manifest.prompts.lengths
    kinds: dict[str, list[str]] = {"twins": [], "corpora": []}
    for companion in companions(folder):
        kinds[companion.parent.name].append(companion.name)
    return {
        "path": str(folder),
        "schema": manifest.schema_,
        "sealed": manifest.sealed,
        "model": manifest.model,
        "corpus": manifest.corpus,
        "prompts": manifest.prompts.n,
        "lengths": [min(lengths), max(lengths)],
        "activations": {n: a.model_dump() for n, a in manifest.activations.items()},
        "statistics": manifest.statistics,
        "units": {"planned": len(manifest.units), "present": there},
        "weights": manifest.weights,
        "vocabulary": manifest.vocabulary,
        "bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
        **kinds,
        "versions": manifest.versions,
        "seed": manifest.seed,
        "created": manifest.created,
        "command": manifest.command,
        "notes": manifest.notes,
        "arrays": _array_rows(folder, manifest),
    }


def _array_rows(folder: Path, manifest: Manifest) -> list[dict[str, str]]:
    """Return, for each activation and statistic, its kind, parts, and bytes on disk."""
    units = folder / UNITS
    rows = []
    for name, spec in manifest.activations.items():
        size = sum(p.stat().st_size for p in units.glob(f"[0-9]*/{name}/*"))
        rows.append(
            {
                "name": name,
                "kind": spec.dtype,
                "layers": _listed(spec.layers),
                "heads": "all" if spec.heads is None else _listed(spec.heads),
                "on disk": readable(size),
            }
        )
    for name in manifest.statistics:
        size = sum(p.stat().st_size for p in units.glob(f"[0-9]*/statistics/{name}/*/*"))
        rows.append(
            {
                "name": name,
                "kind": "statistic",
                "layers": "all" if manifest.layers is None else _listed(manifest.layers),
                "heads": "all" if manifest.heads is None else _listed(manifest.heads),
                "on disk": readable(size),
            }
        )
    return rows


def _listed(numbers: list[int]) -> str:
    """Write numbers as people do: a run as its first and last."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
