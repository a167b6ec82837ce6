"""Jina embeddings v3 (Sturua et al. 2024, arXiv:2409.10173): XLM-RoBERTa with rotary positions."""

from __future__ import annotations

from typing import ClassVar

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.encoders.roberta import FusedRobertaBuilder


class JinaEmbeddingsV3Builder(FusedRobertaBuilder):
    """Jina embeddings v3, without the adapters of its tasks."""

    position_table: ClassVar[str] = ""


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return JinaEmbeddingsV3Builder(config, weights).build()
