"""Usage errors: one line with the correct spelling or the closest option.

Standard library only.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error

if TYPE_CHECKING:
    from aiakq.arguments.argument import Argument

#: Dashes that word processors and web pages substitute for a hyphen.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_TO_HYPHEN = str.maketrans(dict.fromkeys(_DASHES, "-"))

#: A working example for each command.
_EXAMPLES = {
    "quantize": "aiakq quantize -i MODEL -o DIR -quant_type awq",
    "serve": "aiakq serve MODEL --port 8000",
    "convert": "aiakq convert MODEL DIR --to awq",
    "chat": "aiakq chat MODEL, or aiakq chat --url http://127.0.0.1:8000",
    "eval": "aiakq eval MODEL --original DIR",
    "inspect": "aiakq inspect MODEL",
    "translate": "aiakq translate 'vllm serve MODEL --port 8000'",
    "bench latency": "aiakq bench latency MODEL --batch-size 8",
    "bench throughput": "aiakq bench throughput MODEL --num-prompts 100",
    "bench serve": "aiakq bench serve --port 8000 --num-prompts 100",
}

#: An option in a sentence.
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")


def check_unknown(word: str, options: Mapping[str, bool]) -> None:
    """Raise ``usage`` with the correct spelling for a word that is obviously meant as an option, before the parser
    misinterprets it.

    ``options`` maps every flag of the command to whether it takes a value.
    """
    if len(word) < 2 or word[0] not in ("-", *_DASHES) or word == "--":
        return
    name, equals, value = word.partition("=")
    if name in options:
        return
    meant = _intended(name.translate(_TO_HYPHEN), options)
    if any(letter in _DASHES for letter in name):
        if meant is not None:
            reason = f"{word!r} contains a typographic dash instead of a hyphen."
            raise error("usage", reason=reason, hint=f"Write: {_with_value(meant, equals, value)}")
        return
    if meant is not None:
        hint = f"Write: {_with_value(meant, equals, value)}"
        raise error("usage", reason=f"There is no option {name}.", hint=hint)
    # -tpfour: the parser would interpret it as -t with the value "pfour".
    glued = [flag for flag in options if len(flag) > 2 and flag[1] != "-" and word.startswith(flag) and options[flag]]
    if glued:
        flag = max(glued, key=len)
        hint = f"Write: {flag} {shlex.quote(word.removeprefix(flag))}"
        raise error("usage", reason=f"{word!r} cannot be read.", hint=hint)
    # -quanttype: the parser would read a -q with the value "uanttype".
    if re.fullmatch(r"-[A-Za-z][\w-]{3,}", name):
        by_name = {flag.lstrip("-").replace("-", "_"): flag for flag in options if len(flag) > 3}
        close = difflib.get_close_matches(name[1:].replace("-", "_"), by_name, n=1, cutoff=0.8)
        if close:
            raise error("usage", reason=f"There is no option {name}.", hint=f"Did you mean {by_name[close[0]]}?")


def _with_value(flag: str, equals: str, value: str) -> str:
    return f"{flag} {shlex.quote(value)}" if equals else flag


def _intended(name: str, options: Mapping[str, bool]) -> str | None:
    """Return the option called ``name``, ignoring case, the number of dashes and the difference of "-" and "_"."""

    def plain(text: str) -> str:
        return text.lstrip("-").replace("_", "-").lower()

    bare = name.lstrip("-")
    exact = [flag for flag in options if flag.lstrip("-") == bare]
    same = exact or [flag for flag in options if len(bare) > 1 and plain(flag) == plain(name)]
    # -quant_type and --quant-type are the same option: prefer the one with two hyphens.
    return max(same, key=len) if same else None


def missing_option(row: Argument, command: str) -> AiakqError:
    """Return the error for a missing required option. ``command`` is like ``bench serve``."""
    name = row.flag if row.positional else " or ".join(row.all_flags)
    return error("usage", reason=f"{name} is missing.", hint=_hint(command))


def _hint(command: str) -> str:
    if command in _EXAMPLES:
        return f"Example: {_EXAMPLES[command]}. All options: aiakq {command} --help"
    return f"See: {' '.join(('aiakq', command)).strip()} --help"


def usage_error(problem: Any, command: str) -> AiakqError:
    """Convert a usage error of Typer to one line with a hint. ``command`` is like ``bench serve``."""
    hint = _hint(command)
    if type(problem).__name__ == "NoSuchOption":
        close = close_names(problem.option_name, problem.possibilities or ())
        return error("usage", reason=f"There is no option {problem.option_name}.", hint=close or hint)
    return error("usage", reason=str(problem.format_message()).rstrip(".") + ".", hint=hint)


def close_names(word: str, known: Iterable[str]) -> str:
    """Return a sentence with the names closest to ``word``; empty if none is close."""
    # One wrong letter of three is close, one of ten much closer.
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6 if len(word) <= 4 else 0.7)
    return f"Did you mean {' or '.join(close)}?" if close else ""


def options_of_others(text: str, command: str) -> str:
    """Return a sentence about options that an error names and ``command`` lacks: which commands have them.

    Empty if there are none, or if the text says it. Errors of what several commands do name the options of one.
    """
    from aiakq.arguments.commands import COMMANDS

    says_whose = "serve" in text.lower() or any(f"aiakq {name} " in text for name in COMMANDS)
    if command not in COMMANDS or says_whose or "There is no option" in text:
        return ""
    flags = {name: flags_of(each.rows) for name, each in COMMANDS.items()}
    sentences = []
    for option in dict.fromkeys(_OPTION.findall(text)):
        others = [name for name in flags if option in flags[name]]
        if others and command not in others:
            names = [each for each in others if " " not in each] or others
            sentences.append(f"({option} is an option of aiakq {' and '.join(names)}.)")
    return " ".join(sentences)


def flags_of(rows: Iterable[Argument]) -> set[str]:
    """Return all flags of options, those that turn them off too."""
    rows = [row for row in rows if not row.positional]
    return {flag for row in rows for flag in row.all_flags} | {row.off_flag for row in rows if row.type is bool}


def close_value(problem: AiakqError) -> str:
    """Return a sentence with the closest allowed value, for a ``bad_option`` with a list of values."""
    if problem.id != "bad_option":
        return ""
    expected, value = str(problem.fields.get("expected")), problem.fields.get("value")
    if expected == "one of the parsers":
        expected = str(problem.fields.get("hint"))
    elif not expected.startswith("one of ") and not re.fullmatch(r"[\w.-]+(, [\w.-]+)*( or [\w.-]+)+", expected):
        return ""
    # Text after the list, as in "one of 4, 8, which awq offers", is not close to any value.
    return close_names(value, re.findall(r"[\w.-]*\w", expected)) if isinstance(value, str) else ""


def server_url(option: str, url: str) -> str:
    """Return the ``url`` of a running server without a trailing /v1. Raises ``bad_option``."""
    if not re.fullmatch(r"https?://[^/\s]+\S*", url):
        hint = "Write it like http://127.0.0.1:8000."
        raise error("bad_option", option=option, value=url, expected="a URL with http:// or https://", hint=hint)
    return url.rstrip("/").removesuffix("/v1")


def check_one_server(engine: Mapping[str, Any], url: str | None, *, hint: str, started: str, example: str) -> None:
    """Check that a command has either a model to start a server with, or the URL of a running server.

    url      flag of the URL if it is given, else None.
    hint     hint of the error if both are given.
    started  what the engine options are for, for the error if they are given without a model.
    example  hint of that error.
    Raises ``option_conflict``, ``usage`` and the errors of the engine arguments.
    """
    from aiakq.arguments.server import checked
    from aiakq.formats.hub import check_model_name

    if "model" in engine:
        if url is not None:
            raise error(
                "option_conflict",
                option=f"The model {engine['model']!r}",
                other=url,
                reason="a server would be started in addition to the running one",
                hint=hint,
            )
        checked(engine, server=False)
        check_model_name(engine["model"])
    elif engine:
        option = f"--{next(iter(engine)).replace('_', '-')}"
        raise error("usage", reason=f"{option} is for a {started} here.", hint=example)
