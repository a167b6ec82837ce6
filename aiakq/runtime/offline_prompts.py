"""Forms of the prompts of ``LLM``, checked before anything is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from aiakq.errors import error


class PromptDict(TypedDict, total=False):
    """A prompt as a text or token ids. ``cache_salt`` limits prefix caching to prompts with the same salt.

    multi_modal_data  {"image": an image of Pillow, or a list of them}, for the placeholders of the prompt, in order;
                      and likewise "video" and "audio".
    """

    prompt: str | None
    prompt_token_ids: list[int] | None
    cache_salt: str | None
    multi_modal_data: dict[str, object] | None
    mm_processor_kwargs: dict[str, object] | None


#: A prompt: text, token ids, or a dict of either.
Prompt = str | list[int] | PromptDict
Prompts = Prompt | Sequence[Prompt]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs")
#: Keys of vLLM's prompts that change nothing for text.
_WITHOUT_EFFECT = ("type", "multi_modal_uuids")
_FORMS = "text, a list of token ids, or a dict with prompt or prompt_token_ids"


def listed_prompts(prompts: object) -> list[Prompt]:
    """Return one or more prompts as a list; a flat list of ids is one prompt.

    Raises ``empty_prompt`` for none, ``invalid_type`` for what is no prompt, ``unsupported_parameter`` for keys of a
    prompt that have no meaning here.
    """
    if prompts is None:
        raise error("empty_prompt", param="prompts")
    if isinstance(prompts, str | dict):
        prompts = [prompts]
    elif not isinstance(prompts, (list, tuple)):
        raise error("invalid_type", param="prompts", reason=_reason(prompts, f"{_FORMS}, or a list of them"))
    elif prompts and all(isinstance(one, int) for one in prompts):
        prompts = [prompts]
    for number, prompt in enumerate(prompts):
        _check(prompt, f"prompts[{number}]")
    return list(prompts)


def _check(prompt: object, place: str) -> None:
    if isinstance(prompt, dict):
        _check_keys(prompt, place)
    elif not isinstance(prompt, (str, list, tuple)):
        raise error("invalid_type", param=place, reason=_reason(prompt, _FORMS))


def _check_keys(prompt: dict[str, object], place: str) -> None:
    for key, value in prompt.items():
        is_empty = value is None or (isinstance(value, (dict, list)) and not value)
        if key not in _KEYS and key not in _WITHOUT_EFFECT and not is_empty:
            reason = f"a prompt has the keys {', '.join(_KEYS)}"
            raise error("unsupported_parameter", param=f"{place}.{str(key)[:64]}", reason=reason)
    if not isinstance(prompt.get("mm_processor_kwargs") or {}, dict):
        reason = _reason(prompt["mm_processor_kwargs"], "a dict")
        raise error("invalid_type", param=f"{place}.mm_processor_kwargs", reason=reason)
    text, ids, salt = (prompt.get(key) for key in _KEYS[:3])
    if ids is None and text is None:
        raise error("invalid_type", param=place, reason="prompt or prompt_token_ids is expected in it")
    if text is not None and not isinstance(text, str):
        raise error("invalid_type", param=f"{place}.prompt", reason=_reason(text, "text"))
    if ids is not None and not isinstance(ids, (list, tuple)):
        raise error("invalid_type", param=f"{place}.prompt_token_ids", reason=_reason(ids, "a list of token ids"))
    if salt is not None and not isinstance(salt, str):
        raise error("invalid_type", param=f"{place}.cache_salt", reason=_reason(salt, "text"))


def _reason(value: object, expected: str) -> str:
    hint = " (its method tolist returns one)" if hasattr(value, "tolist") else ""
    return f"{expected} is expected, not {type(value).__name__}{hint}"
