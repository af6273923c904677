"""``python -m benchmarks``: every measurement that README quotes, one after the other.

Each runs in a process of its own, on one thread unless it says otherwise, and prints ratios of
medians with their spread. Name some to run these alone: ``python -m benchmarks capture``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(names: list[str]) -> int:
    """Run the benchmarks of these names, or all; return the number that failed."""
    scripts = sorted(p for p in HERE.glob("*.py") if not p.name.startswith("_"))
    known = {p.stem: p for p in scripts}
    unknown = [n for n in names if n not in known]
    if unknown:
        print(f"There is no benchmark {', '.join(unknown)}; there are {', '.join(known)}.")
        return 2
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    failed = 0
    for name in names or list(known):
        print(f"== {name}", flush=True)
        failed += bool(subprocess.run([sys.executable, known[name]], env=environment).returncode)
    return failed


sys.exit(main(sys.argv[1:]))
