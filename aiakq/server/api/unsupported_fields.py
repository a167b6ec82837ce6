"""Request fields that are not implemented: which are ignored and which are rejected.

Fields of the OpenAI API and of vLLM that are in no request model are looked up here, those of other servers in
foreign_fields.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class UnsupportedField:
    """A field that would change the response.

    reason   why it is rejected.
    neutral  values without effect, which are accepted; null always is.
    hint     whether it is only a hint, of which every value is ignored, except with --unknown-fields refuse.
    """

    reason: str
    neutral: tuple[object, ...] = ()
    hint: bool = False

    def accepts(self, value: object) -> bool:
        """Whether ``value`` is neutral. Types are compared, too: true is not 1, and 0 is not false."""
        return value is None or any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)


_TOOLS = "only chat completions call tools, which the field tools describes"
_TEXT_ONLY = "only text is read"

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
IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation"})

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = {
    "tools": UnsupportedField(_TOOLS, ([],)),
    "tool_choice": UnsupportedField(_TOOLS, ("none", "auto")),
    "functions": UnsupportedField(_TOOLS, ([],)),
    "function_call": UnsupportedField(_TOOLS, ("none", "auto")),
    "suffix": UnsupportedField("only completions fill in the middle", ("",)),
    "modalities": UnsupportedField("only text is produced", (["text"],)),
    "audio": UnsupportedField("only text is produced"),
    "web_search_options": UnsupportedField("nothing is fetched from the web"),
    "reasoning_effort": UnsupportedField("only conversations have a switch for it", ("none",), hint=True),
    "include_reasoning": UnsupportedField("only chat completions separate reasoning", (True,)),
    "verbosity": UnsupportedField("the model cannot be told", ("medium",), hint=True),
    "mm_processor_kwargs": UnsupportedField("only chat completions have it", ({},)),
    "media_io_kwargs": UnsupportedField("only chat completions have it", ({},)),
    "kv_transfer_params": UnsupportedField("prompts and answers are computed in one place", ({},)),
    "documents": UnsupportedField("only conversations have a template, which shows them", ([],)),
    "chat_template": UnsupportedField("templates are chosen by the operator, with --chat-template"),
    "use_beam_search": UnsupportedField("beam search is not built", (False,)),
    "length_penalty": UnsupportedField("it belongs to beam search", (1, 1.0)),
    "logits_processors": UnsupportedField("requests bring no code", ([],)),
    "prompt_embeds": UnsupportedField("prompts are text or token ids"),
}
UNSUPPORTED_MESSAGE_FIELDS: Mapping[str, UnsupportedField] = {
    "audio": UnsupportedField(_TEXT_ONLY),
}
#: Fields of forms with audio.
UNSUPPORTED_AUDIO_FIELDS: Mapping[str, UnsupportedField] = {
    "include": UnsupportedField("tokens have no probabilities here; verbose_json has the mean of each window", ("",)),
    "chunking_strategy": UnsupportedField("audio is read in windows, one behind the other", ("", "auto")),
    "known_speaker_names": UnsupportedField("speakers are not told apart", ("",)),
    "known_speaker_references": UnsupportedField("speakers are not told apart", ("",)),
    "to_language": UnsupportedField("translations are English", ("", "en")),
    "hotwords": UnsupportedField("names and spellings belong into prompt", ("",)),
    "max_completion_tokens": UnsupportedField("a window is read to its end", ("",)),
}
