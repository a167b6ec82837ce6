"""The console: styled output, progress bars and error messages (rich). Messages, tables and progress go to stderr, JSON
documents to stdout.

Only this module and cli.py print. Colours, bars and widths adapt: without a terminal the same words come as plain
lines. See ``wants_colour`` for the variables that decide on colours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from aiakq.errors import AiakqError, error
from aiakq.terminal.usage_errors import close_value

#: Columns of output that nobody watches on a terminal: wide enough that tables do not cut names.
PIPE_WIDTH = 120
#: Values of TERM without colours and cursor.
_DUMB = ("dumb", "unknown")
#: Seconds between two lines of progress where there is no terminal.
_PLAIN_INTERVAL_S = 10.0


class ClosedOutput(Exception):
    """The reader of stdout went away (``aiakq ... | head``)."""


class _Stderr:
    """The current stderr. A failing write is dropped: a full disk or a closed pipe must not end a server."""

    def write(self, text: str) -> int:
        try:
            return 0 if sys.stderr is None else sys.stderr.write(text)
        except (OSError, ValueError):
            return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        if sys.stderr is None:
            raise AttributeError(name)
        return getattr(sys.stderr, name)


def wants_colour(is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Whether output has colours: NO_COLOR forbids them, FORCE_COLOR and CLICOLOR_FORCE demand them, in that order.

    Otherwise a terminal has them, unless TERM is dumb or CLICOLOR is 0. Empty variables count as not set.
    """
    if environment.get("NO_COLOR"):
        return False
    if force := environment.get("FORCE_COLOR"):
        return force.lower() not in ("0", "false")
    if environment.get("CLICOLOR_FORCE") not in (None, "", "0"):
        return True
    return is_terminal and environment.get("TERM") not in _DUMB and environment.get("CLICOLOR") != "0"


def _console(file: Any, fallback_width: int | None = None) -> Console:
    """A console on ``file``. Without a terminal, and without COLUMNS, it is ``fallback_width`` wide."""
    is_terminal = _is_terminal(file)
    colour = wants_colour(is_terminal, os.environ)
    width = None if is_terminal or "COLUMNS" in os.environ else fallback_width
    system: Any = None
    if colour:
        system = "auto" if is_terminal and os.environ.get("TERM") not in _DUMB else "standard"
    return Console(
        file=file,
        highlight=False,
        markup=False,
        width=width,
        color_system=system,
        force_terminal=is_terminal or colour,
        no_color=not colour,
    )


def _is_terminal(file: Any) -> bool:
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):
        return False


def is_animated() -> bool:
    """Whether somebody watches stderr on a terminal that can move its cursor. Forced colours do not count."""
    return _is_terminal(_Stderr()) and os.environ.get("TERM") not in _DUMB


def err() -> Console:
    """A console on the current stderr."""
    return _console(_Stderr(), PIPE_WIDTH)


def out() -> Console:
    """A console on the current stdout."""
    return _console(sys.stdout)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """A line that moves on stderr while something lasts; without a terminal a plain one."""
    if not is_animated():
        note(text)
        yield
        return
    with err().status(plain(text)):
        yield


def plain(text: object) -> str:
    """One line without control characters, whatever a file or a user put into it."""
    return _visible(" ".join(str(text).split()))


def _visible(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def line(*parts: str | tuple[str, str]) -> None:
    """One line on stderr; a part is text, or text with a style. Never wrapped by us: logs keep it in one piece."""
    err().print(Text.assemble(*parts), soft_wrap=True)


def failure(problem: AiakqError) -> None:
    """The one line that ends a failed command: what went wrong and what to do; details, if any, come before it."""
    for row in problem.details.splitlines():
        line(_visible(row))
    words: list[str | tuple[str, str]] = [("aiakq: ", "bold"), (f"error[{problem.id}]", "bold red"), ": "]
    words.append(plain(problem.message))
    if remedy := plain(" ".join(filter(None, [close_value(problem), problem.remedy]))):
        words += [" ", (remedy, "cyan")]
    line(*words)


def bug(problem: BaseException, where: str) -> None:
    """The one line for a failure that is our own fault."""
    line(
        ("aiakq: ", "bold"),
        ("error[bug]", "bold red"),
        ": This is a bug in aiakq: ",
        plain(f"{type(problem).__name__}: {problem}"),
        f" ({where}). ",
        ("Repeat with --debug for the traceback, and report it.", "cyan"),
    )


def warning(text: str) -> None:
    """A warning: something to know before trusting a result."""
    line(("aiakq: ", "bold"), ("warning", "bold yellow"), ": ", plain(text))


def note(text: str) -> None:
    line((plain(text), "dim"))


def emit(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout. Raises ClosedOutput if its reader has gone, ``output_failed`` otherwise."""
    from aiakq.records import finite, to_json

    write(to_json(finite(document)))


def write_log(text: str) -> None:
    """Write ``text`` to stderr as it is, in one piece."""
    stderr = _Stderr()
    stderr.write(text)
    stderr.flush()


def write(text: str) -> None:
    """Write ``text`` to stdout. Raises ClosedOutput if its reader has gone, ``output_failed`` otherwise."""
    if sys.stdout is None:
        raise error("output_failed", path="standard output", reason="it is closed")
    try:
        _write_all(text)
    except BrokenPipeError:
        raise ClosedOutput from None
    except OSError as problem:
        raise error("output_failed", path="standard output", reason=problem.strerror) from None


def _write_all(text: str) -> None:
    """Write all of ``text`` to stdout. Without buffering (PYTHONUNBUFFERED) one write to a pipe may be partial."""
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:
        sys.stdout.write(text)
    else:
        sys.stdout.flush()
        rest = memoryview(text.encode())
        while rest:
            rest = rest[binary.write(rest) :]
    sys.stdout.flush()


def show(drawn: RenderableType) -> None:
    """Print something drawn by rich on stderr; without a terminal, without the padding at the ends of lines."""
    console = err()
    if _is_terminal(console.file):
        console.print(drawn)
        return
    with console.capture() as captured:
        console.print(drawn)
    console.file.write("\n".join(text.rstrip() for text in captured.get().splitlines()) + "\n")


def table(*columns: str, left: Sequence[int] = (0,)) -> Table:
    """An empty table. Columns are aligned right, except those in ``left``, which fold where it is narrow."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        # Numbers are never cut or wrapped; names fold, so that they can still be copied.
        if index in left:
            made.add_column(Text(name), overflow="fold")
        else:
            made.add_column(Text(name), justify="right", no_wrap=True)
    return made


def facts(title: str, rows: Mapping[str, object]) -> None:
    """A heading and lines of ``name  value``; a value of None is left out."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            grid.add_row(Text(name), Text(plain(value)))
    line((title, "bold"))
    show(grid)


def number(value: float | None, digits: int = 4) -> str:
    """A number with ``digits`` significant ones, whole numbers in full; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if 1e-3 <= abs(value):
        return f"{value:#.{digits}g}".rstrip(".")
    return f"{value:.{max(0, digits - 2)}e}"


def size(num_bytes: float | None) -> str:
    """Bytes in decimal units, as disks and model cards count."""
    if num_bytes is None:
        return "-"
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def seconds(value: float | None) -> str:
    """A duration: 12 ms, 3.21 s, 2 min 05 s, 1 h 12 min."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 99.95:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class ProgressBars:
    """Progress of long work in stages: bars with the time left on a terminal, a line every few seconds elsewhere.

    Use as a context manager and call ``update``. A new stage completes the one before it.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = err()
        self._stage: str | None = None
        self._started = self._printed = self._last = time.monotonic()
        self._bars: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBars:
        if is_animated():
            from rich import progress as rich_progress

            self._bars = rich_progress.Progress(
                rich_progress.TextColumn("{task.description:<10}"),
                rich_progress.BarColumn(bar_width=20),
                rich_progress.TextColumn("{task.completed:.0f}/{task.total:.0f}", justify="right"),
                rich_progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                rich_progress.TextColumn("{task.fields[detail]}", style="dim", markup=False),
                console=self._console,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` steps of ``stage`` are finished; ``detail`` names the current one."""
        if stage != self._stage:
            self._begin(stage, total)
        if self._bars is not None:
            self._bars.update(self._task, completed=done, total=max(total, 1), detail=plain(detail))
        else:
            self._print_line(stage, done, total, detail)
        self._last = time.monotonic()

    def _begin(self, stage: str, total: int) -> None:
        if self._bars is not None:
            if self._task is not None:
                whole = self._bars.tasks[self._task].total
                self._bars.update(self._task, completed=whole, detail="")
            self._task = self._bars.add_task(stage, total=max(total, 1), detail="")
        self._stage = stage
        # Not the current time: the first update of a stage may come when its first step is done.
        self._started = self._last
        self._printed = float("-inf")

    def _print_line(self, stage: str, done: int, total: int, detail: str) -> None:
        now = time.monotonic()
        if done < total and now - self._printed < _PLAIN_INTERVAL_S:
            return
        self._printed = now
        if total <= 1 and done:
            return
        words = f"{self._title}: {stage}"
        if total > 1:
            words += f" {done}/{total}"
        if 0 < done < total:
            words += f", about {seconds((now - self._started) / done * (total - done))} left"
        if detail:
            words += f"  {plain(detail)}"
        self._console.print(Text(words), soft_wrap=True)
