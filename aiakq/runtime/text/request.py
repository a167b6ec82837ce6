"""Request: what a client asks for, built by a route of the server or by ``LLM``, and passed on whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiakq.runtime.engine.messages import DEFAULT_OPTIONS, RequestOptions
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.thought_budget import ThoughtBudget


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt. ``text`` is None when the client sent token ids; ``thought`` is the budget behind it."""

    text: str | None
    token_ids: list[int]
    thought: ThoughtBudget | None = None


@dataclass(frozen=True)
class Request:
    """One or several prompts with the same parameters.

    options              what the engine gets of it besides prompts and sampling parameters.
    arrival_time         seconds on ``time.monotonic``.
    final_only           whether the reader wants only the complete output, not increments.
    bad_words            ``bad_word_ids`` of ``params.bad_words``; tokenized later if None.
    kept_special_tokens  special tokens that are kept in the text even if special tokens are skipped.
    within_context       reduce a ``max_tokens`` that exceeds the context length, instead of refusing it.
    """

    id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    arrival_time: float = 0.0
    final_only: bool = False
    bad_words: Sequence[list[int]] | None = None
    kept_special_tokens: frozenset[int] = frozenset()
    within_context: bool = False
