"""The request of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import PARAMETERS, SamplingParams
from aiakq.server.api.answer_grammar import Reasoning, answer_grammar
from aiakq.server.api.chat_parsing import reasoning_state
from aiakq.server.api.conversation import ConversationFields
from aiakq.server.api.generation_request import GenerationRequest
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.request_model import Integer


class ChatCompletionRequest(GenerationRequest, ConversationFields):
    """The body of POST /v1/chat/completions. ``logprobs`` and ``top_logprobs`` are OpenAI's form of ``logprobs``."""

    logprobs: bool | None = Field(None, description="Return the log-probability of every token.")
    top_logprobs: Annotated[Integer, PARAMETERS["logprobs"]] | None = Field(
        None, description="Return this many of the most likely tokens per position; needs logprobs=true."
    )
    max_tokens: Annotated[Integer, PARAMETERS["max_tokens"]] | None = Field(
        None, description="Tokens to generate at most; up to the end of the context if not given."
    )
    max_completion_tokens: Annotated[Integer, PARAMETERS["max_tokens"]] | None = Field(
        None, description="The newer name of max_tokens, which it overrides."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: calls after the first one are left out; true if not given."
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out; needs --reasoning-parser.")
    echo: bool | None = Field(
        None, description="Return the last message before the text, if the text continues it or is of its role."
    )

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise error("unsupported_parameter", param="top_logprobs", reason="it needs logprobs=true")

    def sampling_values(self) -> dict[str, object]:
        """Return the sampling values. Without a limit, the output may fill the context, as chat clients expect."""
        values = super().sampling_values()
        values["max_tokens"] = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        values["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return values

    def rename_param(self, failure: AiakqError) -> AiakqError:
        failure = super().rename_param(failure)
        names = {"logprobs": "top_logprobs", "prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if failure.param not in names:
            return failure
        return error(failure.id, **failure.fields | {"param": names[failure.param]})

    async def tokenize(self, renderer: Renderer, params: SamplingParams) -> list[Prompt]:
        kwargs = self.template_kwargs(renderer.chat_template, renderer.unknown_fields)
        self.name_hidden(renderer.text.loaded.facts, renderer.unknown_fields)
        if "tools" in kwargs:
            renderer.check_calls_tools(is_forced=self.forces_calls)
        if self.include_reasoning is False and renderer.message_format.reasoning_parser is None:
            reason = "the server was started without --reasoning-parser"
            raise error("unsupported_parameter", param="include_reasoning", reason=reason)
        # The template writes special tokens itself.
        add_special_tokens = bool(self.add_special_tokens)
        return [
            await renderer.tokenize_chat(self.conversation(), kwargs, add_special_tokens, params, self.media_settings)
        ]

    async def grammar_of(self, renderer: Renderer, prompts: list[Prompt], grammar: Grammar | None) -> Grammar | None:
        parser = renderer.message_format.reasoning_parser
        if grammar is None and not self.may_call:
            return None
        reasoning = None if parser is None else Reasoning(parser, *reasoning_state(renderer, self, prompts[0]))
        return await answer_grammar(renderer, self, grammar, reasoning)

    def has_budget_in(self, param: str) -> bool:
        return self.thinking_token_budget is not None and self._budget_param == param

    def thought_state(self, renderer: Renderer, prompt: Prompt) -> tuple[bool, bool] | None:
        return None if renderer.message_format.reasoning_parser is None else reasoning_state(renderer, self, prompt)
