"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with positions from the padding token's id on, and a head of two layers."""

from __future__ import annotations

import torch

from aiakq.runtime.config.encoder_families import extra_positions
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import Names
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.encoders import OUTER
from aiakq.runtime.models.encoders.builder import EncoderBuilder
from aiakq.runtime.models.encoders.encoder import ScoreHead


class RobertaBuilder(EncoderBuilder):
    """RoBERTa."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.extra_positions = extra_positions(config.raw)

    def pooled_head(self, labels: int) -> ScoreHead:
        """Return the head over the first token's hidden state."""
        D = self.config.hidden_size
        first = self.head_layer("classifier.dense", D, D, torch.tanh)
        return ScoreHead([first, self.head_layer("classifier.out_proj", labels, D)])


class FusedRobertaBuilder(RobertaBuilder):
    """XLM-RoBERTa as Jina writes it (jina-reranker-v2), with one projection to queries, keys and values."""

    names = Names(
        embedding="embeddings.word_embeddings",
        layers="encoder.layers",
        qkv=("mixer.Wqkv",),
        output="mixer.out_proj",
        attention_norm="norm1",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="norm2",
    )
    embedding_norm = "emb_ln"


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    is_fused = any(weights.has(f"{outer}emb_ln.weight") for outer in ("", *OUTER))
    return (FusedRobertaBuilder if is_fused else RobertaBuilder)(config, weights).build()
