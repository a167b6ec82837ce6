"""What clients may send: one model per request body, and its way into ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema

from aiakq.errors import AiakqError, error
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.server.api.parsing import Strict, judge_extras
from aiakq.server.api.request_stream import MAX_PROMPTS

Entry = TypeVar("Entry")
#: A list of which the first wrong entry is told: a million complaints would cost more than the request.
List = Annotated[list[Entry], Field(fail_fast=True)]

REFUSED_IN_MESSAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "tool_calls": (([],), "function calling is not built yet"),
    "tool_call_id": ((), "function calling is not built yet"),
    "function_call": ((), "function calling is not built yet"),
    "audio": ((), "only text is read"),
}
MESSAGE_WITHOUT_EFFECT = frozenset({"refusal", "annotations"})


class StreamOptions(Strict):
    """include_usage: one last chunk with token counts. continuous_usage_stats: counts on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Strict):
    """Fields that completions and chat share; names and meaning as in the OpenAI API and vLLM."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: List[int] | None = None
    bad_words: List[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check_combinations(self) -> None:
        """Raise ``unsupported_parameter`` for fields that do not go together, or ``value_out_of_range``."""
        if self.cache_salt == "":
            raise error("value_out_of_range", param="cache_salt", value="", allowed="a text that is not empty")
        if self.stream and self.best_of is not None and self.best_of != (self.n or 1):
            raise error(
                "unsupported_parameter", param="best_of", reason="it needs stream=false: the best are known last"
            )
        if self.stream_options is not None and not self.stream:
            raise error("unsupported_parameter", param="stream_options", reason="it needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise error("unsupported_parameter", param="prompt_logprobs", reason="it needs stream=false")

    def as_spelled(self, failure: AiakqError) -> AiakqError:
        """``failure``, naming the field the client wrote where ours has another name."""
        return failure

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def with_continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _sampling(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The request's own values over ``defaults`` (the model's generation_config.json) over SamplingParams'."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        chosen = dict(defaults) | {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**chosen, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)

_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids. Raises ``empty_prompt`` or ``invalid_type``."""
        return _prompts(self.prompt)

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """With ``echo``, the prompt's log-probabilities come along when the output's are asked for."""
        echoed = self.logprobs if self.echo else None
        wanted = self.prompt_logprobs if self.prompt_logprobs is not None else echoed
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self._sampling(defaults, max_tokens, self.logprobs, wanted)


class ChatMessage(Strict):
    """One message; ``content`` is text, or parts of type text."""

    role: str
    content: Any = None
    name: str | None = None

    def as_dict(self, place: str) -> dict[str, Any]:
        """The message as chat templates take it: role and text."""
        judge_extras(self, place, REFUSED_IN_MESSAGES, MESSAGE_WITHOUT_EFFECT)
        message = {"role": self.role, "content": _text_of(self.content, f"{place}.content")}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatFields(Strict):
    """What decides the text a conversation becomes."""

    messages: List[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as plain dicts. Raises ``unsupported_parameter`` for anything but text."""
        return [message.as_dict(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the chat template. Raises ``unsupported_parameter`` or ``invalid_type``."""
        generation_prompt = True if self.add_generation_prompt is None else self.add_generation_prompt
        if self.continue_final_message and self.add_generation_prompt:
            raise error(
                "unsupported_parameter", param="continue_final_message", reason="it needs add_generation_prompt=false"
            )
        arguments: dict[str, Any] = {"add_generation_prompt": generation_prompt and not self.continue_final_message}
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        for name, value in (self.chat_template_kwargs or {}).items():
            param = f"chat_template_kwargs.{name:.64}"
            # The template's own switches, like enable_thinking, are single values; the rest would reach the tokenizer.
            if name in RESERVED_KWARGS or not name.isidentifier():
                raise error("unsupported_parameter", param=param, reason="the name is taken")
            if not isinstance(value, (str, int, float, bool, type(None))):
                raise error("invalid_type", param=param, reason="a text, a number, true, false or null is expected")
            arguments[name] = value
        return arguments


RESERVED_KWARGS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "template",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "self",
        "bos_token",
        "eos_token",
    }
)


class ChatRequest(GenerationRequest, ChatFields):
    """POST /v1/chat/completions."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise error("unsupported_parameter", param="top_logprobs", reason="it needs logprobs=true")

    def as_spelled(self, failure: AiakqError) -> AiakqError:
        names = {"logprobs": "top_logprobs", "prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if failure.param not in names:
            return failure
        return error(failure.id, **failure.fields | {"param": names[failure.param]})

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Without a limit the answer may fill the context, as chat clients expect."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(defaults, max_tokens, logprobs, self.prompt_logprobs)


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or the messages of a chat (then ``TokenizeChatRequest``)."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """POST /tokenize with ``messages``."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: List[int]


class AbortRequest(Strict):
    """POST /abort_requests: ids of answers, like cmpl-..., or none for all."""

    request_ids: List[str] | None = None


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One or several prompts out of the four forms a client may send; the ids themselves are checked by ``admit``."""
    if isinstance(prompt, str):
        return [prompt]
    expected = "a string, a list of strings, a list of token ids, or a list of such lists is expected"
    if not isinstance(prompt, list):
        raise error("invalid_type", param="prompt", reason=expected)
    if not prompt:
        raise error("empty_prompt", param="prompt")
    if type(prompt[0]) is int:
        return [prompt]
    if not (all(isinstance(one, str) for one in prompt) or all(isinstance(one, list) for one in prompt)):
        raise error("invalid_type", param="prompt", reason=expected)
    return prompt


def _text_of(content: Any, place: str) -> str:
    """The text of a message's content; absent content is empty text, as templates expect."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise error("invalid_type", param=place, reason="a string or a list of parts is expected")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise error("invalid_type", param=f"{place}[{i}]", reason="an object with type and text is expected")
        if part.get("type") != "text":
            raise error("unsupported_parameter", param=f"{place}[{i}].type", reason="only parts of type text are read")
        if not isinstance(part.get("text"), str):
            raise error("invalid_type", param=f"{place}[{i}].text", reason="a string is expected")
        texts.append(part["text"])
    return "\n".join(texts)
