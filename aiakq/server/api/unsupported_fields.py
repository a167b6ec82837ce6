"""Request fields that the server does not implement: which are ignored, which refused, and why.

Fields of the OpenAI API and of vLLM that are in no request model are looked up here. Any other field is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UnsupportedField:
    """A field that would change the response.

    reason   why it is refused.
    neutral  values that ask for nothing and are accepted; null always is.
    """

    reason: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` asks for nothing. Types are compared too: true is not 1, and 0 is not false."""
        return value is None or any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)


_TOOLS = "function calling is not built yet"
_CONSTRAINED = "constrained output is not built yet"

#: Accepted without effect on the response: bookkeeping of the hosted service, and hints.
IGNORED_FIELDS = frozenset(
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
IGNORED_MESSAGE_FIELDS = frozenset({"refusal", "annotations"})
IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation"})

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = {
    "tools": UnsupportedField(_TOOLS, ([],)),
    "tool_choice": UnsupportedField(_TOOLS, ("none", "auto")),
    "functions": UnsupportedField(_TOOLS, ([],)),
    "function_call": UnsupportedField(_TOOLS, ("none", "auto")),
    "response_format": UnsupportedField("only the type text is built yet", ({"type": "text"},)),
    "structured_outputs": UnsupportedField(_CONSTRAINED),
    "guided_json": UnsupportedField(_CONSTRAINED),
    "guided_regex": UnsupportedField(_CONSTRAINED),
    "guided_choice": UnsupportedField(_CONSTRAINED),
    "guided_grammar": UnsupportedField(_CONSTRAINED),
    "suffix": UnsupportedField("the model was not asked to fill in the middle", ("",)),
    "modalities": UnsupportedField("only text is produced", (["text"],)),
    "audio": UnsupportedField("only text is produced"),
    "web_search_options": UnsupportedField("nothing is fetched from the web"),
    "reasoning_effort": UnsupportedField("it belongs to reasoning models", ("none",)),
    "verbosity": UnsupportedField("the model cannot be told", ("medium",)),
    "documents": UnsupportedField("templates get no documents", ([],)),
    "chat_template": UnsupportedField("templates are chosen by the operator, with --chat-template"),
    "use_beam_search": UnsupportedField("beam search is not built", (False,)),
    "length_penalty": UnsupportedField("it belongs to beam search", (1, 1.0)),
    "logits_processors": UnsupportedField("requests bring no code", ([],)),
    "prompt_embeds": UnsupportedField("prompts are text or token ids"),
}
UNSUPPORTED_MESSAGE_FIELDS: Mapping[str, UnsupportedField] = {
    "tool_calls": UnsupportedField(_TOOLS, ([],)),
    "tool_call_id": UnsupportedField(_TOOLS),
    "function_call": UnsupportedField(_TOOLS),
    "audio": UnsupportedField("only text is read"),
}
