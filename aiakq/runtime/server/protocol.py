"""What clients may send: strict models of the request bodies, and their way into ``SamplingParams``.

Bodies are parsed from the raw bytes, so that ``"1"`` is no number, ``true`` is no count and NaN is no temperature.
A field that is not in a model is looked up in two tables: those that have no effect here are taken and dropped, those
that would change the answer are refused by name unless they hold their neutral value; any other is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from aiakq.errors import AiakqError, error
from aiakq.runtime.sampling import SamplingParams

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
    "bad_words": (([],), "it is not built yet; logit_bias forbids single tokens"),
    "truncate_prompt_tokens": ((), "prompts are never cut silently"),
    "priority": ((0,), "requests are served in order of arrival"),
    "cache_salt": ((), "the prefix cache is not divided yet"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides"),
    "prompt_embeds": ((), "prompts are text or token ids"),
}

_REFUSED_IN_MESSAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "tool_calls": (([],), "function calling is not built yet"),
    "tool_call_id": ((), "function calling is not built yet"),
    "function_call": ((), "function calling is not built yet"),
    "audio": ((), "only text is read"),
}
_MESSAGE_WITHOUT_EFFECT = frozenset({"refusal", "annotations"})


class _Strict(BaseModel):
    """No coercion, no NaN; fields beyond the declared ones are kept apart and judged by ``_judge_extras``."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Strict):
    """include_usage: one last chunk with token counts. continuous_usage_stats: counts on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Strict):
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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check_combinations(self) -> None:
        """Raise ``unsupported_parameter`` for fields that do not go together."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise error(
                "unsupported_parameter", param="best_of", reason="every sequence is returned, so it must equal n"
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
    "skip_special_tokens",
)

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
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


class ChatMessage(_Strict):
    """One message; ``content`` is text, or parts of type text."""

    role: str
    content: Any = None
    name: str | None = None

    def as_dict(self, place: str) -> dict[str, Any]:
        """The message as chat templates take it: role and text."""
        _judge_extras(self, place, _REFUSED_IN_MESSAGES, _MESSAGE_WITHOUT_EFFECT)
        message = {"role": self.role, "content": _text_of(self.content, f"{place}.content")}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatFields(_Strict):
    """What decides the text a conversation becomes."""

    messages: list[ChatMessage] = Field(min_length=1)
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
            if name in _RESERVED_KWARGS or not name.isidentifier():
                raise error("unsupported_parameter", param=param, reason="the name is taken")
            if not isinstance(value, (str, int, float, bool, type(None))):
                raise error("invalid_type", param=param, reason="a text, a number, true, false or null is expected")
            arguments[name] = value
        return arguments


_RESERVED_KWARGS = frozenset(
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


class TokenizeRequest(_Strict):
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


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Request = TypeVar("Request", bound=_Strict)


def parse(model: type[Request], body: bytes) -> Request:
    """A request body as ``model``.

    Raises invalid_json, missing_field, invalid_type, value_out_of_range, unknown_field or unsupported_parameter,
    naming the field and repeating nothing the client sent beyond field names.
    """
    try:
        request = model.model_validate_json(body)
    except ValidationError as failure:
        raise _explain(failure) from None
    _judge_extras(request, "", REFUSED, WITHOUT_EFFECT)
    options = getattr(request, "stream_options", None)
    if options is not None:
        _judge_extras(options, "stream_options", {}, frozenset({"include_obfuscation"}))
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


def _judge_extras(
    model: _Strict, place: str, refused: Mapping[str, tuple[tuple[Any, ...], str]], without_effect: frozenset[str]
) -> None:
    """Refuse what a body holds beyond its model, unless it has no effect or asks for nothing."""
    for name, value in (model.model_extra or {}).items():
        param = f"{place}.{name:.64}" if place else f"{name:.64}"
        if name in without_effect:
            continue
        if name not in refused:
            raise error("unknown_field", param=param)
        neutral, reason = refused[name]
        if value is not None and value not in neutral:
            raise error("unsupported_parameter", param=param, reason=reason)


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
