"""Results of prompts that are pooled, with the fields of vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Output = TypeVar("Output")


@dataclass
class PoolingOutput:
    """data: [D] float32, or [T, D] where every token has a row."""

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
    """How well two texts go together."""

    score: float


@dataclass
class _Result(Generic[Output]):
    """A prompt, which is that of the second text for a score of embeddings, and what it has become."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingRequestOutput(_Result[PoolingOutput]):
    """What ``LLM.encode`` returns of a prompt."""


class EmbeddingRequestOutput(_Result[EmbeddingOutput]):
    """What ``LLM.embed`` returns of a prompt."""


class ClassificationRequestOutput(_Result[ClassificationOutput]):
    """What ``LLM.classify`` returns of a prompt."""


class ScoringRequestOutput(_Result[ScoringOutput]):
    """What ``LLM.score`` returns of a pair."""
