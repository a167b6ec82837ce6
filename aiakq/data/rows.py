"""Rows of calibration data as documents: which columns have the text, in the conventions of many data sets.

A conversation comes before a question with its answer, and these before a text; with them go the system prompt, the
tools, the history and the context of the same row. Columns with text that were not read are counted by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiakq.data.files import bad, decoded_json
from aiakq.data.messages import (
    TALKS,
    Message,
    NoTextError,
    is_conversation,
    is_missing,
    messages_of,
    sound,
    stored_talk,
    tools_of,
)
from aiakq.errors import AiakqError

_TEXTS = ("text", "content", "raw_content", "sentence", "document", "article", "passage", "code", "body", "story")
_TEXT_KEYS = (*_TEXTS, "markdown", "plain_text", "raw_text", "chat", "dialogue", "dialog", "conversation")
#: Columns with a question, all of which are read, and with its answer, the first of which is read.
_QUESTIONS = ("instruction", "prompt", "question", "query", "inputs", "input", "problem", "user_prompt", "user_input")
_ANSWERS = tuple(
    "output response completion chosen chosen_response solution generated_solution generation answer target targets "
    "canonical_solution reply assistant_response model_output best_answer correct_answer bot_response "
    "preferred_output answers outputs completions responses".split()
)
_PAIRS = (
    (_QUESTIONS, _ANSWERS),
    (("user", "human"), ("assistant", "gpt", "bot", "ai", "model")),
    (("message_1",), ("message_2",)),
    (("source",), ("target",)),
    (("指令", "问题", "输入"), ("输出", "答案", "回答")),
)
_SYSTEMS = tuple(
    "system system_prompt system_message system_instruction system_instructions sys_prompt systemprompt systemmessage "
    "systeminstruction meta_instruction".split()
)
#: Columns with a text that a question is about.
_CONTEXTS = ("context", "passage", "article", "document", "paragraph", "background", "support", "story")
#: The same as lists.
_CONTEXT_LISTS = ("contexts", "documents", "passages")
_HISTORIES = ("history", "chat_history", "conversation_history")
_TOOLS = ("tools", "functions", "available_tools")
#: Columns of a question with several answers to choose from, whose answer may be a number.
_CHOICES = ("choices", "options", "endings")
#: Columns about a row; they are no text of it.
_ABOUT = frozenset(
    "id _id uuid idx index title url source meta metadata timestamp date created category categories topic tags name "
    "path file filename license language lang subset split dump label labels task type dataset author model "
    "__index_level_0__".split()
)
#: Names that a row of text has, in plain spelling.
KNOWN = frozenset({*TALKS, *_TEXT_KEYS, *(name for pair in _PAIRS for names in pair for name in names)})
#: Where a word of a name in camel case begins.
_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TOKENS = ("input_ids", "token_ids", "prompt_token_ids")


@dataclass(frozen=True)
class Document:
    """A text, or a conversation and its tools to be rendered by a chat template.

    where  its location in the data.
    """

    where: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[object, ...] = ()

    @property
    def size(self) -> int:
        """Approximate number of characters."""
        return len(self.text) if self.text is not None else sum(len(str(m.get("content"))) for m in self.messages)


@dataclass
class RowOptions:
    """How rows become documents, and what was found.

    column     the column to read; None detects it.
    num_rows   rows that were read or left out.
    num_empty  rows without text that were left out.
    unread     columns with text that were not read, and in how many rows.
    only       the column that is read because it is the only one with a text.
    """

    column: str | None = None
    num_rows: int = 0
    num_empty: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    only: str | None = None

    def warnings(self, name: str) -> list[str]:
        """Return sentences about what was left out."""
        lines = []
        if self.num_empty:
            lines.append(
                f"{self.num_empty} rows of {name} were left out: they have no text, or a part of it is missing."
            )
        if self.unread:
            names = ", ".join(f"{column[:40]!r}" for column, _ in self.unread.most_common(6))
            more = f" and {len(self.unread) - 6} more" if len(self.unread) > 6 else ""
            lines.append(f"Columns of {name} with text that were not read: {names}{more}. See --calibration-column.")
        return lines


def plain_name(name: object) -> str:
    """Return a column name in the spelling of the tables above: ``inputIds`` as ``input_ids``."""
    words = _CASE.sub("_", str(name).strip().strip("\ufeff"))
    return words.lower().replace("-", "_").replace(" ", "_")


def has_known_columns(value: object) -> bool:
    """Whether a value is a row with columns that are detected."""
    return isinstance(value, Mapping) and any(plain_name(name) in KNOWN for name in value)


def document_of(value: object, source: str, where: str, rows: RowOptions) -> Document | None:
    """Convert a line, item or row to a document; None for one without text, which is counted.

    Raises ``calibration`` if its structure is unknown.
    """
    rows.num_rows += 1
    if isinstance(value, str) and value.lstrip().startswith("{"):  # a row that was encoded twice
        inner = decoded_json(value)
        value = inner if has_known_columns(inner) else value
    try:
        if isinstance(value, Mapping):
            return _Row(value, source, where).document(rows)
        if is_missing(value):
            raise NoTextError
        if isinstance(value, str):
            return Document(where, sound(value, source, where))
        if isinstance(value, list):
            return Document(where, messages=messages_of(value, source, where))
    except NoTextError:
        rows.num_empty += 1
        return None
    raise bad(source, f"{where} is neither a text nor a JSON object")


class _Row:
    """A row with its columns in plain spelling. What has been read is left out of ``columns``."""

    def __init__(self, value: Mapping[str, object], source: str, where: str) -> None:
        self._source, self._where = source, where
        self._given = value
        self._columns: dict[str, Any] = {}
        for name, cell in value.items():
            if isinstance(cell, bytes):
                cell = self._decoded(name, cell)
            if not is_missing(cell):
                self._columns.setdefault(plain_name(name), cell)

    def document(self, rows: RowOptions) -> Document:
        """Return the document of this row. Raises ``calibration``, and NoTextError for a row without text."""
        if rows.column is not None:
            return self._of(self._named(rows.column))
        found = self._detected(rows)
        for name in self._unread(found):
            rows.unread[name] += 1
        return found

    def _decoded(self, name: object, cell: bytes) -> object:
        try:
            return cell.decode()
        except UnicodeDecodeError:
            if plain_name(name) in KNOWN:
                raise self._bad(f"has bytes in {str(name)!r} that are not UTF-8 text") from None
            return None

    def _bad(self, reason: str, hint: str = "Name the column with --calibration-column.") -> AiakqError:
        return bad(self._source, f"{self._where} {reason}", hint)

    def _has(self) -> str:
        return ", ".join(sorted(map(str, self._given))[:6]) or "nothing"

    def _named(self, column: str) -> object:
        """Return the cell of the column that the user named."""
        if column not in self._given and plain_name(column) not in map(plain_name, self._given):
            raise self._bad(f"has no column {column!r} (it has {self._has()})", "Give one of them.")
        cell = self._given.get(column, self._columns.get(plain_name(column)))
        self._columns.pop(plain_name(column), None)
        if is_missing(cell):
            raise NoTextError
        return self._talk(cell, named=True)

    def _talk(self, cell: object, named: bool = False) -> Any:
        return stored_talk(cell, self._source, self._where, named)

    def _of(self, cell: object) -> Document:
        """Return the document of a cell with a text or a conversation."""
        if isinstance(cell, bytes):
            cell = self._decoded("", cell)
        if isinstance(cell, str):
            return Document(self._where, sound(cell, self._source, self._where))
        if isinstance(cell, list):
            return self._conversation(messages_of(cell, self._source, self._where))
        raise self._bad("has neither a text nor a conversation in this column")

    def _detected(self, rows: RowOptions) -> Document:
        for name in TALKS:
            cell = self._talk(self._columns.get(name), named=True)
            if isinstance(cell, list) and (name != "data" or self._is_talk(cell)):
                del self._columns[name]
                return self._conversation(self._answered(messages_of(cell, self._source, self._where)))
        pair = self._pair()
        if pair:
            return self._conversation(tuple(pair))
        for name in _TEXT_KEYS:
            if isinstance(self._columns.get(name), str):
                return self._of(self._talk(self._columns.pop(name)))
        for name in ("chosen", *self._columns):
            cell = self._talk(self._columns.get(name))
            if is_conversation(cell) or (name == "chosen" and isinstance(cell, str)):
                del self._columns[name]
                return self._of(cell)
        return self._rest(rows)

    def _rest(self, rows: RowOptions) -> Document:
        """Return the document of a row without known columns: of an object inside, or of the only text."""
        if not self._columns or (has_known_columns(self._given) and not KNOWN & self._columns.keys()):
            raise NoTextError
        inner = [cell for cell in self._columns.values() if has_known_columns(cell)]
        if len(inner) == 1:
            return _Row(inner[0], self._source, self._where)._detected(rows)
        texts = [name for name, cell in self._columns.items() if isinstance(cell, str) and len(cell.split()) > 1]
        if rows.only is not None and isinstance(self._columns.get(rows.only), str):
            texts = [rows.only]
        if len(texts) == 1 and rows.only in (None, texts[0]):
            rows.only = texts[0]
            return self._of(self._talk(self._columns.pop(texts[0])))
        if rows.only is not None and rows.only in map(plain_name, self._given):
            raise NoTextError
        if any(name in self._columns for name in _TOKENS):
            raise self._bad(f"has token ids instead of text (it has {self._has()})", "Give the file with -token FILE.")
        raise self._bad(f"has no text, messages, or question with an answer (it has {self._has()})")

    @staticmethod
    def _is_talk(cell: list[object]) -> bool:
        return is_conversation(cell) or (len(cell) > 1 and all(isinstance(item, str) for item in cell))

    # --- conversations ------------------------------------------------------------------------------------------------

    def _conversation(self, messages: tuple[Message, ...]) -> Document:
        """Return a conversation with the system prompt and the tools of its row."""
        system = next((name for name in _SYSTEMS if name in self._columns), None)
        if system is not None and not any(message["role"] in ("system", "developer") for message in messages):
            text = self._text_in(self._columns[system])
            if text is None:
                raise self._bad(f"has {system!r}, which is no text")
            if not is_missing(text):
                messages = ({"role": "system", "content": sound(text, self._source, self._where)}, *messages)
            del self._columns[system]
        tools: list[object] | None = None
        for name in _TOOLS:
            if tools is None and name in self._columns:
                tools = tools_of(self._columns[name])
                if tools is not None:
                    del self._columns[name]
        return Document(self._where, messages=messages, tools=tuple(tools or ()))

    @staticmethod
    def _text_in(value: object) -> str | None:
        """Return the text of a cell: a text, a part or parts of one, or the first of several answers."""
        if isinstance(value, Mapping):
            value = next((value[key] for key in ("parts", "content", "value", "text", "answer") if key in value), None)
        if isinstance(value, list) and value and all(isinstance(part, Mapping) and "text" in part for part in value):
            value = "\n".join(str(part["text"]) for part in value)
        if isinstance(value, list):
            value = next((each for each in value if isinstance(each, str) and each.strip()), None)
        return value if isinstance(value, str) else None

    def _answered(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Append the answer of another column to a conversation that ends with the user."""
        if messages[-1]["role"] not in ("user", "tool", "system"):
            return messages
        for name in _ANSWERS:
            if name in self._columns:
                answer = self._answer(name)
                del self._columns[name]
                return (*messages, *answer) if answer[0]["role"] == "assistant" else tuple(answer)
        return messages

    def _pair(self) -> list[Message]:
        """Return a question and its answer as messages; none if the row has not both."""
        for asking, answering in _PAIRS:
            questions = [name for name in asking if name in self._columns]
            answer = next((name for name in answering if name in self._columns and name not in questions), None)
            if not questions or answer is None:
                continue
            if isinstance(text := self._columns.get("text"), str):
                parts = [self._columns[name] for name in (*questions, answer)]
                if all(isinstance(part, str) and part.strip() in text for part in parts):
                    for name in (*questions, answer):
                        del self._columns[name]
                    return []  # the text is the question and its answer
            result = self._answer(answer)
            if result[0]["role"] in ("user", "system"):  # the whole conversation
                prompts = [self._columns.pop(name) for name in questions]
                return result if all(self._is_in(prompt, result) for prompt in prompts) else [*self._history(), *result]
            messages = [*self._history(), *self._question(questions), *result]
            if not isinstance(self._columns[answer], list):
                questions.append(answer)  # other answers of a list were not read
            for name in questions:
                self._columns.pop(name, None)
            return messages
        self._check_half()
        return []

    def _check_half(self) -> None:
        """Raise NoTextError for a question without its answer, or the reverse, if the row has the column."""
        names = set(map(plain_name, self._given))
        for asking, answering in _PAIRS:
            has = [any(name in self._columns for name in half) for half in (asking, answering)]
            expects = [any(name in names for name in half) for half in (asking, answering)]
            if all(expects) and any(has) and not all(has) and not any(name in self._columns for name in _TEXT_KEYS):
                raise NoTextError

    @staticmethod
    def _is_in(part: object, messages: list[Message]) -> bool:
        return isinstance(part, str) and any(part.strip() in str(message["content"]) for message in messages)

    def _question(self, names: list[str]) -> list[Message]:
        """Return the messages of a question: its context, its instruction, and what that is applied to."""
        first = self._talk(self._columns[names[0]])
        if is_conversation(first):
            return list(messages_of(first, self._source, self._where))
        texts: list[str] = []
        for name in names:
            text = self._columns[name]
            if not isinstance(text, str):
                raise self._bad(f"has {name!r}, which is no text")
            if not any(text.strip() in other for other in texts):
                texts = [each for each in texts if each.strip() not in text] + [text]
        for name in (*_CONTEXTS, *_CONTEXT_LISTS):
            context = self._columns.get(name)
            if isinstance(context, list) and all(isinstance(part, str) for part in context):
                context = "\n\n".join(context)
            if isinstance(context, str):
                del self._columns[name]
                if not any(context.strip() in text for text in texts):
                    texts.insert(0, context)
                break
        return [{"role": "user", "content": sound("\n\n".join(texts), self._source, self._where)}]

    def _answer(self, name: str) -> list[Message]:
        """Return the messages of an answer, a text, a message, or a list of messages or of answers."""
        cell = self._columns[name]
        if isinstance(cell, Mapping) and isinstance(cell.get("text"), list):  # SQuAD's spellings of one answer
            cell = cell["text"]
        cell = self._talk(cell)
        if is_conversation(cell):
            return list(messages_of(cell, self._source, self._where))
        if (
            isinstance(cell, int | float)
            and not isinstance(cell, bool)
            and not any(c in self._columns for c in _CHOICES)
        ):
            cell = str(cell)
        if isinstance(cell, list) and cell and all(isinstance(each, Mapping) and "rank" in each for each in cell):
            cell = min(cell, key=lambda each: float(each["rank"]))
        text = self._text_in(cell)
        if text is None:
            if is_missing(cell):  # a question without an answer
                raise NoTextError
            raise self._bad(f"has {name!r}, which is no text")
        return [{"role": "assistant", "content": sound(text, self._source, self._where)}]

    def _history(self) -> list[Message]:
        """Return the earlier turns of a conversation."""
        for name in (*_HISTORIES, "context"):
            cell = self._talk(self._columns.get(name), named=name != "context")
            if isinstance(cell, list) and (name != "context" or is_conversation(cell)):
                del self._columns[name]
                return list(messages_of(cell, self._source, self._where))
        return []

    # --- what was not read --------------------------------------------------------------------------------------------

    def _unread(self, document: Document) -> Iterator[str]:
        """Yield the columns with text that is not in the document."""
        names = [name for name in self._columns if name not in _ABOUT]
        if not names:
            return
        read = document.text if document.text is not None else "\n".join(str(m["content"]) for m in document.messages)
        for name in names:
            texts = list(_texts_in(self._columns[name]))
            if any(len(text.split()) > 2 and text.strip() not in read for text in texts):
                yield name


def _texts_in(value: object, depth: int = 3) -> Iterator[str]:
    """Yield the texts in a cell, without the names of roles."""
    if isinstance(value, str):
        talk = decoded_json(value) if value[:1] in ("[", "{") else None
        if isinstance(talk, list | dict) and depth:
            yield from _texts_in(talk, depth)
        else:
            yield value
    elif depth and isinstance(value, list | Mapping):
        for item in value[:64] if isinstance(value, list) else value.values():
            yield from _texts_in(item, depth - 1)
