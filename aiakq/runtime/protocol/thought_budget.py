"""Thoughts of limited length: the marks around the thoughts of a model, and the limit of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from aiakq.errors import AiakqError, error

OPTION = "--reasoning-config"
#: White space that may come behind the end mark in the text that ends a thought.
_BLANKS = " \n\r\t"
#: Grammars allow this many blanks between a thought and the answer.
_MAX_BLANKS = 4
_START, _END = "reasoning_start_str", "reasoning_end_str"
#: Keys of ``--reasoning-config``, with their older names.
_KEYS = {_START: _START, _END: _END, "think_start_str": _START, "think_end_str": _END}
_OPENINGS = {"START": "END", "BEGIN": "END", "start": "end", "begin": "end"}


class ThoughtBudget(msgspec.Struct, frozen=True):
    """The longest thought of a sequence.

    max_tokens    number of tokens of a thought, behind its start mark, after which it is ended.
    starts, ends  marks around a thought.
    end_ids       tokens that end a thought; their text has one of ``ends``.
    is_open       whether the prompt ends within a thought.
    anywhere      whether a thought may begin anywhere in the text; otherwise only at its beginning, behind white space.
    repeats       whether another thought may begin behind the first, with a start mark that is one added token.
    """

    max_tokens: int
    starts: list[str]
    ends: list[str]
    end_ids: list[int]
    is_open: bool
    anywhere: bool
    repeats: bool = False


@dataclass(frozen=True)
class ThoughtMarks:
    """How a model marks its thoughts.

    starts, ends  marks around a thought.
    end           text that ends a thought whose budget is used up: one of ``ends``, maybe with words before it.
    anywhere      whether a thought may begin anywhere in a message.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    end: str
    anywhere: bool = False

    def are_open(self, prompt: str) -> bool:
        """Whether the last thought in ``prompt`` has begun but not ended."""
        last_start = max(prompt.rfind(mark) for mark in self.starts)
        return last_start >= 0 and last_start > max(prompt.rfind(mark) for mark in self.ends)

    def budget(
        self,
        max_tokens: int,
        end_ids: Sequence[int],
        *,
        is_open: bool,
        anywhere: bool | None = None,
        repeats: bool = False,
    ) -> ThoughtBudget:
        """The budget of a sequence; ``end_ids`` are the tokens of ``end``."""
        anywhere = self.anywhere if anywhere is None else anywhere
        return ThoughtBudget(
            max_tokens, list(self.starts), list(self.ends), list(end_ids), is_open, anywhere, repeats and not anywhere
        )


def configured_marks(config: Mapping[str, object] | None, own: ThoughtMarks | None = None) -> ThoughtMarks | None:
    """Return the marks of ``--reasoning-config``, with those of the reasoning parser, ``own``, for what it omits.

    None if there is no start or no end. Raises ``bad_option``.
    """
    given = _checked(config or {})
    start, end = given.get(_START), given.get(_END)
    if own is None:
        return None if start is None or end is None else ThoughtMarks((start,), (_mark_in(end, start),), end)
    if start is not None and start not in own.starts:
        raise _bad(_START, start, f"a start mark of the reasoning parser: {' or '.join(map(repr, own.starts))}")
    if end is None:
        return own
    words = end.rstrip(_BLANKS)
    mark = next((mark for mark in own.ends if words.endswith(mark)), None)
    if mark is None or words.find(mark) != len(words) - len(mark) or len(end) - len(words) > _MAX_BLANKS:
        marks = " or ".join(map(repr, own.ends))
        raise _bad(_END, end, f"a text that ends with an end mark of the reasoning parser, {marks}, and has no other")
    return ThoughtMarks(own.starts, own.ends, end, own.anywhere)


def check_end(marks: ThoughtMarks, text: bytes, end_ids: Sequence[int], eos_ids: Sequence[int]) -> str:
    """Return why the tokens ``end_ids``, whose text is ``text``, cannot end a thought; "" if they can."""
    if not any(mark.encode() in text for mark in marks.ends):
        return f"the tokenizer does not keep the text that ends thoughts, {marks.end!r}"
    if set(end_ids) & set(eos_ids):
        return f"the text that ends thoughts, {marks.end!r}, also ends the answer of this model"
    return ""


def _checked(config: Mapping[str, object]) -> dict[str, str]:
    """Return the given marks by their newer names. Raises ``bad_option``."""
    given: dict[str, str] = {}
    for key, value in config.items():
        if key == "reasoning_parser":  # vLLM's copy of --reasoning-parser
            continue
        if key not in _KEYS:
            hint = f"The keys are {_START} and {_END}."
            raise error("bad_option", option=f"A key of {OPTION}", value=key, expected="a known key", hint=hint)
        if value is None or value == "":
            continue
        if not isinstance(value, str) or not value.strip() or len(value) > 4096:
            raise _bad(key, value, "a text of at most 4096 characters")
        if given.setdefault(_KEYS[key], value) != value:
            raise _bad(key, value, f"the same as {_KEYS[key]}")
    return given


def _bad(key: str, value: object, expected: str) -> AiakqError:
    hint = 'It looks like {"reasoning_start_str": "<think>", "reasoning_end_str": "Time is up.</think>"}.'
    return error("bad_option", option=f"{key} of {OPTION}", value=value, expected=expected, hint=hint)


def _mark_in(end: str, start: str) -> str:
    """Return the mark in ``end`` that belongs to ``start``, as </think> to <think>; all of ``end`` if there is none."""
    words = end.rstrip(_BLANKS)
    closing = [start[:at] + "/" + start[at:] for at in range(len(start))]
    closing += [start.replace(opening, ending) for opening, ending in _OPENINGS.items() if opening in start]
    return next((mark for mark in closing if words.endswith(mark)), end)
