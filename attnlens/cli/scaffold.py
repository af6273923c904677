"""``attnlens plugins new``: a complete package for one analysis."""

from __future__ import annotations

import keyword
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from attnlens.contract import is_name
from attnlens.errors import OutputError, UsageError

_TEMPLATES: dict[str, str] = {
    "pyproject.toml": """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "attnlens-@NAME@"
version = "0.1.0"
description = "An analysis for attnlens."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["attnlens>=@VERSION@"]

[project.optional-dependencies]
dev = ["pytest>=8"]

# The name on the left is the analysis's one name: for --plugins, for -o and for listing.
[project.entry-points."attnlens.plugins"]
@NAME@ = "@MODULE@"

[tool.hatch.build.targets.wheel]
packages = ["src/@MODULE@"]
""",
    "src/@MODULE@/__init__.py": '''"""The @NAME@ analysis for attnlens."""

from __future__ import annotations

import attnlens
from @MODULE@.analysis import @CLASS@

__all__ = ["@CLASS@"]


@attnlens.hookimpl
def attnlens_register_analysis() -> type[@CLASS@]:
    """Register :class:`@CLASS@`."""
    return @CLASS@
''',
    "src/@MODULE@/analysis.py": '''"""What the analysis needs, computes, draws and claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import xarray as xr
from pydantic import Field

import attnlens


class @CLASS@(attnlens.Analysis):
    """How concentrated each head's attention is.

    This first line is the analysis's title in the report; the rest is shown by
    `attnlens plugins show @NAME@`.
    """

    name = "@NAME@"
    # Activations, statistics, "weights", "model", "analysis:NAME", "twin"; each also
    # "...@repeated-random". Nothing else can be read.
    requires = ("pattern.max", "twin")
    # Permuting the heads of a store permutes this result: the kit holds it to that.
    permutes_heads = True

    class Options(attnlens.Options):
        """Set on the command line as -o @NAME@.top=5."""

        top: int = Field(10, ge=1, description="Heads to list in the table.")

    def compute(self, store: Any) -> xr.Dataset:
        """Average over prompts, for the model and for its twins (random weights)."""
        result = xr.Dataset({"concentration": store["pattern.max"].mean("prompt")})
        twins = [twin["pattern.max"].mean("prompt") for twin in store.twins]
        if twins:
            result["twins"] = xr.concat(twins, "twin")
        return result

    @attnlens.figure("The largest attention weight of a row, on average")
    def grid(self, result: xr.Dataset, figure: Any) -> str:
        """Draw on the matplotlib Figure that is given; return a text for who cannot see it."""
        attnlens.figures.head_grid(
            figure, result["concentration"], label="Weight", null=result.get("twins")
        )
        return f"The most concentrated head reaches {result['concentration'].max().item():.2f}."

    @attnlens.table("The most concentrated heads")
    def top_heads(self, result: xr.Dataset) -> pd.DataFrame:
        """List them."""
        frame = result["concentration"].to_dataframe().reset_index()
        return frame.nlargest(self.options.top, "concentration")

    def findings(self, result: xr.Dataset) -> Iterator[attnlens.Finding]:
        """Claim only what lies outside of what chance would have."""
        if "twins" not in result:
            return
        # `floor` is the smallest spread that would mean something, in the quantity's own unit.
        # With one or two twins the bounds are wide: --twins 3 or more makes them tell more.
        bounds = attnlens.nulls.twin_range(list(result["twins"]), floor=0.01)
        beyond = attnlens.nulls.above(result["concentration"], bounds)
        yield attnlens.Finding(
            claim="concentrated-heads",
            holds=bool(beyond.any()),
            text=f"{int(beyond.sum())} of {beyond.size} heads are more concentrated than chance.",
            evidence={"highest": result["concentration"].max()},
            null={"highest": result["twins"].max(), "bound": bounds["high"].max()},
        )
''',
    "tests/test_analysis.py": '''"""The kit's checks, and the closed form."""

import numpy as np
import pytest

import attnlens.testing
from @MODULE@ import @CLASS@


@pytest.mark.attnlens(analysis=@CLASS@)
def test_it_keeps_what_analyses_promise(attnlens_check):
    attnlens_check()


def test_attention_on_one_token_is_fully_concentrated():
    store = attnlens.testing.make_store("identity")
    result = attnlens.testing.compute(@CLASS@(), store)
    np.testing.assert_allclose(result["concentration"], 1.0)
''',
    "README.md": """# attnlens-@NAME@

An analysis for attnlens: how concentrated each head's attention is.

```sh
pip install -e ".[dev]"
attnlens plugins show @NAME@
attnlens run --plugins @NAME@ demo
pytest
```
""",
    ".github/workflows/test.yml": """name: test
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    strategy:
      matrix:
        python: ["3.11", "3.13"]
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: ${{ matrix.python }}
      # attnlens comes from PyPI. For another one, such as a version that is not published yet, set
      # the repository's variable ATTNLENS to what pip should install: "git+https://...", a URL.
      - run: pip install "${{ vars.ATTNLENS || 'attnlens' }}" -e ".[dev]"
      - run: attnlens plugins --check
      - run: pytest
""",
    ".gitignore": "__pycache__/\n*.egg-info/\n.venv/\ndist/\nattnlens-runs/\n",
}


def write_package(name: str, parent: Path) -> Path:
    """Write a package for one analysis, which installs, passes its tests and is found.

    Parameters
    ----------
    name : str
        The analysis's name: lower-case letters, digits and hyphens.
    parent : pathlib.Path
        Where the package's folder goes.

    Returns
    -------
    pathlib.Path
        The package's folder, ``parent / "attnlens-NAME"``.

    Raises
    ------
    UsageError
        If the name cannot be one, or its module is installed already.
    OutputError
        If the folder is there already.
    """
    module = f"attnlens_{name.replace('-', '_')}"
    class_name = "".join(part.capitalize() for part in name.split("-"))
    if not is_name(name) or keyword.iskeyword(class_name):
        raise UsageError(
            f"{name!r} cannot be the name of an analysis.",
            hint="Use lower-case letters, digits and hyphens, as in head-distance.",
        )
    if find_spec(module) is not None:
        raise UsageError(
            f"The package for {name!r} would hide the installed module {module}.",
            hint="Choose another name for yours.",
        )
    folder = parent / f"attnlens-{name}"
    if folder.exists():
        raise OutputError(f"{folder} is there already.", hint="Choose another name or folder.")
    words = {
        "@NAME@": name,
        "@MODULE@": module,
        "@CLASS@": class_name,
        "@VERSION@": version("attnlens"),
    }
    for path, content in _TEMPLATES.items():
        for word, value in words.items():
            path, content = path.replace(word, value), content.replace(word, value)
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return folder
