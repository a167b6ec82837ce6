"""Checks that a checkpoint has the tensors that its config implies."""

from __future__ import annotations

from dataclasses import replace

from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import BIAS
from aiakq.formats.separate_head import separate_head
from aiakq.kernels.types import QWeight
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import check_inventory, required_tensors
from aiakq.runtime.models import ARCHITECTURES


def check_tensors(source: Checkpoint, checkpoint: Checkpoint) -> None:
    """Raise ``tensor_inventory`` unless ``checkpoint`` holds the model of the source's config.

    Only native families say what tensors they need; for others there is no check.
    """
    config = _native_config(source)
    if config is not None:
        check_inventory(config, checkpoint)


def biases_without_place(checkpoint: Checkpoint) -> set[str]:
    """Return the packed linears that have a bias which the model of their config has not; AutoGPTQ writes zeros."""
    config = _native_config(checkpoint)
    linears = {} if config is None else required_tensors(config, checkpoint).linears
    without = {checkpoint.locate_linear(name) for name, (_, _, bias) in linears.items() if not bias}
    return {name for name in without if name is not None and BIAS in checkpoint.linear_headers(name)}


def without_bias(weight: QWeight | DecodedWeight, name: str, checkpoint: Checkpoint) -> QWeight | DecodedWeight:
    """Return a weight of ``biases_without_place`` without its bias. Raises ``tensor_mismatch`` unless that is zero."""
    if weight.bias is not None and bool(weight.bias.any()):
        reason = f"{name}.bias is not zero, and the model of config.json has no such bias"
        raise error("tensor_mismatch", path=checkpoint.named_path, reason=reason)
    return replace(weight, bias=None)


def _native_config(source: Checkpoint) -> ModelConfig | None:
    """Return the config of a model of a native family, or None for others."""
    try:
        config = ModelConfig.from_hf(source.config)
    except AiakqError:
        return None
    if config.architecture not in ARCHITECTURES:
        return None
    return replace(config, tie_word_embeddings=False) if separate_head(source) else config
