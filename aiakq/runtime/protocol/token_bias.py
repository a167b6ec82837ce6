"""Forms of ``logit_bias``: token id -> bias, and the lists of llama.cpp and its clients."""

from __future__ import annotations

import math
import re
from typing import Literal

from aiakq.errors import AiakqError, error

#: A value that is added to the logit of a token; false excludes the token.
Bias = float | Literal[False]
MAX_LOGIT_BIAS = 1024
#: A token id as a JSON key, in canonical form, so that no two keys mean the same token.
TOKEN_KEY = re.compile(r"^(0|-?[1-9][0-9]{0,39})$")
#: The names of a token and its bias in lists of objects.
_ENTRIES = ({"id", "bias"}, {"token", "bias"}, {"token_id", "bias"})


def checked_bias(given: object) -> dict[int, Bias]:
    """Return the bias with integer keys (JSON has strings) and values clamped to -100..100, as in the OpenAI API.

    False, which excludes a token, becomes -inf. Raises ``value_out_of_range`` and ``invalid_type``.
    """
    bias = bias_of_list(given) if isinstance(given, list) else given
    if not isinstance(bias, dict):
        raise _malformed(f"a dict from token ids to biases, or a list of pairs, is expected, not {given!r:.64}")
    _check_number(len(bias))
    checked: dict[int, Bias] = {}
    for key, value in bias.items():
        if not isinstance(key, int) and not (isinstance(key, str) and TOKEN_KEY.fullmatch(key)):
            raise _malformed(f"the key {str(key)[:64]!r} is no token id (POST /tokenize returns those of a text)")
        token = int(key)
        if value is False or value == -math.inf:
            checked[token] = -math.inf
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise _malformed(f"the value of {token} is no number")
        checked[token] = min(100.0, max(-100.0, float(value)))
    return checked


def bias_of_list(entries: list[object]) -> dict[str, Bias]:
    """Return a list of pairs [token id, bias], or of objects with id and bias, as an object.

    Several biases of a token are added, as in llama.cpp. Raises as ``checked_bias``.
    """
    _check_number(len(entries))
    biases: dict[str, Bias] = {}
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and set(entry) in _ENTRIES:
            entry = [value for name, value in entry.items() if name != "bias"] + [entry["bias"]]
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise _malformed(f"entry {number} is not [token id, bias], or an object with id and bias")
        token, bias = entry
        if isinstance(token, bool) or not isinstance(token, int | str) or not TOKEN_KEY.fullmatch(str(token)):
            raise _malformed(f"entry {number} has no token id (POST /tokenize returns those of a text)")
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise _malformed(f"the bias of entry {number} is neither a number nor false")
        before = biases.get(str(token), 0.0)
        biases[str(token)] = False if bias is False or before is False else before + bias
    return biases


def _check_number(count: int) -> None:
    if count > MAX_LOGIT_BIAS:
        value, allowed = f"{count} entries", f"at most {MAX_LOGIT_BIAS}"
        raise error("value_out_of_range", param="logit_bias", value=value, allowed=allowed)


def _malformed(reason: str) -> AiakqError:
    return error("invalid_type", param="logit_bias", reason=reason)
