"""Budgets of thoughts, for the field thinking_token_budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiakq.errors import error
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.thought_budget import ThoughtBudget, ThoughtMarks, check_end
from aiakq.server.api.service import Service
from aiakq.server.process.request_stream import Prompt

PARAM = "thinking_token_budget"


async def with_budgets(service: Service, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prompt]:
    """Return the prompts with the budget of ``params`` for texts in which a thought may begin anywhere.

    Raises ``unsupported_parameter``.
    """
    marks, end_ids = await _end_of_thoughts(service, params)
    if params.grammar is not None:
        reason = "structured output without a reasoning parser, or of /v1/completions, has no thought before it"
        raise error("unsupported_parameter", param=PARAM, reason=reason)
    limited = []
    for prompt in prompts:
        is_open = marks.are_open(await service.decode(prompt.token_ids))
        thought = marks.budget(_limit(params), end_ids, is_open=is_open, anywhere=True)
        limited.append(replace(prompt, thought=thought))
    return limited


async def message_budget(
    service: Service, params: SamplingParams, is_open: bool, is_closed: bool
) -> ThoughtBudget | None:
    """Return the budget of ``params`` for a message that is parsed; None if the prompt leaves no room for a thought.

    is_open, is_closed  whether the prompt ends within a thought, and whether it has closed it.

    Raises ``unsupported_parameter``.
    """
    marks, end_ids = await _end_of_thoughts(service, params)
    if is_closed and not marks.anywhere:
        return None
    # Behind a thought, a grammar allows no other.
    return marks.budget(_limit(params), end_ids, is_open=is_open, repeats=params.grammar is None)


async def _end_of_thoughts(service: Service, params: SamplingParams) -> tuple[ThoughtMarks, list[int]]:
    """Return the marks of thoughts, and the tokens that end one. Raises ``unsupported_parameter``."""
    format = service.message_format
    marks, failure = format.thought_marks, service.text.loaded.grammar_failure
    if not service.tokenizer.has_text:
        failure = "there is no tokenizer"
    elif marks is None and format.reasoning_parser is not None:
        failure = "the reasoning parser does not say what ends a thought; --reasoning-config can"
    elif marks is None:
        failure = "no --reasoning-parser or --reasoning-config of the server says what ends a thought"
    if marks is None or failure:
        raise error("unsupported_parameter", param=PARAM, reason=failure)
    if service.thought_end_ids is None:
        service.thought_end_ids = await service.encode(marks.end, add_special_tokens=False)
    end_ids = service.thought_end_ids
    spelled = b"".join(map(service.tokenizer.token_bytes, end_ids))
    reason = check_end(marks, spelled, end_ids, () if params.ignore_eos else service.model.limits.eos_token_ids)
    if reason:
        raise error("unsupported_parameter", param=PARAM, reason=reason)
    return marks, end_ids


def _limit(params: SamplingParams) -> int:
    assert params.thinking_token_budget is not None
    return params.thinking_token_budget
