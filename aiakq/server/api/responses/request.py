"""The body of POST /v1/responses, and its conversion to a chat request."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr, WithJsonSchema

from aiakq.errors import error
from aiakq.runtime.protocol.sampling_params import PARAMETERS
from aiakq.server.api.foreign_reasoning import REASONING_OPTIONS
from aiakq.server.api.reasoning_switch import ReasoningEffort
from aiakq.server.api.request_model import FailFastList, Integer, RequestModel
from aiakq.server.api.responses.items import check_items, continues, messages_of
from aiakq.server.api.responses.tools import OfferedTools, check_tools
from aiakq.server.api.tools import MAX_TOOLS
from aiakq.server.api.translated import TokenLimit, TranslatedRequest
from aiakq.server.api.unknown_fields import UnknownFields
from aiakq.server.api.unsupported_fields import UNSUPPORTED_FIELDS, UnsupportedField

_STATELESS = "responses are not stored; send the whole conversation in input"
_INPUT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
    "description": "A text, or items: messages, reasoning, function_call and function_call_output.",
}
_CHOICE_SCHEMA = {
    "anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}],
    "description": "none, auto, required, or an object of type function or allowed_tools.",
}
#: Chat parameter -> this API's name, where they differ, except parameters of tools.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function.name": "tool_choice.name",
}
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")

Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(RequestModel):
    """The response format. A JSON schema is enforced whether ``strict`` or not."""

    ignored_fields = frozenset({"description"})
    unsupported_fields: ClassVar = {}

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None

    def response_format(self) -> dict[str, object]:
        """Return the corresponding chat field."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise error("missing_field", param="text.format.schema")
        schema = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(RequestModel):
    """Options for the text of the response."""

    ignored_fields = frozenset()
    unsupported_fields = {"verbosity": UNSUPPORTED_FIELDS["verbosity"]}

    format: TextFormat | None = None


class ReasoningOptions(RequestModel):
    """The reasoning effort, if the chat template supports one. Reasoning is returned in full, without a summary.

    enabled     OpenRouter's switch: whether to reason.
    max_tokens  OpenRouter's name of thinking_token_budget.
    """

    ignored_fields = frozenset({"summary", "generate_summary"})
    unsupported_fields: ClassVar = {}
    foreign_fields = REASONING_OPTIONS

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    max_tokens: Annotated[Integer, PARAMETERS["thinking_token_budget"]] | None = None


class ResponsesRequest(TranslatedRequest):
    """The body of POST /v1/responses. Nothing is stored."""

    ignored_fields = frozenset(
        {
            *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
            *("prompt_cache_options", "client_metadata", "max_tool_calls", "stream_options"),
        }
    )
    unsupported_fields = {
        **TranslatedRequest.unsupported_fields,
        "previous_input_messages": UnsupportedField("all messages belong into input", ([],)),
        "enable_response_messages": UnsupportedField("the prompt and the text are not returned", (False,)),
        "previous_response_id": UnsupportedField(_STATELESS),
        "conversation": UnsupportedField(_STATELESS),
        "background": UnsupportedField("responses are not stored, so that none can be asked for later", (False,)),
        "prompt": UnsupportedField("templates of prompts are stored by OpenAI; send their text in input"),
        "context_management": UnsupportedField("the conversation is not shortened", ([],)),
        "moderation": UnsupportedField("nothing is moderated"),
    }

    own_names = {"max_tokens": "max_output_tokens"}

    input: Annotated[object, WithJsonSchema(_INPUT_SCHEMA)]
    stop: str | FailFastList[str] | None = Field(None, description="The text ends before one of these.")
    instructions: str | None = Field(None, description="Comes first, as a system message.")
    max_output_tokens: TokenLimit | None = Field(
        None,
        description="Tokens to generate at most; up to the end of the context if not given, or if there are fewer.",
    )
    tools: Annotated[list[object], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call, and namespaces of them."
    )
    tool_choice: Annotated[object, WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: calls after the first one are left out; true if not given."
    )
    text: TextOptions | None = Field(None, description="The format of the answer.")
    reasoning: ReasoningOptions | None = Field(
        None,
        description="effort, for chat templates that have a switch for it, and max_tokens, the same as "
        "thinking_token_budget.",
    )
    include: FailFastList[Includable] | None = Field(
        None,
        description="message.output_text.logprobs, reasoning.encrypted_content; the others are of tools and inputs "
        "that there are not.",
    )
    top_logprobs: Integer | None = Field(
        None, description="The most likely tokens per position, where include asks for log-probabilities."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: of a longer conversation the end is kept that leaves room for max_output_tokens."
    )
    metadata: dict[str, str] | None = Field(None, description="Returned as it is.")

    _offered: OfferedTools | None = PrivateAttr(None)

    @property
    def offered(self) -> OfferedTools:
        assert self._offered is not None
        return self._offered

    def check_parts(self, path: str, unknown: UnknownFields) -> None:
        check_items(self.input, unknown)
        check_tools(self.tools, self.tool_choice, unknown)

    def chat_fields(self) -> dict[str, object]:
        self._offered = offered = OfferedTools(self.tools, self.tool_choice)
        messages = messages_of(self.instructions, self.input)
        if not messages:
            raise error("value_out_of_range", param="input", value="empty", allowed="a text, or at least one item")
        format = None if self.text is None or self.text.format is None else self.text.format.response_format()
        continued = continues(self.input)
        logprobs = "message.output_text.logprobs" in (self.include or ())
        return {
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs if logprobs else None,
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "stop": self.stop,
            "tools": offered.tools or None,
            "tool_choice": offered.choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": format,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "continue_final_message": True if continued else None,
            "add_generation_prompt": False if continued else None,
            **({} if self._budget is None else {"thinking_token_budget": self._budget}),
        }

    @property
    def _budget(self) -> int | None:
        """The budget of ``reasoning``."""
        return None if self.reasoning is None else self.reasoning.max_tokens

    def own_name(self, param: str) -> str:
        if param == "thinking_token_budget" and self._budget is not None:
            return "reasoning.max_tokens"
        tool = _TOOL.fullmatch(param)
        if tool is not None and int(tool[1]) < len(self.offered.paths):
            return self.offered.paths[int(tool[1])] + tool[2]
        return _NAMES.get(param, param)

    def asked_reasoning(self) -> dict[str, tuple[object, str]]:
        options = self.reasoning or ReasoningOptions()
        asked: dict[str, tuple[object, str]] = {}
        if options.effort is not None:
            asked["reasoning_effort"] = options.effort, "reasoning.effort"
        if options.enabled is not None:
            asked["thinks"] = options.enabled, "reasoning.enabled"
        return asked
