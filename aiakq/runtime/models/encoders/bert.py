"""BERT (Devlin et al. 2018, arXiv:1810.04805): learned positions, segments of a pair, norms after the residual sums."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.encoders.builder import EncoderBuilder


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return EncoderBuilder(config, weights).build()
