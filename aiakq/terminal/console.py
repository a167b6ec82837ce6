"""The console: styled output, progress bars and error messages (rich). Messages and progress go to stderr, JSON
documents to stdout; tables of results to stdout (``results_on_stdout``) unless a JSON document goes there.

Only this module and cli.py print. Colours, bars and widths adapt: without a terminal the same text is printed as plain
lines. See ``wants_colour`` for the variables that control colours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from aiakq.errors import AiakqError, error
from aiakq.system.files import cache_folder
from aiakq.terminal.usage_errors import close_value

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Width in columns without a terminal: wide enough that tables do not truncate names.
PIPE_WIDTH = 120
#: Values of TERM without colours and cursor movement.
_DUMB = ("dumb", "unknown")
#: Seconds between two progress lines without a terminal.
_PLAIN_INTERVAL_S = 10.0


class ClosedOutput(Exception):
    """Raised when the reader of stdout has exited (``aiakq ... | head``)."""


class _Stderr:
    """The current stderr. Failing writes are ignored: a full disk or a closed pipe must not stop a server."""

    def write(self, text: str) -> int:
        try:
            return 0 if sys.stderr is None else sys.stderr.write(text)
        except (OSError, ValueError):
            return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr is not None:
                sys.stderr.flush()

    def __getattr__(self, name: str) -> object:
        if sys.stderr is None:
            raise AttributeError(name)
        return getattr(sys.stderr, name)


def wants_colour(is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Whether output has colours: NO_COLOR forbids them, FORCE_COLOR and CLICOLOR_FORCE demand them, in that order.

    Otherwise terminals have them, unless TERM is dumb or CLICOLOR is 0. Empty variables count as unset.
    """
    if environment.get("NO_COLOR"):
        return False
    if force := environment.get("FORCE_COLOR"):
        return force.lower() not in ("0", "false")
    if environment.get("CLICOLOR_FORCE") not in (None, "", "0"):
        return True
    return is_terminal and environment.get("TERM") not in _DUMB and environment.get("CLICOLOR") != "0"


def _console(file: Any, fallback_width: int | None = None) -> Console:
    """Return a console on ``file``. Without a terminal and COLUMNS, its width is ``fallback_width``."""
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
    """Whether stderr is a terminal that can move its cursor. Forced colours do not count."""
    return _is_terminal(_Stderr()) and os.environ.get("TERM") not in _DUMB


#: The console with a line that moves, which alone can print above it.
_animated: Console | None = None


def err() -> Console:
    """Return a console on the current stderr: the one with an animation, if there is one."""
    return _animated or _console(_Stderr(), PIPE_WIDTH)


@contextlib.contextmanager
def animated() -> Iterator[Console]:
    """Return the console for an animation; what is printed while the context is open appears above it."""
    global _animated
    before, _animated = _animated, err()
    try:
        yield _animated
    finally:
        _animated = before


def out() -> Console:
    """Return a console on the current stdout."""
    return _console(sys.stdout)


#: Whether tables are results that go to stdout.
_on_stdout = False


@contextlib.contextmanager
def results_on_stdout(applies: bool = True) -> Iterator[None]:
    """Print tables and the lines beside them on stdout while the context is open; not if ``applies`` is False."""
    global _on_stdout
    before, _on_stdout = _on_stdout, applies
    try:
        yield
    finally:
        _on_stdout = before


def stdout_is_terminal() -> bool:
    """Whether a person rather than a program reads stdout."""
    return _is_terminal(sys.stdout)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show an animated line on stderr while the context is open; without a terminal, a plain line."""
    if not is_animated():
        note(text)
        yield
        return
    with animated() as console, console.status(plain(text)):
        yield


def plain(text: object) -> str:
    """Return untrusted text as one line without control characters."""
    return _visible(" ".join(str(text).split()))


def _visible(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def line(*parts: str | tuple[str, str]) -> None:
    """Print one line on stderr; a part is text, or text with a style. It is never wrapped, for the sake of logs."""
    err().print(Text.assemble(*parts), soft_wrap=True)


def result_line(*parts: str | tuple[str, str]) -> None:
    """Print one line beside a table of results, like ``line``."""
    if not _on_stdout:
        line(*parts)
        return
    console = out()
    with console.capture() as captured:
        console.print(Text.assemble(*parts), soft_wrap=True)
    write(captured.get())


def failure(problem: AiakqError) -> None:
    """Print the last line of a failed command, its cause and remedy; details, if any, are printed before it."""
    for row in problem.details.splitlines():
        line(_visible(row))
    words: list[str | tuple[str, str]] = [("aiakq: ", "bold"), (f"error[{problem.id}]", "bold red"), ": "]
    words.append(plain(problem.message))
    remedies = (close_value(problem), problem.remedy, *getattr(problem, "__notes__", ()))
    if remedy := plain(" ".join(filter(None, remedies))):
        words += [" ", (remedy, "cyan")]
    line(*words)


def bug(problem: BaseException, where: str) -> None:
    """Print one line for an internal error."""
    line(
        ("aiakq: ", "bold"),
        ("error[bug]", "bold red"),
        ": This is a bug in aiakq: ",
        plain(f"{type(problem).__name__}: {problem}"),
        f" ({where}). ",
        ("Repeat with --debug for the traceback, and report it.", "cyan"),
    )


def warning(text: str) -> None:
    """Print a warning that affects how far a result can be trusted."""
    line(("aiakq: ", "bold"), ("warning", "bold yellow"), ": ", plain(text))


def note(text: str) -> None:
    line((plain(text), "dim"))


def note_missing_kernels(environment: Mapping[str, str]) -> None:
    """Say in the first command of an installation that it has no native CPU kernels; pip hides what its build says."""
    from aiakq.kernels.cpu import build

    if build.TARGET.exists() or environment.get("AIAKQ_CPU_LIBRARY"):
        return
    marker = cache_folder(environment) / "no_native_kernels"
    if marker.exists():
        return
    with contextlib.suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    note(f"No native CPU kernels were built at installation: install g++ or clang++, then run '{build.COMMAND}'.")


def note_missing_folder(model: str) -> None:
    """Say at once that a model is looked for on the hub, which may take a while, and what is here instead."""
    from aiakq.formats.hub import what_is_here

    if (sentence := what_is_here(model)) is not None:
        note(sentence)


def emit(document: Mapping[str, object]) -> None:
    """Write one JSON document to stdout. Raises ClosedOutput if its reader has gone, ``output_failed`` otherwise."""
    from aiakq.records import finite, to_json

    write(to_json(finite(document)))


def write_log(text: str) -> None:
    """Write ``text`` to stderr unchanged, in one call."""
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


def show(renderable: RenderableType) -> None:
    """Print a table of results; without a terminal, trailing spaces are removed."""
    console = _console(sys.stdout, PIPE_WIDTH) if _on_stdout else err()
    with console.capture() as captured:
        console.print(renderable)
    text = captured.get()
    if not _is_terminal(console.file):
        text = "\n".join(row.rstrip() for row in text.splitlines()) + "\n"
    if _on_stdout:
        write(text)
    else:
        console.file.write(text)


def table(*columns: str, left: Sequence[int] = (0,)) -> Table:
    """Return an empty table. Columns are right-aligned, except those in ``left``, which fold if space is short."""
    new_table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        # Numbers are never truncated or wrapped; names fold, so that they can still be copied.
        if index in left:
            new_table.add_column(Text(name), overflow="fold")
        else:
            new_table.add_column(Text(name), justify="right", no_wrap=True)
    return new_table


def facts(title: str, rows: Mapping[str, object]) -> None:
    """Print a heading and lines of ``name  value``; None values are omitted."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            grid.add_row(Text(name), Text(plain(value)))
    result_line((title, "bold"))
    show(grid)


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits, integers in full; a dash for None."""
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
    """Format bytes in decimal units, like disks and model cards."""
    if num_bytes is None:
        return "-"
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def seconds(value: float | None) -> str:
    """Format a duration: 12 ms, 3.21 s, 2 min 05 s, 1 h 12 min."""
    if value is None:
        return "-"
    if value < 0.9995:
        return f"{1000 * value:.3g} ms"
    if value < 99.95:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class ProgressBars:
    """Progress of long work in stages: bars with the remaining time on a terminal, else a line every few seconds.

    Use as a context manager and call ``update``. A new stage completes the previous one.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = err()
        self._open = contextlib.ExitStack()
        self._stage: str | None = None
        self._started = self._printed = self._last = time.monotonic()
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBars:
        if is_animated():
            from rich import progress as rich_progress

            self._console = self._open.enter_context(animated())
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
        self._open.close()

    def update(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` steps of ``stage`` are finished; ``detail`` names the current one."""
        if stage != self._stage:
            self._begin(stage, total)
        if self._bars is not None and self._task is not None:
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
        # Not the current time: the first update of a stage may follow its first step.
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
