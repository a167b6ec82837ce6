"""Request fields shared by completions and chat completions of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.server.api.foreign_fields import GENERATION_FIELDS
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.request_model import Integer, RequestModel
from aiakq.server.api.sampling_fields import SAMPLING_FIELDS, SamplingFields
from aiakq.server.api.structured_fields import StructuredFields, structured_values
from aiakq.server.api.thought_budgets import BudgetMethods
from aiakq.server.api.unsupported_fields import IGNORED_STREAM_OPTIONS

#: The name of a served model; a priority; a token id.
ModelName = Annotated[str, Constraint(type=str, limited_by="model")]
Priority = Annotated[Integer, Constraint(type=int, limited_by="priority")]
TokenId = Annotated[Integer, Constraint(type=int, limited_by="token_id")]
#: Ids of clients are repeated in a response header and in log lines.
_REQUEST_ID = Constraint(
    type=str, pattern=r"^[\x21-\x7e]{1,128}$", expected="1 to 128 printable characters without spaces"
)
_SALT = Constraint(type=str, least=1, expected="a text that is not empty")


class StreamOptions(RequestModel):
    """include_usage: a last chunk with token counts. continuous_usage_stats: token counts in every chunk."""

    ignored_fields = IGNORED_STREAM_OPTIONS
    unsupported_fields: ClassVar = {}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(RequestModel):
    """The fields that requests of all APIs that generate have."""

    model: ModelName | None = Field(None, description="A served name; the first one if not given.")
    stream: bool | None = Field(None, description="Return the text as server-sent events while it is generated.")
    priority: Priority | None = Field(
        None, description="Lower ones are scheduled first, with --scheduling-policy priority."
    )
    cache_salt: Annotated[str, _SALT] | None = Field(
        None, description="Cached prefixes are only shared between requests with the same salt."
    )
    request_id: Annotated[str, _REQUEST_ID] | None = Field(
        None, description="Part of the id of the response, instead of a random one."
    )


class GenerationRequest(SamplingFields, RequestFields, StructuredFields, BudgetMethods):
    """The fields of completions and chat; names and meaning as in the OpenAI API and vLLM."""

    foreign_fields = GENERATION_FIELDS

    stream_options: StreamOptions | None = Field(None, description="include_usage, continuous_usage_stats.")
    add_special_tokens: bool | None = Field(None, description="Whether tokenization adds special tokens.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Call tokens token_id:N in lists of log-probabilities."
    )
    return_token_ids: bool | None = Field(None, description="Return the token ids of the prompt and the text.")

    def check_combinations(self) -> None:
        """Raise ``unsupported_parameter`` or ``value_out_of_range`` for values that exclude each other."""
        self.constraints().check(vars(self))
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
