"""PoolingMethods: the part of ``LLM`` that returns embeddings and scores. Names and results follow vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

import torch

from aiakq.errors import error
from aiakq.runtime.offline_prompts import Prompt, PromptDict, Prompts, listed_prompts
from aiakq.runtime.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.pooling_params import Pooled, PoolingLimits, PoolingParams, paired
from aiakq.runtime.protocol.request import Prompt as TokenizedPrompt
from aiakq.runtime.protocol.request import Request
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta, check_truncation
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.text.whole_texts import encode_whole

Output = TypeVar("Output")


class _PooledText(NamedTuple):
    """A text to compute scores of."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int


class PooledOutputBuilder(Generic[Output]):
    """Builds the output of a request that pools its prompt.

    kind     class of the output.
    convert  returns its ``outputs`` for a pooled prompt.
    """

    _last: Delta

    def __init__(self, kind: Callable[..., Output], convert: Callable[[Pooled], object], request: Request) -> None:
        self._kind, self._convert, self._request = kind, convert, request

    def add(self, delta: Delta) -> bool:
        """See OutputBuilder."""
        self._last = delta
        return delta.finish_reason is not None

    def result(self) -> Output:
        """Return the output. Raises ``numerical_error`` if the prompt could not be pooled."""
        last, request = self._last, self._request
        if last.pooled is None:
            raise error("numerical_error", reason=last.error)
        return self._kind(request.id, self._convert(last.pooled), request.prompts[0].token_ids, last.num_cached_tokens)


class TextPair(NamedTuple):
    """Two texts that are one prompt."""

    one: str
    two: str


def whole_prompt(
    tokenizer: Tokenizer, prompt: Prompt | TextPair, params: SamplingParams, limits: ModelLimits
) -> TokenizedPrompt | None:
    """Return a prompt as an encoder reads it; None if it is token ids, or the model no encoder.

    Raises as ``encode_whole``, and ``value_out_of_range`` for a ``truncate_prompt_tokens`` beyond the context.
    """
    text = prompt.get("prompt") if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None else prompt
    if not isinstance(text, str | TextPair) or limits.pooling is None or not limits.pooling.reads_both_ways:
        return None
    check_truncation(params, limits)
    keep, texts = params.truncate_prompt_tokens, (text,) if isinstance(text, str) else text
    longest = limits.longest
    ids, second = encode_whole(tokenizer, texts, longest if keep == -1 else keep)
    return TokenizedPrompt(text if isinstance(text, str) else None, ids, second_text=second)


def late_prompt(
    tokenizer: Tokenizer, prompt: Prompt | TextPair, params: PoolingParams, limits: ModelLimits, keep: int | None
) -> TokenizedPrompt | None:
    """Return a query or document as a ColBERT model reads it; None for token ids, or of another model.

    keep  maximum number of tokens that the caller wants; see ``LateInteraction.room``. Raises as ``encode_whole``.
    """
    text = prompt.get("prompt") if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None else prompt
    late = None if limits.pooling is None else limits.pooling.late
    if late is None or not isinstance(text, str):
        return None
    role = late.role(params.input_type)
    ids, _ = encode_whole(tokenizer, (text,), late.room(role, limits.longest, keep))
    ids, num_unread = late.marked(role, ids)
    return TokenizedPrompt(text, ids, num_unread=num_unread)


def with_text_before(prompt: Prompt | TextPair, before: str) -> Prompt | TextPair:
    """Return a prompt with a text before its own; token ids and pairs as they are."""
    if isinstance(prompt, str):
        return before + prompt
    text = prompt.get("prompt") if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None else None
    if text is None:
        return prompt
    changed = cast(PromptDict, prompt).copy()
    changed["prompt"] = before + text
    return changed


class PoolingMethods:
    """Methods of ``LLM`` that pool prompts instead of generating text.

    In all methods, ``truncate_prompt_tokens`` is the number of tokens to keep at the end of a prompt; -1 for as many as
    fit.
    """

    tokenizer: Tokenizer

    def _pooling_limits(self) -> PoolingLimits:
        """Return the limits of pooling requests. Raises ``task_mismatch`` for a generative model."""
        raise NotImplementedError

    def _pool(
        self,
        builder: Callable[[Request], PooledOutputBuilder[Output]],
        prompts: Sequence[Prompt | TextPair],
        params: PoolingParams | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
    ) -> list[Output]:
        """Pool ``prompts``. Raises AiakqError for prompts that cannot be pooled."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled output of each prompt as a tensor; see --task.

        pooling_task  vLLM's name of what the model does, such as token_embed; any other is refused.
        Raises AiakqError for an invalid prompt, ``task_mismatch`` for a generative model.
        """
        listed = listed_prompts(prompts if prompts is not None else prompt_token_ids)
        limits = self._pooling_limits()
        limits.check_task("pooling_task", pooling_task)
        one_row = limits.pooling.has_one_row
        builder = partial(
            PooledOutputBuilder, PoolingRequestOutput, lambda pooled: PoolingOutput(_tensor(pooled, one_row))
        )
        return self._pool(builder, listed, pooling_params, truncate_prompt_tokens, use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt. Raises as ``encode``, ``task_mismatch`` without embeddings."""
        self._pooling_limits().check_embeds()
        return self._pool(_embedded, listed_prompts(prompts), pooling_params, truncate_prompt_tokens, use_tqdm)

    def classify(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return label probabilities of each prompt. Raises as ``encode``, ``task_mismatch`` without labels."""
        self._pooling_limits().check_classifies()
        return self._pool(_classified, listed_prompts(prompts), pooling_params, truncate_prompt_tokens, use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one first text with every second text, or first and second texts pairwise.

        A model with one label scores the pair; for an embedding model the score is the cosine similarity, and
        for a ColBERT model, whose first texts are queries, the sum of the largest similarities of their tokens.
        """
        limits = self._pooling_limits()
        limits.check_scores()
        pairs = paired([text_1] if isinstance(text_1, str) else text_1, [text_2] if isinstance(text_2, str) else text_2)
        if limits.is_classifier:
            prompts: list[Prompt | TextPair] = [
                one + two if limits.concatenates else TextPair(one, two) for one, two in pairs
            ]
            return self._pool(_scored, prompts, None, truncate_prompt_tokens, use_tqdm)
        sides = []
        for texts, params in limits.sides(pairs, PoolingParams()):
            results = self._pool(_whole, texts, params, truncate_prompt_tokens, use_tqdm)
            sides.append(dict(zip(texts, results, strict=True)))
        queries, documents = sides[0], sides[-1]
        scored = []
        for one, two in pairs:
            second = documents[two]
            score = limits.score(queries[one].outputs, second.outputs)
            output = ScoringOutput(score)
            scored.append(
                ScoringRequestOutput(second.request_id, output, second.prompt_token_ids, second.num_cached_tokens)
            )
        return scored


_whole = partial(PooledOutputBuilder, _PooledText, lambda pooled: pooled)
_embedded = partial(PooledOutputBuilder, EmbeddingRequestOutput, lambda pooled: EmbeddingOutput(pooled.vector()))
_classified = partial(
    PooledOutputBuilder, ClassificationRequestOutput, lambda pooled: ClassificationOutput(pooled.vector())
)
_scored = partial(PooledOutputBuilder, ScoringRequestOutput, lambda pooled: ScoringOutput(pooled.vector()[0]))


def _tensor(pooled: Pooled, one_row: bool) -> torch.Tensor:
    """Return the pooled result as a tensor [D] or [T, D] float32."""
    if not pooled.data:
        return torch.zeros(0, pooled.width)
    rows = torch.frombuffer(bytearray(pooled.data), dtype=torch.float32).view(-1, pooled.width)
    return rows[0] if one_row else rows
