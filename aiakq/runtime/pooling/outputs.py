"""Results of pooled prompts, with the fields of vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Output = TypeVar("Output")


@dataclass
class PoolingOutput:
    """data: [D] float32, or [T, D] with a row per token."""

    data: Tensor


@dataclass
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probability of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of two texts."""

    score: float


@dataclass
class _Result(Generic[Output]):
    """A prompt and its pooled output; for scores of embeddings, the prompt of the second text."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingRequestOutput(_Result[PoolingOutput]):
    """The result of ``LLM.encode`` for a prompt."""


class EmbeddingRequestOutput(_Result[EmbeddingOutput]):
    """The result of ``LLM.embed`` for a prompt."""


class ClassificationRequestOutput(_Result[ClassificationOutput]):
    """The result of ``LLM.classify`` for a prompt."""


class ScoringRequestOutput(_Result[ScoringOutput]):
    """The result of ``LLM.score`` for a pair of texts."""
