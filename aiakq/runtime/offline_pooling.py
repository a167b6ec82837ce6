"""PoolingMethods: the part of ``LLM`` that returns embeddings and scores. Names and results follow vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiakq.runtime.offline_prompts import Prompt, listed_prompts
from aiakq.runtime.protocol.pooling_params import Pooled, PoolingLimits, PoolingParams, paired, similarity
from aiakq.runtime.protocol.request_output import RequestOutput
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

Prompts = Prompt | Sequence[Prompt]


class PoolingMethods:
    """Methods of ``LLM`` that pool prompts instead of generating text.

    In all methods, ``truncate_prompt_tokens`` is the number of tokens to keep at the end of a prompt; -1 for as many as
    fit.
    """

    engine: Engine
    tokenizer: Tokenizer

    def _pool(
        self, prompts: Sequence[Prompt], params: PoolingParams, truncate_prompt_tokens: int | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Run ``prompts``; each result has ``pooled`` set. Raises AiakqError for prompts that cannot be pooled."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled output of each prompt as a tensor; see --task.

        Raises AiakqError for an invalid prompt, ``task_mismatch`` for a generative model.
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
        """Return the embedding of each prompt. Raises as ``encode``, ``task_mismatch`` without embeddings."""
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
        """Return label probabilities of each prompt. Raises as ``encode``, ``task_mismatch`` without labels."""
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
        """Score pairs of texts: one first text with every second text, or first and second texts pairwise.

        A model with one label scores the pair; for an embedding model the score is the cosine similarity.
        """
        limits = self._pooling_limits()
        limits.check_scores()
        pairs = paired([text_1] if isinstance(text_1, str) else text_1, [text_2] if isinstance(text_2, str) else text_2)
        if not limits.is_classifier:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            outputs = dict(
                zip(texts, self._pool(texts, PoolingParams(), truncate_prompt_tokens, use_tqdm), strict=True)
            )
            vectors = {text: _pooled(result).vector() for text, result in outputs.items()}
            return [
                _result(ScoringRequestOutput, outputs[two], ScoringOutput(similarity(vectors[one], vectors[two])))
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
    """Return the pooled result as a tensor [D] or [T, D] float32."""
    if not pooled.data:
        return torch.zeros(0, pooled.width)
    rows = torch.frombuffer(bytearray(pooled.data), dtype=torch.float32).view(-1, pooled.width)
    return rows[0] if one_row else rows


def _result(kind: Any, result: RequestOutput, outputs: Any) -> Any:
    return kind(result.request_id, outputs, result.prompt_token_ids, result.num_cached_tokens)
