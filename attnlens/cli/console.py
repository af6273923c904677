"""What the command line says, and where: results on stdout, everything else on stderr."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from attnlens.errors import AttnlensError
from attnlens.progress import Progress, Silent

if TYPE_CHECKING:
    from attnlens.analysis import Finding

P = ParamSpec("P")

#: Exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130


def say(text: str = "") -> None:
    """Write a line for people, to stderr."""
    typer.echo(text, err=True)


def tell(findings: Iterable[Finding]) -> None:
    """Write findings, those that hold first."""
    for finding in sorted(findings, key=lambda f: not f.holds):
        mark = typer.style("+", fg="green") if finding.holds else "-"
        say(f"{mark} {finding.analysis}: {finding.text}")


def complain(error: AttnlensError) -> None:
    """Write an error and what to do about it."""
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    say(error.message)
    if error.hint:
        say(f"  {error.hint}")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn what a command raises into one clear message and the right exit code.

    The wrapped command's ``debug`` argument, where it has one, lets the traceback through.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        debug = bool(kwargs.get("debug"))
        try:
            command(*args, **kwargs)
        except AttnlensError as error:
            if debug:
                raise
            complain(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, BrokenPipeError):
            raise
        except MemoryError:
            complain(AttnlensError("Out of memory.", hint="Try fewer or shorter prompts."))
            raise typer.Exit(1) from None
        except Exception as error:
            if debug:
                raise
            complain(
                AttnlensError(
                    f"unexpected {type(error).__name__}: {error}",
                    hint="This is a fault in attnlens. --debug shows where it happened.",
                )
            )
            raise typer.Exit(1) from None

    return wrapper


def configure_logging(*, quiet: bool, verbose: bool) -> None:
    """Send attnlens's own log to stderr at the chosen level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log = logging.getLogger("attnlens")
    log.handlers[:] = [handler]
    log.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.WARNING)
    log.propagate = False


class _Lines:
    """Progress as plain lines, for log files: one when a stage starts, then now and then."""

    interval = 10.0

    @contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        started = last = time.monotonic()
        done = 0
        say(text + (f" ({total})" if total else "") + " ...")

        def advance(steps: int) -> None:
            nonlocal done, last
            done += steps
            if time.monotonic() - last >= self.interval:
                last = time.monotonic()
                say(f"{text}: {done}" + (f" of {total}" if total else ""))

        yield advance
        if time.monotonic() - started >= self.interval:
            say(f"{text}: done in {time.monotonic() - started:.0f} s")

    def note(self, text: str) -> None:
        say(f"note: {text}")


class _Bars:
    """Progress as bars on a terminal, which vanish when their stage is done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        task = self._bars.add_task(text, total=total, count="")
        done = 0

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            self._bars.update(task, advance=steps, count=f"{done}/{total}" if total else "")

        try:
            yield advance
        finally:
            self._bars.remove_task(task)

    def note(self, text: str) -> None:
        from rich.text import Text

        self._bars.console.print(Text(f"note: {text}", style="yellow"))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Progress]:
    """Choose bars on a terminal, plain lines elsewhere, and silence where it was asked for."""
    if quiet:
        yield Silent()
    elif sys.stderr.isatty():
        with _Bars() as bars:
            yield bars
    else:
        yield _Lines()


def print_table(
    columns: list[str], rows: list[list[Any]], *, title: str | None = None, err: bool = False
) -> None:
    """Print a table, as wide as the terminal or, when piped, as wide as it needs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = sys.stderr if err else sys.stdout
    console = Console(file=stream) if stream.isatty() else Console(file=stream, width=200)
    drawn = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(drawn)
