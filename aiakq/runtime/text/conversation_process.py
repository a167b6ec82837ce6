"""The process that renders conversations of calibration data, because a chat template is an untrusted program.

Standard input has one JSON object: the ``folder`` of the tokenizer, whether it has ``remote_code``, the ``seconds`` for
each conversation, and the ``conversations``, each with its ``messages`` and ``tools``. Standard output gets one line of
JSON per conversation: its ``text``, or the ``problem``, after which the process ends.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

from aiakq.errors import AiakqError, first_line
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.system.memory import limit_more_memory

#: Bytes of memory that templates may use beyond what the tokenizer needs.
_MEMORY = 2 << 30
#: Time limit in seconds for finding out what the template does. A template that needs more is used as it is.
_SECONDS_TO_PREPARE = 10
#: Maximum length of a rendered conversation: a factor on its own characters, plus a constant.
_GROWTH, _OWN_CHARACTERS = 16, 1 << 20


class _SameDay(datetime.datetime):
    """The fixed date that templates see."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _SameDay:
        return cls(2025, 1, 1, tzinfo=tz)


def _checked(text: Any, conversation: dict[str, Any]) -> dict[str, str]:
    """Return the answer with ``text``, or an error if it is too long for its conversation, and slow to tokenize."""
    given = len(json.dumps(conversation))
    if len(text) > _GROWTH * given + _OWN_CHARACTERS:
        return {"problem": f"it makes {len(text)} characters of {given}"}
    return {"text": text}


def main() -> None:
    """Run the process."""
    order = json.load(sys.stdin)
    import transformers
    from transformers.utils import chat_template_utils

    tokenizer = Tokenizer(
        transformers.AutoTokenizer.from_pretrained(
            order["folder"], local_files_only=True, trust_remote_code=order["remote_code"]
        )
    )
    limit_more_memory(_MEMORY)
    # transformers' strftime_now looks the clock up here; it cannot be passed in.
    chat_template_utils.__dict__["datetime"] = _SameDay

    failure: Exception | None = None
    try:
        with _time_limit(_SECONDS_TO_PREPARE):
            tokenizer.prepare_chat()
    except Exception as problem:  # a template may raise anything
        failure = problem
    for conversation in order["conversations"]:
        answer: dict[str, str] = {}
        try:
            if failure is not None:
                raise failure
            with _time_limit(order["seconds"]):
                text = tokenizer.chat_prompt(
                    conversation["messages"], tools=conversation["tools"] or None, add_generation_prompt=False
                )
                answer = _checked(text, conversation)
        except Exception as problem:
            reason = problem.fields.get("reason", problem.message) if isinstance(problem, AiakqError) else str(problem)
            answer["problem"] = first_line(str(reason), type(problem).__name__)[:300]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if "problem" in answer:
            break


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after ``seconds``, and end the process after twice as long."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds} seconds")

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # For loops inside one long operation, which no signal handler interrupts.
    faulthandler.dump_traceback_later(2 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
