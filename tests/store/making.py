"""Small stores with known contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attnlens.activations import ACTIVATIONS
from attnlens.store import (
    ActivationSpec,
    Manifest,
    PromptsSpec,
    Store,
    StoreWriter,
    UnitSpec,
    UnitWriter,
)
from attnlens.store.schema import resolve_positions


@dataclass
class Recipe:
    """What a store holds; the same recipe always gives the same numbers."""

    lengths: Sequence[int] = (5, 7, 5, 7, 7)
    activations: dict[str, ActivationSpec] = field(
        default_factory=lambda: {
            "pattern": ActivationSpec(dtype="float16", layers=[0, 1]),
            "z": ActivationSpec(dtype="float16", layers=[0, 1]),
        }
    )
    statistics: Sequence[str] = ()
    heads: int = 4
    kv_heads: int = 2
    width: int = 3
    d_model: int = 6
    batch_size: int = 2
    unit_size: int = 3
    seed: int = 0
    weights: bool = False
    vocabulary: list[str] | None = None

    @property
    def manifest(self) -> Manifest:
        return Manifest(
            prompts=PromptsSpec(n=len(self.lengths), lengths=list(self.lengths)),
            corpus={"name": "text"},
            activations=self.activations,
            statistics=list(self.statistics),
            units=list(self._units()),
            batch_size=self.batch_size,
            seed=self.seed,
            versions={"attnlens": "0.1.0"},
        )

    def _units(self) -> Iterator[UnitSpec]:
        number = 0
        for length in sorted(set(self.lengths)):
            prompts = [i for i, n in enumerate(self.lengths) if n == length]
            for start in range(0, len(prompts), self.unit_size):
                part = prompts[start : start + self.unit_size]
                yield UnitSpec(id=number, prompts=part, length=length)
                number += 1

    def value(self, name: str, prompt: int, layer: int) -> np.ndarray[Any, Any]:
        """One prompt's values over the activation's dimensions without prompt and layer."""
        spec, length = self.activations[name], self.lengths[prompt]
        rows = len(resolve_positions(spec.positions, length)[0])
        every = self.kv_heads if ACTIVATIONS[name].head_dim == "kv_head" else self.heads
        sizes = {
            "head": every if spec.heads is None else len(spec.heads),
            "kv_head": every if spec.heads is None else len(spec.heads),
            "pos": rows,
            "query_pos": rows,
            "key_pos": length,
            "d_head": self.width,
            "d_model": self.d_model,
        }
        shape = [sizes[d] for d in ACTIVATIONS[name].dims[2:]]
        rng = np.random.default_rng([self.seed, prompt, layer, *name.encode()])
        if name == "pattern" and spec.positions is None:
            x = np.tril(rng.random(shape) + 0.1)
            return (x / x.sum(-1, keepdims=True)).astype(spec.dtype)
        return rng.normal(size=shape).astype(spec.dtype)

    def tokens(self, prompt: int) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng([self.seed, prompt])
        return rng.integers(0, 50, self.lengths[prompt]).astype(np.int32)

    def fill(self, out: UnitWriter) -> None:
        """Write one unit, batch by batch, layer by layer."""
        prompts = out.spec.prompts
        out.tokens(np.stack([self.tokens(p) for p in prompts]))
        for start in range(0, len(prompts), self.batch_size):
            batch = slice(start, min(start + self.batch_size, len(prompts)))
            for name, spec in self.activations.items():
                for layer in spec.layers:
                    value = np.stack([self.value(name, p, layer) for p in prompts[batch]])
                    out.write(name, layer, batch, value)
        for name in self.statistics:
            out.statistic(name, self.state(out.spec, name))

    def state(self, unit: UnitSpec, name: str) -> dict[str, np.ndarray[Any, Any]]:
        if name == "pattern.rows":
            return {"rows": np.full(2, float(len(unit.prompts) * unit.length))}

        from attnlens.attention import Attention
        from attnlens.statistics import STATISTICS

        layers = self.activations["pattern"].layers
        statistic = STATISTICS[name](
            n_prompts=len(unit.prompts),
            layers=layers,
            n_heads=self.heads,
            length=unit.length,
            d_head=self.width,
        )
        for layer in layers:
            value = np.stack([self.value("pattern", p, layer) for p in unit.prompts])
            attention = Attention.from_pattern(value)
            statistic.update(layer, attention, slice(0, len(unit.prompts)))
        return statistic.state()

    def w_o(self) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(self.seed)
        shape = (2, self.heads, self.width, self.d_model)
        return rng.normal(size=shape).astype(np.float32)

    def write(self, path: Path, *, overwrite: bool = False) -> Store:
        with StoreWriter.create(path, self.manifest, overwrite=overwrite) as writer:
            return self.finish(writer)

    def finish(self, writer: StoreWriter) -> Store:
        for unit in writer.missing_units():
            with writer.unit(unit) as out:
                self.fill(out)
        if self.weights:
            writer.weights({"W_O": self.w_o()})
        if self.vocabulary is not None:
            writer.vocabulary(self.vocabulary)
        return writer.seal()

    def expected(self, name: str) -> np.ndarray[Any, Any]:
        """All values as ``store[name]`` should give them, padded with NaN."""
        spec, longest = self.activations[name], max(self.lengths)
        rows = longest if spec.positions is None else len(spec.positions)
        one = self.value(name, 0, spec.layers[0])
        sizes = dict(zip(ACTIVATIONS[name].dims[2:], one.shape, strict=True))
        sizes |= {"prompt": len(self.lengths), "layer": len(spec.layers)}
        sizes |= {"pos": rows, "query_pos": rows, "key_pos": longest}
        out = np.full([sizes[d] for d in ACTIVATIONS[name].dims], np.nan)
        for prompt, length in enumerate(self.lengths):
            which, _ = resolve_positions(spec.positions, length)
            for i, layer in enumerate(spec.layers):
                value = self.value(name, prompt, layer)
                place = [
                    {"pos": which, "query_pos": which, "key_pos": np.arange(length)}.get(
                        d, np.arange(n)
                    )
                    for d, n in zip(ACTIVATIONS[name].dims[2:], value.shape, strict=True)
                ]
                out[prompt, i][np.ix_(*place)] = value
        return out


def files(folder: Path) -> dict[str, bytes]:
    """All files under a folder, by their relative names."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def data_files(store: Path) -> list[Path]:
    """All files of a store that hold numbers."""
    return sorted(p for p in (store / "units").rglob("c*") if p.is_file())
