"""Checks that a checkpoint has the tensors that its config implies."""

from __future__ import annotations

from dataclasses import replace

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.separate_head import separate_head
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.models import ARCHITECTURES


def check_tensors(source: Checkpoint, checkpoint: Checkpoint) -> None:
    """Raise ``tensor_inventory`` unless ``checkpoint`` holds the model of the source's config.

    Only native families say what tensors they need; for others there is no check.
    """
    try:
        config = ModelConfig.from_hf(source.config)
    except AiakqError:
        return
    if config.architecture not in ARCHITECTURES:
        return
    if separate_head(source):
        config = replace(config, tie_word_embeddings=False)
    check_inventory(config, checkpoint)
