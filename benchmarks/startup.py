"""How fast the command line answers, beside Python importing typer and nothing else."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 15

COMMANDS = {
    "attnlens --help": [sys.executable, "-m", "attnlens", "--help"],
    "attnlens plugins": [sys.executable, "-m", "attnlens", "plugins"],
    "completion of --plugins": [
        sys.executable, "-c", "from attnlens.cli.options import complete_plugins as c; c('sp')",
    ],
}  # fmt: skip
TYPER = [sys.executable, "-c", "import typer"]


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    everything = {"python -c 'import typer'": TYPER, **COMMANDS}
    for command in everything.values():
        seconds(command)  # fills the caches
    times: dict[str, list[float]] = {name: [] for name in everything}
    for _ in range(REPEATS):
        for name, command in everything.items():
            times[name].append(seconds(command))
    base = statistics.median(times["python -c 'import typer'"])
    for name, taken in times.items():
        quarters = statistics.quantiles(taken, n=4)
        print(
            f"{name:28} {statistics.median(taken) * 1e3:6.0f} ms "
            f"({quarters[0] * 1e3:.0f} to {quarters[2] * 1e3:.0f})  "
            f"{statistics.median(taken) / base:5.1f} x import typer"
        )


main()
