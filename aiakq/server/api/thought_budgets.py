"""Budgets of thoughts, for the field thinking_token_budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pydantic import PrivateAttr

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.thought_budget import ThoughtMarks, check_end
from aiakq.server.api.foreign_field import ForeignField
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.request_model import RequestModel
from aiakq.server.api.unknown_fields import UnknownFields

PARAM = "thinking_token_budget"


class BudgetMethods(RequestModel):
    """The part of a request that ends thoughts."""

    _budget_param: str = PrivateAttr("")  # the field of another server that has the budget

    def thought_state(self, renderer: Renderer, prompt: Prompt) -> tuple[bool, bool] | None:
        """Return whether ``prompt`` ends within a thought, and whether it has closed it. None if the text is not
        parsed, so that a thought may begin anywhere in the prompt and the text.
        """
        return None

    async def with_budgets(self, renderer: Renderer, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prompt]:
        """Return the prompts with the budgets of thoughts, which ``params`` has. Raises ``unsupported_parameter``."""
        assert params.thinking_token_budget is not None
        marks, end_ids = await _end_of_thoughts(renderer, params)
        budget = partial(marks.budget, params.thinking_token_budget, end_ids)
        has_grammar = params.grammar is not None
        limited = []
        for prompt in prompts:
            state = self.thought_state(renderer, prompt)
            if state is None and has_grammar:
                reason = "structured output without a reasoning parser, or of /v1/completions, has no thought before it"
                raise error("unsupported_parameter", param=PARAM, reason=reason)
            if state is None:
                is_open = marks.are_open(await renderer.decode(prompt.token_ids))
                limited.append(replace(prompt, thought=budget(is_open=is_open, anywhere=True)))
            elif state[1] and not marks.anywhere:
                limited.append(prompt)  # there is no thought
            else:  # behind a thought, a grammar allows no other
                limited.append(replace(prompt, thought=budget(is_open=state[0], repeats=not has_grammar)))
        return limited

    def take(self, name: str, value: object, param: str, field: ForeignField, unknown: UnknownFields) -> None:
        super().take(name, value, param, field, unknown)
        if name == PARAM:
            self._budget_param = param

    def rename_budget(self, failure: AiakqError) -> AiakqError:
        """Return ``failure`` with the name of the field that has the budget."""
        if failure.param == PARAM and self._budget_param:
            return error(failure.id, **failure.fields | {"param": self._budget_param})
        return failure


async def _end_of_thoughts(renderer: Renderer, params: SamplingParams) -> tuple[ThoughtMarks, list[int]]:
    """Return the marks of thoughts, and the tokens that end one. Raises ``unsupported_parameter``."""
    format = renderer.message_format
    marks, failure = format.thought_marks, renderer.text.loaded.grammar_failure
    if not renderer.tokenizer.has_text:
        failure = "there is no tokenizer"
    elif marks is None and format.reasoning_parser is not None:
        failure = "the reasoning parser does not say what ends a thought; --reasoning-config can"
    elif marks is None:
        failure = "no --reasoning-parser or --reasoning-config of the server says what ends a thought"
    if marks is None or failure:
        raise error("unsupported_parameter", param=PARAM, reason=failure)
    if renderer.thought_end_ids is None:
        renderer.thought_end_ids = await renderer.encode(marks.end, add_special_tokens=False)
    end_ids = renderer.thought_end_ids
    spelled = b"".join(map(renderer.tokenizer.token_bytes, end_ids))
    reason = check_end(marks, spelled, end_ids, () if params.ignore_eos else renderer.limits.eos_token_ids)
    if reason:
        raise error("unsupported_parameter", param=PARAM, reason=reason)
    return marks, end_ids
