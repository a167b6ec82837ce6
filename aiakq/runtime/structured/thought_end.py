"""ThoughtMatcher: a matcher of a message that may end within its thought if it ends with a complete call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.runtime.structured.thoughts import SPACES


def calls_at_end(tags: Mapping[str, object]) -> dict[str, object] | None:
    """Return the format of the calls with which a thought may end that no mark closes; None if it may not.

    tags  a structural tag.
    """
    part = tags.get("format")
    if not isinstance(part, dict) or part.get("type") != "after_thought" or not part.get("may_end_with_call"):
        return None
    answer: dict[str, Any] = part["answer"]
    if answer["type"] != "or":
        return answer
    call: dict[str, Any] = answer["elements"][0]
    return call


@dataclass(frozen=True)
class MarkedThought:
    """The marks of a thought as bytes, and the vocabulary.

    is_open  whether the message begins within a thought.
    tokens   bytes of each token.
    end_ids  end-of-sequence tokens.
    """

    starts: Sequence[bytes]
    ends: Sequence[bytes]
    is_open: bool
    tokens: Sequence[bytes]
    end_ids: Sequence[int]


class ThoughtMatcher:
    """A matcher of llguidance for the message, beside one for calls that the thought mentions.

    In a thought, any text is allowed, so that the grammar of the message cannot tell whether its end is a call: the
    second matcher looks for calls, and starts afresh behind what is none. Has the methods that ``GrammarMatcher`` uses.
    """

    def __init__(self, message: Any, calls: Any, marks: MarkedThought) -> None:
        self._message, self._marks = message, marks
        self._calls = calls  # None when the thought has ended
        self._is_open = marks.is_open
        self._tail = b""  # the text so far until the thought begins, then its end
        self._may_end = self._has_ended = False
        self._keep = max(map(len, marks.ends)) - 1

    def deep_copy(self) -> ThoughtMatcher:
        copy = ThoughtMatcher(self._message.deep_copy(), self._calls and self._calls.deep_copy(), self._marks)
        copy._is_open, copy._tail, copy._may_end = self._is_open, self._tail, self._may_end
        copy._has_ended = self._has_ended
        return copy

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._message.unsafe_compute_mask_ptr(address, num_bytes)
        if self._may_end and not self._message.is_error():
            for id in self._marks.end_ids:
                if id // 8 < num_bytes:
                    word = ctypes.c_uint32.from_address(address + 4 * (id // 32))
                    word.value |= 1 << id % 32

    def consume_token(self, token: int) -> None:
        if self._may_end and token in self._marks.end_ids:
            self._has_ended = True
            return
        self._message.consume_token(token)
        if self._calls is not None:
            self._look_for_calls(token)

    def compute_ff_tokens(self) -> list[int]:
        return [] if self._may_end else list(self._message.compute_ff_tokens())

    def is_stopped(self) -> bool:
        return self._has_ended or bool(self._message.is_stopped())

    def is_error(self) -> bool:
        return bool(self._message.is_error())

    def get_error(self) -> str:
        return str(self._message.get_error())

    def _look_for_calls(self, token: int) -> None:
        self._may_end = False
        self._tail += self._marks.tokens[token] if token < len(self._marks.tokens) else b""
        if not self._is_open:
            begin = self._tail.lstrip(SPACES)
            self._is_open = begin.startswith(tuple(self._marks.starts))
            if not self._is_open and not any(mark.startswith(begin) for mark in self._marks.starts):
                self._calls = None
            return
        if any(mark in self._tail for mark in self._marks.ends):
            self._calls = None
            return
        self._tail = self._tail[-self._keep :] if self._keep else b""
        if not self._calls.try_consume_tokens([token]):
            self._calls.reset()
            self._calls.try_consume_tokens([token])
        if self._calls.is_error():
            self._calls = None
        else:
            self._may_end = bool(self._calls.is_accepting())
