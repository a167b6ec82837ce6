"""Select tool and reasoning parsers by option or from the chat template."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from aiakq.arguments.server import ServerArguments
from aiakq.errors import AiakqError, error, first_line
from aiakq.registry import Registry
from aiakq.runtime.protocol.thought_budget import configured_marks
from aiakq.runtime.text.chat_template import RESERVED_TEMPLATE_KWARGS
from aiakq.runtime.text.tools_in_text import DEFAULT_SYNTAX, CallSyntax
from aiakq.server.api.message_parser import MessageFormat
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.tool_parsers import TOOL_PARSERS
from aiakq.server.api.tool_parsers.base import JsonToolParser, ToolParser
from aiakq.server.api.tool_parsers.hermes import HermesParser
from aiakq.system.files import IS_LFS_POINTER, LFS_POINTER, check_named, read_named_text
from aiakq.system.user_path import user_path

#: Maximum size of the file of --chat-template.
MAX_TEMPLATE_BYTES = 4 << 20


class ParserOptions:
    """The parser options, validated before the model is loaded.

    Raises ``bad_option`` for an unknown parser or an invalid plugin file, and ``plugin``.
    """

    def __init__(self, args: ServerArguments) -> None:
        self._auto_tool_choice = args.enable_auto_tool_choice
        self._reasoning_config = args.reasoning_config
        self._tools: _Choice[ToolParser] | None = None
        self._reasoning: _Choice[ReasoningParser] | None = None
        if self._auto_tool_choice or args.tool_call_parser is not None:
            self._tools = _Choice(
                ("--tool-call-parser", args.tool_call_parser),
                ("--tool-parser-plugin", args.tool_parser_plugin),
                TOOL_PARSERS,
                ToolParser,
            )
        if args.enable_reasoning or args.reasoning_parser is not None:
            self._reasoning = _Choice(
                ("--reasoning-parser", args.reasoning_parser),
                ("--reasoning-parser-plugin", args.reasoning_parser_plugin),
                REASONING_PARSERS,
                ReasoningParser,
            )

    def message_format(self, template: str, takes_tools: bool = True) -> MessageFormat:
        """Return the parsers, detected from ``template`` if not named. Raises ``bad_option`` if that fails.

        takes_tools  whether the template has a place for tools. Otherwise the prompt says how to write calls, so that
                     the parser is one for which it can say so.
        """
        tool_parser = self._tool_parser(template, takes_tools)
        reasoning_parser = self._reasoning.parser(template) if self._reasoning else None
        own_marks = None if reasoning_parser is None else reasoning_parser.thought_marks()
        return MessageFormat(
            tool_parser,
            reasoning_parser,
            self._auto_tool_choice,
            call_syntax_of(tool_parser) or DEFAULT_SYNTAX,
            configured_marks(self._reasoning_config, own_marks),
        )

    def _tool_parser(self, template: str, takes_tools: bool) -> type[ToolParser] | None:
        if takes_tools:
            return self._tools.parser(template) if self._tools else None
        named = self._tools.parser(template) if self._tools and self._tools.is_named else None
        return named if call_syntax_of(named) is not None else HermesParser


def call_syntax_of(parser: type[ToolParser] | None) -> CallSyntax | None:
    """Return how a prompt tells the model to write calls for ``parser``; None if they are not JSON between marks."""
    if parser is None or not issubclass(parser, JsonToolParser) or not parser.triggers or not parser.call_begins:
        return None
    begin, end = parser.call_begins[0], parser.ends[0] if parser.ends else ""
    if not begin:
        return None
    return CallSyntax(begin, f"]{end}" if begin.endswith("[") else end, parser.arguments_key)


_Parser = TypeVar("_Parser", ToolParser, ReasoningParser)


class _Choice(Generic[_Parser]):
    """A parser of a registry or of the operator's plugin file.

    named, plugin  the options that name the parser and the file, with their values.
    """

    def __init__(
        self,
        named: tuple[str, str | None],
        plugin: tuple[str, str | None],
        registry: Registry[type[_Parser]],
        base: type[_Parser],
    ) -> None:
        self._option, self._named = named
        self._base: type[_Parser] = base
        option, path = plugin
        self._parsers = {} if path is None else _own_parsers(option, path, base)
        self._names = [*self._parsers, *(each for each in registry if each not in self._parsers)]
        self._registry: Registry[type[_Parser]] = registry
        if self._named is not None and self._named not in self._names:
            hint = f"The parsers are {', '.join(self._names)}."
            raise error("bad_option", option=self._option, value=self._named, expected="a parser", hint=hint)
        if self._named is not None:
            self._load(self._named)

    @property
    def is_named(self) -> bool:
        return self._named is not None

    def parser(self, template: str) -> type[_Parser]:
        """The class that is named, or the first whose marks ``template`` has."""
        if self._named is not None:
            return self._load(self._named)
        for name in self._names:
            parser = self._load(name)
            if parser.template_marks and all(mark in template for mark in parser.template_marks):
                return parser
        raise error("no_parser", option=self._option, names=", ".join(self._names))

    def _load(self, name: str) -> type[_Parser]:
        parser = self._parsers.get(name) or self._registry.load(name)
        if not (isinstance(parser, type) and issubclass(parser, self._base)):
            raise error("plugin", reason=f"{name!r} is not a subclass of {self._base.__name__}")
        return parser


def _own_parsers(option: str, path: str, base: type[ToolParser] | type[ReasoningParser]) -> dict[str, object]:
    """Return the parsers of the operator's plugin file, by name. Raises ``bad_option``."""
    table = "TOOL_PARSERS" if issubclass(base, ToolParser) else "REASONING_PARSERS"
    hint = f"It has to define {table}, a dictionary of names and subclasses of {base.__name__}."
    check_named(
        Path(path),
        lambda reason: error("bad_option", option=option, value=path, expected=f"a Python file ({reason})", hint=hint),
    )
    spec = importlib.util.spec_from_file_location(f"aiakq_{option.lstrip('-').replace('-', '_')}", path)
    if spec is None or spec.loader is None:
        raise error("bad_option", option=option, value=path, expected="a Python file", hint=hint)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return dict(getattr(module, table))
    except Exception as failure:
        reason = first_line(f"{type(failure).__name__}: {failure}")
        expected = f"a file of parsers ({reason})"
        raise error("bad_option", option=option, value=path, expected=expected, hint=hint) from failure


def read_chat_template(value: str | None) -> str | None:
    """Return the template of --chat-template, which is a file or the text itself. Raises ``bad_option``."""
    if value is None or "{" in value:
        return value
    try:
        path = user_path(value)
    except RuntimeError:  # no home folder
        path = Path(value)

    def bad(reason: str) -> AiakqError:
        expected = f"a readable file or a template, which would hold a brace ({reason})"
        hint = "Give the path of a Jinja file."
        return error("bad_option", option="--chat-template", value=value, expected=expected, hint=hint)

    text = read_named_text(path, MAX_TEMPLATE_BYTES, bad)
    if text.startswith(LFS_POINTER.decode()):
        raise bad(IS_LFS_POINTER)
    return text


def template_defaults(given: Mapping[str, object] | None) -> dict[str, object]:
    """Return the arguments of --default-chat-template-kwargs. Raises ``bad_option`` for a name that is taken."""
    for name in given or {}:
        if name in RESERVED_TEMPLATE_KWARGS or not name.isidentifier():
            expected = "a name of a template's own argument"
            hint = "enable_thinking is one, for example."
            option = "A key of --default-chat-template-kwargs"
            raise error("bad_option", option=option, value=name, expected=expected, hint=hint)
    return dict(given or {})
