"""The tensors of an encoder of media in a checkpoint, by their headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.protocol.media import PLURALS

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig


def open_encoder(config: EngineConfig) -> Checkpoint:
    """Return the checkpoint of a multimodal model; ``beside_text`` are the tensors of its encoder."""
    assert config.multimodal is not None
    return open_with_config(config, config.multimodal.raw)


def open_with_config(config: EngineConfig, raw: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint of a model with the whole config.json ``raw``."""
    return Checkpoint.open(config.load.path, config.load.weights, config.load.ignore_patterns, dict(raw))


def encoder_refusal(config: EngineConfig) -> str:
    """Return why the encoder of a checkpoint cannot be read; "" if it can."""
    assert config.multimodal is not None
    named = PLURALS[config.multimodal.kind]
    if config.load.load_format == "dummy":
        return f"with --load-format dummy, there is no encoder of {named}"
    checkpoint = open_encoder(config)
    try:
        beside = checkpoint.beside_text
        if not beside:
            return f"the checkpoint has no encoder of {named}"
        quantized = [
            name for name in checkpoint.quantized_linears() if any(each.startswith(f"{name}.") for each in beside)
        ]
        return f"its encoder of {named} is quantized ({quantized[0]})" if quantized else ""
    finally:
        checkpoint.close()


def encoder_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype in which the encoder computes: that of the activations, or float32 on a CPU without instructions
    for it, with which torch's products take several times as long.
    """
    dtype = config.device.dtype
    if config.device.device.type != "cpu" or dtype == torch.float32:
        return dtype
    return dtype if _multiplies(dtype) else torch.float32


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether torch multiplies numbers of a 16-bit dtype with instructions of this CPU."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, name)())


def encoder_bytes(config: EngineConfig) -> int:
    """Return the bytes of the encoder in the dtype in which it computes."""
    assert config.multimodal is not None
    factor = encoder_dtype(config).itemsize // config.device.dtype.itemsize
    return bytes_beside_text(config, config.multimodal.raw) * factor


def bytes_beside_text(config: EngineConfig, raw: Mapping[str, Any]) -> int:
    """Return the bytes, in the activation dtype, of what is beside the language model in a checkpoint with config.json
    ``raw``.
    """
    checkpoint = open_with_config(config, raw)
    try:
        elements = sum(math.prod(checkpoint.inventory[name].shape) for name in checkpoint.beside_text)
        return elements * config.device.dtype.itemsize
    finally:
        checkpoint.close()
