"""The command line: parses arguments, makes one call into the library, renders the result. ``main`` is the program.

Importing this module loads Typer and rich only; everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import aiakq
from aiakq.errors import BUG, AiakqError, error, memory_error
from aiakq.kernels.registry import PluginError
from aiakq.system.threads import limit_threads, spin_briefly
from aiakq.terminal import console
from aiakq.terminal.bench import bench
from aiakq.terminal.chat_command import chat
from aiakq.terminal.checkpoint_commands import collect_env, compare, convert, evaluate, inspect
from aiakq.terminal.completion import completion, words_with_options
from aiakq.terminal.help import Command, Group, PlainCommand
from aiakq.terminal.options import add_options, has_table, parser_words
from aiakq.terminal.quantize_command import quantize
from aiakq.terminal.serve_command import serve
from aiakq.terminal.translate_command import translate
from aiakq.terminal.usage_errors import check_unknown, close_names, options_of_others, usage_error

WINDOWS = sys.platform == "win32"
#: What a shell reports for a program that a signal ended: 128 + SIGINT, 128 + SIGPIPE.
INTERRUPTED, CLOSED_PIPE = 130, 141

app = typer.Typer(
    name="aiakq",
    cls=Group,
    help="Quantize a Hugging Face model, check it, serve it, measure it.",
    epilog="aiakq COMMAND --help shows the options of a command. --debug, anywhere on the line, shows tracebacks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench)


@app.callback(invoke_without_command=True)
def _app(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"aiakq {aiakq.__version__}")
        raise typer.Exit


app.command(cls=Command)(quantize)
app.command(cls=Command)(convert)

app.command(cls=Command)(serve)
app.command(cls=Command)(chat)
app.command(name="eval", cls=Command)(evaluate)
app.command(cls=Command)(compare)
app.command(name="inspect", cls=Command)(inspect)
app.command(cls=Command)(translate)
app.command(name="collect-env", cls=PlainCommand)(collect_env)
app.command(cls=PlainCommand)(completion)


# --- the program -------------------------------------------------------------------------------------------------


class _Terminated(BaseException):
    """SIGTERM or SIGHUP arrived: unwind as for an interrupt, so that nothing half-written stays behind."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (see the table in aiakq.errors.kind). Raises nothing."""
    words = list(sys.argv[1:] if argv is None else argv)
    spin_briefly()
    if words[:1] != ["serve"]:  # which computes in processes of its own
        limit_threads()
    debug = bool(os.environ.get("AIAKQ_DEBUG"))
    if "--debug" in words[: words.index("--") if "--" in words else None]:
        words.remove("--debug")
        debug = True
    try:
        if WINDOWS:
            raise error("system_unsupported", system="Windows")
        return _run(words, debug)
    except KeyboardInterrupt:
        console.note("aiakq: interrupted")
        return INTERRUPTED
    except _Terminated as end:
        console.note("aiakq: terminated")
        return end.exit_code
    except (console.ClosedOutput, BrokenPipeError):
        return CLOSED_PIPE
    except Exception as problem:
        if debug:
            traceback.print_exc()
        known = problem if isinstance(problem, AiakqError) else _known(problem)
        if known is not None:
            console.failure(known)
            return known.exit_code
        console.bug(problem, _where(problem))
        return BUG
    finally:
        _flush_stdout()


def _run(words: list[str], debug: bool) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words == ["version"]:
        words = ["--version"]
    add_options(words_with_options(words))
    program = typer.main.get_command(app)
    command, name, rest = _find_command(program, words)
    if hasattr(command, "commands"):
        if not rest:
            words = [*words, "--help"]
        elif not rest[0].startswith("-"):
            hint = close_names(rest[0], command.commands) or f"There are {', '.join(command.commands)}."
            raise error("usage", reason=f"There is no command {' '.join([name, rest[0]]).strip()!r}.", hint=hint)
    if has_table(name):
        words = [*name.split(), *parser_words(name, rest)]
    else:
        for word in rest:
            check_unknown(word, _options(command))
    with contextlib.ExitStack() as around:
        around.enter_context(_unwinding_on_signals())
        if not debug and name != "serve":  # whose log lines are part of its output
            around.enter_context(_quiet_libraries())
        result = _call(program, words, name)
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _call(program: Any, words: list[str], name: str) -> object:
    """Run the command ``name`` of ``program``; return its result. Failures of Typer become errors of aiakq."""
    try:
        return program.main(args=words, prog_name="aiakq", standalone_mode=False)
    except SystemExit as end:
        # Typer and rich end the program by themselves only when the reader of their output is gone.
        raise console.ClosedOutput from end
    except typer.Abort:
        raise KeyboardInterrupt from None
    except AiakqError as problem:
        if remark := options_of_others(f"{problem.message} {problem.remedy}", name):
            problem.add_note(remark)
        raise
    except Exception as problem:
        if hasattr(problem, "format_message"):
            raise usage_error(problem, name) from None
        raise


@contextlib.contextmanager
def _unwinding_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``_Terminated`` while it lasts."""

    def terminate(signum: int, frame: object) -> None:
        raise _Terminated(signum)

    # One that is ignored stays so: that is how nohup lets work go on.
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, terminate) for number in ends}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep the warnings of torch, transformers and their add-ons out of the output; --debug shows them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _find_command(program: object, words: Sequence[str]) -> tuple[object, str, list[str]]:
    """The command that ``words`` name, its name as typed after "aiakq", and the words that are left for it."""
    command: object = program
    names: list[str] = []
    for position, word in enumerate(words):
        below = getattr(command, "commands", None)
        if below is None or word not in below:
            return command, " ".join(names), list(words[position:])
        command = below[word]
        names.append(word)
    return command, " ".join(names), []


def _options(command: Any) -> dict[str, bool]:
    """Every option of a command, and whether it takes a value."""
    options = {"--help": False, "-h": False}
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                options[option] = not parameter.is_flag
    return options


def _known(problem: Exception) -> AiakqError | None:
    """Failures that no single place can foresee (memory, disk, a kernel from a plugin), as errors of the registry."""
    if isinstance(problem, PluginError):
        return error("plugin", reason=str(problem))
    if isinstance(problem, ModuleNotFoundError) and problem.name in ("resource", "fcntl", "termios"):
        return error("system_unsupported", system=f"this system, which is not POSIX: Python has no {problem.name}")
    if lacking := memory_error(problem):
        return lacking
    if isinstance(problem, OSError):
        if problem.errno in (errno.EMFILE, errno.ENFILE):
            return error("open_files")
        if problem.errno == errno.EIO:
            return error("disk_failed", path=problem.filename or "a file", reason=problem.strerror)
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return error("output_failed", path=problem.filename or "the output", reason=problem.strerror)
    return None


def _where(problem: BaseException) -> str:
    """File and line inside aiakq where a failure came from, else the innermost ones."""
    frames = traceback.extract_tb(problem.__traceback__)
    package = str(Path(__file__).parent)
    own = [frame for frame in frames if frame.filename.startswith(package)]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _flush_stdout() -> None:
    """Flush, and keep Python from reporting a closed pipe at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
