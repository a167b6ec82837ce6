"""Conversations of a calibration data set, rendered to text with the model's chat template.

A template is a program from an untrusted model folder. transformers runs it in a sandbox without file access, but it
could still run forever or exhaust memory. So it runs in its own process with limits on both, and with a fixed date, so
that the same file always gives the same text.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.system.memory import limit_more_memory

#: Time limit in seconds for one conversation, and for starting the process.
_SECONDS = 10
_SECONDS_TO_START = 120
#: Bytes of memory that templates may use beyond what the tokenizer needs.
_MEMORY = 2 << 30
#: Maximum length of a rendered conversation: a factor on its own characters, plus a constant.
_GROWTH, _OWN_CHARACTERS = 16, 1 << 20
_HINT = "Give plain text or token ids instead, or a model folder whose chat template takes these messages."

Message = dict[str, Any]


def render(conversations: Sequence[tuple[str, list[Message]]], tokenizer: Any, source: str) -> list[str]:
    """Return the text of each conversation.

    conversations: (location in the data, messages). ``tokenizer`` is a transformers tokenizer that was loaded from a
    folder. Raises ``calibration`` naming the location if there is no template, or it fails or takes too long.
    """
    if not conversations:
        return []
    if not getattr(tokenizer, "chat_template", None):
        reason = f"{conversations[0][0]} is a conversation, but the model folder has no chat template"
        raise error("calibration", source=source, reason=reason, hint=_HINT)
    order = {
        "folder": str(tokenizer.name_or_path),
        "remote_code": not type(tokenizer).__module__.startswith("transformers."),
        "seconds": _SECONDS,
        "conversations": [messages for _, messages in conversations],
    }
    limit = _SECONDS_TO_START + _SECONDS + 0.05 * len(conversations)
    try:
        # -P: do not import from the working folder.
        command = [sys.executable, "-P", "-m", __name__]
        done = subprocess.run(command, input=json.dumps(order).encode(), capture_output=True, timeout=limit)
        lines = done.stdout.decode("utf-8", "replace").splitlines()
    except subprocess.TimeoutExpired as expired:
        lines = (expired.stdout or b"").decode("utf-8", "replace").splitlines()
    texts: list[str] = []
    for (where, _), line in zip(conversations, [*lines, *[""] * len(conversations)], strict=False):
        answer = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
        if "text" not in answer:
            reason = answer.get("problem", "it takes too long, or more memory than any template needs")
            raise error(
                "calibration", source=source, reason=f"the chat template fails at {where}: {reason}", hint=_HINT
            )
        texts.append(answer["text"])
    return texts


class _SameDay(datetime.datetime):
    """The fixed date that templates see."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _SameDay:
        return cls(2025, 1, 1, tzinfo=tz)


def _checked(text: Any, messages: list[Message]) -> dict[str, str]:
    """Return the answer with ``text``, or an error if it is far longer than its messages and too slow to tokenize."""
    given = len(json.dumps(messages))
    if len(text) > _GROWTH * given + _OWN_CHARACTERS:
        return {"problem": f"it makes {len(text)} characters of {given}"}
    return {"text": text}


def _main() -> None:
    """Run the process: an order on standard input, one line of JSON per conversation on standard output."""
    order = json.load(sys.stdin)
    import transformers
    from transformers.utils import chat_template_utils

    from aiakq.runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(
        transformers.AutoTokenizer.from_pretrained(
            order["folder"], local_files_only=True, trust_remote_code=order["remote_code"]
        )
    )
    limit_more_memory(_MEMORY)
    # transformers' strftime_now looks the clock up here; it cannot be passed in.
    chat_template_utils.__dict__["datetime"] = _SameDay

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"it takes longer than {order['seconds']} seconds")

    signal.signal(signal.SIGALRM, too_long)
    for messages in order["conversations"]:
        answer: dict[str, str] = {}
        signal.setitimer(signal.ITIMER_REAL, order["seconds"])
        # For loops inside one long operation, which no signal handler interrupts.
        faulthandler.dump_traceback_later(2 * order["seconds"], exit=True)
        try:
            text = tokenizer.chat_prompt(messages, add_generation_prompt=False)
            answer = _checked(text, messages)
        except Exception as problem:
            # A template may raise anything.
            message = problem.message if isinstance(problem, AiakqError) else str(problem)
            first = (message.strip().splitlines() or [type(problem).__name__])[0]
            answer["problem"] = first.rstrip(".")[:300]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if "problem" in answer:
            break


if __name__ == "__main__":
    _main()
