"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with positions from the padding token's id on, and a head of two layers."""

from __future__ import annotations

import torch

from aiakq.runtime.config.encoder_families import extra_positions
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
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


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return RobertaBuilder(config, weights).build()
