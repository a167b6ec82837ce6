"""Conversations of a calibration data set, rendered to text with the model's chat template.

A template is a program from an untrusted model folder. transformers runs it in a sandbox without file access, but it
could still run forever or exhaust memory. So it runs in its own process with limits on both, and with a fixed date, so
that the same file always gives the same text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from aiakq.data.messages import Message
from aiakq.errors import error

#: Time limit in seconds for one conversation, and for starting the process.
_SECONDS = 10
_SECONDS_TO_START = 120
#: The module that renders, which is run as a process.
_RENDERER = "aiakq.runtime.text.conversation_process"
_HINT = "Give plain text or token ids instead, or a model folder whose chat template takes these messages."


def render(conversations: Sequence[tuple[str, list[Message], list[Any]]], tokenizer: Any, source: str) -> list[str]:
    """Return the text of each conversation.

    conversations: (location in the data, messages, tools). ``tokenizer`` is a transformers tokenizer that was loaded
    from a folder. Raises ``calibration`` naming the location if there is no template, or it fails or takes too long.
    """
    if not conversations:
        return []
    if getattr(tokenizer, "encodes_chats", False):
        reason = f"{conversations[0][0]} is a conversation, which no text of a tokenizer in Mistral's format stands for"
        raise error("calibration", source=source, reason=reason, hint="Give plain text or token ids instead.")
    if not getattr(tokenizer, "chat_template", None):
        reason = f"{conversations[0][0]} is a conversation, but the model folder has no chat template"
        raise error("calibration", source=source, reason=reason, hint=_HINT)
    order = {
        "folder": str(tokenizer.name_or_path),
        "remote_code": not type(tokenizer).__module__.startswith("transformers."),
        "seconds": _SECONDS,
        "conversations": [{"messages": messages, "tools": tools} for _, messages, tools in conversations],
    }
    limit = _SECONDS_TO_START + _SECONDS + 0.05 * len(conversations)
    try:
        # -P: do not import from the working folder.
        command = [sys.executable, "-P", "-m", _RENDERER]
        done = subprocess.run(command, input=json.dumps(order).encode(), capture_output=True, timeout=limit)
        lines = done.stdout.decode("utf-8", "replace").splitlines()
    except subprocess.TimeoutExpired as expired:
        lines = (expired.stdout or b"").decode("utf-8", "replace").splitlines()
    texts: list[str] = []
    for (where, *_), line in zip(conversations, [*lines, *[""] * len(conversations)], strict=False):
        answer = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
        if "text" not in answer:
            reason = answer.get("problem", "it takes too long, or more memory than any template needs")
            raise error(
                "calibration", source=source, reason=f"the chat template fails at {where}: {reason}", hint=_HINT
            )
        texts.append(answer["text"])
    return texts
