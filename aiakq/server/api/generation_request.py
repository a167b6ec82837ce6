"""Request fields shared by completions and chat completions of the OpenAI API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.server.api.foreign_fields import GENERATION_FIELDS
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.request_model import LIMITED_BY, Integer, RequestModel
from aiakq.server.api.sampling_fields import SAMPLING_FIELDS, SamplingFields, check_http_maximums
from aiakq.server.api.structured_fields import StructuredFields, structured_values
from aiakq.server.api.thought_budgets import BudgetMethods
from aiakq.server.api.unsupported_fields import IGNORED_STREAM_OPTIONS

#: Pattern of request ids from clients, which are repeated in a response header and in log lines.
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

#: The name of a served model.
ModelName = Annotated[str, Field(json_schema_extra={LIMITED_BY: "model"})]


class StreamOptions(RequestModel):
    """include_usage: a last chunk with token counts. continuous_usage_stats: token counts in every chunk."""

    ignored_fields = IGNORED_STREAM_OPTIONS
    unsupported_fields: ClassVar = {}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(SamplingFields, StructuredFields, BudgetMethods):
    """The fields of completions and chat; names and meaning as in the OpenAI API and vLLM."""

    foreign_fields = GENERATION_FIELDS

    model: ModelName | None = Field(None, description="A served name; the first one if not given.")
    stream: bool | None = Field(None, description="Return the text as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="include_usage, continuous_usage_stats.")
    priority: Annotated[Integer, Field(json_schema_extra={LIMITED_BY: "priority"})] | None = Field(
        None, description="Lower ones are scheduled first, with --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(json_schema_extra={"minLength": 1})] | None = Field(
        None, description="Cached prefixes are only shared between requests with the same salt."
    )
    add_special_tokens: bool | None = Field(None, description="Whether tokenization adds special tokens.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Call tokens token_id:N in lists of log-probabilities."
    )
    return_token_ids: bool | None = Field(None, description="Return the token ids of the prompt and the text.")
    request_id: Annotated[str, Field(json_schema_extra={"pattern": f"^{REQUEST_ID.pattern}$"})] | None = Field(
        None, description="Part of the id of the response, instead of a random one."
    )

    def check_combinations(self) -> None:
        """Raise ``unsupported_parameter`` or ``value_out_of_range`` for values that exclude each other."""
        check_http_maximums(self)
        if self.cache_salt == "":
            raise error("value_out_of_range", param="cache_salt", value="", allowed="a text that is not empty")
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            allowed = "1 to 128 printable characters without spaces"
            raise error("value_out_of_range", param="request_id", value=self.request_id[:64], allowed=allowed)
        if self.stream and self.best_of is not None and self.best_of != (self.n or 1):
            raise error(
                "unsupported_parameter", param="best_of", reason="it needs stream=false: the best are known last"
            )
        if self.stream_options is not None and not self.stream:
            raise error("unsupported_parameter", param="stream_options", reason="it needs stream=true")
        if self.logprob_token_ids is not None and not self.logprobs and self.logprobs != 0:
            raise error("unsupported_parameter", param="logprob_token_ids", reason="it needs logprobs")
        if self.stream and self.prompt_logprobs is not None:
            raise error("unsupported_parameter", param="prompt_logprobs", reason="it needs stream=false")

    def sampling_values(self) -> dict[str, Any]:
        """Return the sampling parameters that this request sets."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values.update(structured_values(self))
        return {name: value for name, value in values.items() if value is not None}

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """Return the sampling parameters: the request's values, else the model's ``defaults``, else the class's."""
        return SamplingParams(**{**defaults, **self.sampling_values()})

    async def grammar_of(self, renderer: Renderer, prompts: list[Prompt], grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of the response after checking it; ``grammar``: that of the structured output fields."""
        if grammar is not None:
            return await renderer.text.check_grammar(grammar, self.grammar_name())
        return None

    def rename_param(self, failure: AiakqError) -> AiakqError:
        """Return ``failure`` with the request field's name in place of the sampling parameter's."""
        return self.rename_budget(failure)
