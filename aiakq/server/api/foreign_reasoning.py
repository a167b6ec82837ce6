"""Request fields of other servers that say how much a model reasons, of requests with a conversation."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.server.api.foreign_field import IGNORED, Fields, ForeignField, Sent, all_refused, refuse, refused

_BUDGET = "thinking_token_budget"


def _thinking(value: object, sent: Sent) -> Fields:
    """A boolean, or the object of Anthropic, DeepSeek and GLM."""
    if isinstance(value, Mapping):
        fields: dict[str, object] = {"thinks": value.get("type") != "disabled"}
        if value.get("type") not in ("enabled", "disabled", "adaptive", "auto", None):
            refuse("its type is enabled, disabled or adaptive")
        return fields | (_budget(value, "budget_tokens") if fields["thinks"] else {})
    return _think(value, sent)


def _think(value: object, sent: Sent) -> Fields:
    """A boolean, or Ollama's levels."""
    if isinstance(value, bool):
        return {"thinks": value}
    return {"reasoning_effort": value} if isinstance(value, str) else refuse("it is true, false or a level")


def _reasoning(value: object, sent: Sent) -> Fields:
    """OpenRouter's object."""
    if not isinstance(value, Mapping):
        return _think(value, sent)
    fields: dict[str, object] = {}
    if value.get("effort") is not None:
        fields["reasoning_effort"] = value["effort"]
    if isinstance(value.get("enabled"), bool):
        fields["thinks"] = value["enabled"]
    if value.get("exclude") is True:
        fields["include_reasoning"] = False
    return fields | _budget(value, "max_tokens")


def _budget(value: Mapping[str, object], *names: str) -> dict[str, object]:
    """The budget that ``value`` has under one of ``names``."""
    given = [value[name] for name in names if value.get(name) is not None]
    return {_BUDGET: given[0]} if given else {}


def _custom_params(value: object, sent: Sent) -> Fields:
    """SGLang's arguments of its processors of logits, one of which ends thoughts."""
    return _budget(value, "thinking_budget") if isinstance(value, Mapping) else {}


def _thinking_config(value: object, sent: Sent) -> Fields:
    """Gemini's object, which has either spelling."""
    if not isinstance(value, Mapping):
        refuse("it is an object")
    shows = value.get("include_thoughts", value.get("includeThoughts"))
    fields: dict[str, object] = {} if shows is not False else {"include_reasoning": False}
    level = value.get("thinking_level", value.get("thinkingLevel"))
    if isinstance(level, str):
        fields["reasoning_effort"] = level.lower()
    return fields | _budget(value, "thinking_budget", "thinkingBudget")


def _google(value: object, sent: Sent) -> Fields:
    """Gemini's fields in requests of OpenAI's form."""
    if not isinstance(value, Mapping) or value.get("cached_content") or value.get("cachedContent"):
        refuse("an object is expected, without prompts that are stored")
    config = value.get("thinking_config", value.get("thinkingConfig"))
    return {} if config is None else _thinking_config(config, sent)


def _nvext(value: object, sent: Sent) -> Fields:
    """The object of NVIDIA's servers."""
    names = {"max_thinking_tokens": _BUDGET}
    names |= {name: name for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")}
    if not isinstance(value, Mapping) or not value.keys() <= names.keys():
        refuse(f"an object with {', '.join(names)} is expected")
    return {names[name]: entry for name, entry in value.items() if entry is not None}


def _effort(value: object, sent: Sent) -> Fields:
    """OpenAI's field of chat."""
    return {"reasoning_effort": value}


def _switch(value: object, sent: Sent) -> Fields:
    return {"thinks": value} if isinstance(value, bool) else refuse("it is true or false")


REASONING_FIELDS: Mapping[str, ForeignField] = {
    "enable_thinking": ForeignField(_switch, hint=True),
    "thinking": ForeignField(_thinking, hint=True),
    "think": ForeignField(_think, hint=True),
    "reasoning": ForeignField(_reasoning, hint=True),
    # A number of tokens; a route without thoughts has nothing to limit.
    _BUDGET: IGNORED,
    **dict.fromkeys(
        (
            *("thinking_budget", "thinking_budget_tokens", "reasoning_budget", "reasoning_budget_tokens"),
            *("reasoning_max_tokens", "max_thinking_tokens", "max_reasoning_tokens"),
        ),
        ForeignField(lambda value, sent: {_BUDGET: value}, hint=True),
    ),
    "custom_params": ForeignField(_custom_params, hint=True),
    **dict.fromkeys(("thinking_config", "thinkingConfig"), ForeignField(_thinking_config, hint=True)),
    "google": ForeignField(_google, hint=True),
    "nvext": ForeignField(_nvext),
    **all_refused(
        "reasoning_end_str of --reasoning-config says what ends a thought",
        "reasoning_budget_message thinking_budget_message think_stop_sentence",
        "",
    ),
    "reasoning_effort": ForeignField(_effort, hint=True),
}

#: OpenRouter's fields of the object ``reasoning`` in responses, besides those that are declared.
REASONING_OPTIONS: Mapping[str, ForeignField] = {
    "exclude": refused("reasoning is returned in full", False),
}
