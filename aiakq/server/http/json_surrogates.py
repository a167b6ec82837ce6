"""Mend JSON bodies with lone surrogates: halves of characters, which clients produce that cut text at UTF-16 units.

No JSON parser for UTF-8 accepts them. In texts they become U+FFFD, because a client sends the history with every turn,
so that one such text would end the conversation. In names, paths and keys they are refused, because another name could
be meant.
"""

from __future__ import annotations

import json

from aiakq.errors import error
from aiakq.runtime.protocol.unicode_text import has_surrogates, well_formed

#: Fields with names and paths.
_NAMES = frozenset(
    {"model", "role", "name", "namespace", "type", "request_id", "cache_salt", "lora_name", "lora_path", "tool_choice"}
)
#: Fields whose values are data of the client, in which a field of the same name is no name.
_DATA = frozenset({"arguments", "input", "documents", "chat_template_kwargs", "default", "const", "examples"})
_REASON = "it has half of a character (a lone surrogate)"


def mended_json(body: bytes) -> bytes | None:
    """Return ``body`` with U+FFFD for lone surrogates; None if it has none, or is not JSON for another reason.

    Raises ``invalid_type`` for lone surrogates in names, paths and keys.
    """
    try:
        text = body.decode("utf-8", "surrogatepass")
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    mended = _mended(value, "", is_data=False)
    if mended == value:
        return None
    return json.dumps(mended, ensure_ascii=False).encode()


def _mended(value: object, path: str, is_data: bool) -> object:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_mended(each, f"{path}[{number}]", is_data) for number, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    result = {}
    for name, each in value.items():
        inner = f"{path}.{well_formed(name):.64}".lstrip(".")
        if has_surrogates(name):
            raise error("invalid_type", param=inner, reason=f"its name is not Unicode: {_REASON}")
        if name in _NAMES and not is_data and isinstance(each, str) and has_surrogates(each):
            raise error("invalid_type", param=inner, reason=_REASON)
        result[name] = _mended(each, inner, is_data or (name in _DATA and (isinstance(each, dict) or name != "input")))
    return result
