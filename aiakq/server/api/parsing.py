"""Request bodies, strictly: raw bytes into a model, every complaint into an entry of the error registry.

Bodies are parsed from the raw bytes, so that ``"1"`` is no number, ``true`` is no count and NaN is no temperature.
A field that is not in a model is looked up in two tables: those that have no effect here are taken and dropped, those
that would change the answer are refused by name unless they hold their neutral value; any other is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from aiakq.errors import AiakqError, error

#: Accepted and without effect on the answer (docs/serving.md): bookkeeping of the hosted service, and hints.
WITHOUT_EFFECT = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    }
)
STREAM_OPTIONS_WITHOUT_EFFECT = frozenset({"include_obfuscation"})

#: Would change the answer: name -> (values that ask for nothing, why any other is refused). None always asks nothing.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "function calling is not built yet"),
    "tool_choice": (("none", "auto"), "function calling is not built yet"),
    "functions": (([],), "function calling is not built yet"),
    "function_call": (("none", "auto"), "function calling is not built yet"),
    "response_format": (({"type": "text"},), "only the type text is built yet"),
    "structured_outputs": ((), "constrained output is not built yet"),
    "guided_json": ((), "constrained output is not built yet"),
    "guided_regex": ((), "constrained output is not built yet"),
    "guided_choice": ((), "constrained output is not built yet"),
    "guided_grammar": ((), "constrained output is not built yet"),
    "suffix": (("",), "the model was not asked to fill in the middle"),
    "modalities": ((["text"],), "only text is produced"),
    "audio": ((), "only text is produced"),
    "web_search_options": ((), "nothing is fetched from the web"),
    "reasoning_effort": (("none",), "it belongs to reasoning models"),
    "verbosity": (("medium",), "the model cannot be told"),
    "documents": (([],), "templates get no documents"),
    "chat_template": ((), "templates are chosen by the operator, with --chat-template"),
    "use_beam_search": ((False,), "beam search is not built"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "logits_processors": (([],), "requests bring no code"),
    "prompt_embeds": ((), "prompts are text or token ids"),
}


class Strict(BaseModel):
    """No coercion, no NaN; fields beyond the declared ones are kept apart and judged by ``judge_extras``."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)


Request = TypeVar("Request", bound=Strict)


def parse(model: type[Request], body: bytes) -> Request:
    """A request body as ``model``.

    Raises invalid_json, missing_field, invalid_type, value_out_of_range, unknown_field or unsupported_parameter,
    naming the field and repeating nothing the client sent beyond field names.
    """
    try:
        request = model.model_validate_json(body)
    except ValidationError as failure:
        raise _explain(failure) from None
    judge_extras(request, "", REFUSED, WITHOUT_EFFECT)
    options = getattr(request, "stream_options", None)
    if options is not None:
        judge_extras(options, "stream_options", {}, STREAM_OPTIONS_WITHOUT_EFFECT)
    return request


def _explain(failure: ValidationError) -> AiakqError:
    """The first complaint of pydantic as an entry of our registry."""
    first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, place, text = first["type"], first["loc"], first["msg"]
    text = text[:1].lower() + text[1:]
    if not place:
        reason = "an object is expected" if kind != "json_invalid" else text.removeprefix("invalid JSON: ")
        return error("invalid_json", reason=reason)
    param = _param(place)
    if kind == "missing":
        return error("missing_field", param=param)
    if kind == "finite_number":
        return error("value_out_of_range", param=param, value="not finite", allowed="a finite number")
    if kind == "too_short":
        return error("value_out_of_range", param=param, value="empty", allowed="at least one entry")
    if place[0] == "stop":  # a union: pydantic complains once per branch
        text = "a string or a list of strings is expected"
    return error("invalid_type", param=param, reason=text)


def _param(place: tuple[int | str, ...]) -> str:
    """``messages[0].content`` for the place of an error; what a client chose itself (a key) is cut to 64 characters."""
    if place[0] == "stop":
        return "stop"
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part:.64}"
    return text.lstrip(".")


def judge_extras(
    model: Strict, place: str, refused: Mapping[str, tuple[tuple[Any, ...], str]], without_effect: frozenset[str]
) -> None:
    """Refuse what a body holds beyond its model, unless it has no effect or asks for nothing."""
    for name, value in (model.model_extra or {}).items():
        param = f"{place}.{name:.64}" if place else f"{name:.64}"
        if name in without_effect:
            continue
        if name not in refused:
            raise error("unknown_field", param=param)
        neutral, reason = refused[name]
        # Written so that true is not 1, and 0 not false.
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise error("unsupported_parameter", param=param, reason=reason)
