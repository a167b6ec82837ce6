"""PoolingMethods: the part of ``LLM`` that returns embeddings and scores. Names and results follow vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiakq.errors import error
from aiakq.runtime.pooling_params import Pooled, PoolingLimits, PoolingParams, paired, similarity
from aiakq.runtime.text.outputs import RequestOutput
from aiakq.runtime.text.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

if TYPE_CHECKING:
    from aiakq.runtime.engine.engine import Engine
    from aiakq.runtime.text.tokenizer import Tokenizer

#: A prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids"; with "cache_salt" it shares pages only with
#: prompts of the same.
Prompt = str | list[int] | dict[str, Any]
Prompts = Prompt | Sequence[Prompt]


def listed_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list; a flat list of ids is one prompt. Raises ``empty_prompt`` for none."""
    if prompts is None:
        raise error("empty_prompt", param="prompts")
    if isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


class PoolingMethods:
    """What ``LLM`` returns of prompts besides texts that continue them.

    In all methods, ``truncate_prompt_tokens`` keeps so many tokens of a prompt, its last ones; -1: as many as fit.
    """

    engine: Engine
    tokenizer: Tokenizer

    def _pool(
        self, prompts: Sequence[Prompt], params: PoolingParams, truncate_prompt_tokens: int | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Run ``prompts``; each result has a ``pooled``. Raises AiakqError for what cannot be pooled."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Whatever the model makes of each prompt, as a tensor: see --task.

        Raises AiakqError for a prompt that cannot be served, ``task_mismatch`` for a model that generates.
        """
        listed = listed_prompts(prompts if prompts is not None else prompt_token_ids)
        results = self._pool(listed, pooling_params or PoolingParams(), truncate_prompt_tokens, use_tqdm)
        one_row = self._pooling_limits().pooling.has_one_row
        return [_result(PoolingRequestOutput, each, PoolingOutput(_tensor(_pooled(each), one_row))) for each in results]

    def embed(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt. Raises as ``encode``, ``task_mismatch`` for a model that has none."""
        self._pooling_limits().check_embeds()
        params = pooling_params or PoolingParams()
        results = self._pool(listed_prompts(prompts), params, truncate_prompt_tokens, use_tqdm)
        return [_result(EmbeddingRequestOutput, each, EmbeddingOutput(_pooled(each).vector())) for each in results]

    def classify(
        self,
        prompts: Prompts,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each label, of each prompt. Raises as ``encode``, ``task_mismatch`` for another model."""
        self._pooling_limits().check_classifies()
        params = pooling_params or PoolingParams()
        results = self._pool(listed_prompts(prompts), params, truncate_prompt_tokens, use_tqdm)
        return [
            _result(ClassificationRequestOutput, each, ClassificationOutput(_pooled(each).vector())) for each in results
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well the first text goes together with each second one, or each first text with the second of its place:
        a model with one label scores the pair, one of embeddings compares those of the two.
        """
        limits = self._pooling_limits()
        limits.check_scores()
        pairs = paired([text_1] if isinstance(text_1, str) else text_1, [text_2] if isinstance(text_2, str) else text_2)
        if not limits.is_classifier:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            found = dict(zip(texts, self._pool(texts, PoolingParams(), truncate_prompt_tokens, use_tqdm), strict=True))
            vectors = {text: _pooled(result).vector() for text, result in found.items()}
            return [
                _result(ScoringRequestOutput, found[two], ScoringOutput(similarity(vectors[one], vectors[two])))
                for one, two in pairs
            ]
        encode = self.tokenizer.encode_pair
        prompts: list[Prompt] = [
            one + two if limits.concatenates else {"prompt_token_ids": encode(one, two)} for one, two in pairs
        ]
        results = self._pool(prompts, PoolingParams(), truncate_prompt_tokens, use_tqdm)
        return [_result(ScoringRequestOutput, each, ScoringOutput(_pooled(each).vector()[0])) for each in results]

    def _pooling_limits(self) -> PoolingLimits:
        return self.engine.limits.pools()


def _pooled(result: RequestOutput) -> Pooled:
    assert result.pooled is not None, "requests that fail raise"
    return result.pooled


def _tensor(pooled: Pooled, one_row: bool) -> torch.Tensor:
    """[D] float32, or [T, D]."""
    if not pooled.data:
        return torch.zeros(0, pooled.width)
    rows = torch.frombuffer(bytearray(pooled.data), dtype=torch.float32).view(-1, pooled.width)
    return rows[0] if one_row else rows


def _result(kind: Any, result: RequestOutput, outputs: Any) -> Any:
    return kind(result.request_id, outputs, result.prompt_token_ids, result.num_cached_tokens)
