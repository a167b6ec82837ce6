"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT without segments and pooler."""

from __future__ import annotations

import torch

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import Names
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.encoders.builder import EncoderBuilder
from aiakq.runtime.models.encoders.encoder import ScoreHead


class DistilBertBuilder(EncoderBuilder):
    """DistilBERT."""

    names = Names(
        embedding="embeddings.word_embeddings",
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        gate_up=("ffn.lin1",),
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    )
    segment_table = ""

    def pooled_head(self, labels: int) -> ScoreHead:
        """Return the head over the first token's hidden state."""
        D = self.config.hidden_size
        first = self.head_layer("pre_classifier", D, D, torch.relu)
        return ScoreHead([first, self.head_layer("classifier", labels, D)])


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return DistilBertBuilder(config, weights).build()
