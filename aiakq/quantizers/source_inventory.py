"""Checks the source's files and tensors before any work, as the loader will check those of the output."""

from __future__ import annotations

from dataclasses import replace

from aiakq.errors import AiakqError, error
from aiakq.formats import separate_head
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import FLOATS
from aiakq.formats.left_out import describe
from aiakq.quantizers.model.source import SourceModel
from aiakq.runtime.config.hf_config import check_generation_config
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.models import ARCHITECTURES


def is_native(model: SourceModel) -> bool:
    """Whether aiakq has a native model for this architecture."""
    return type(model.model).__name__ in ARCHITECTURES


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Raise ``already_quantized``, or ``generation_config`` for values that would end the start of a server."""
    spec = checkpoint.spec
    if spec is not None:
        raise error("already_quantized", path=str(checkpoint.path), found=f"{spec.method}, {spec.describe()}")
    if checkpoint.quantized_linears():
        raise error("already_quantized", path=str(checkpoint.path), found="its weights are integers")
    check_generation_config(checkpoint.path, checkpoint.config)


def check_source(model: SourceModel) -> list[str]:
    """Return warnings about the files.

    Raises ``tensor_inventory``, ``tensor_mismatch`` for integers, and ``config_key_unsupported``: a server refuses such
    a config whichever implementation is to run it.
    """
    checkpoint = model.checkpoint
    warnings = [separate_head.remark(model.separate_head)] if model.separate_head else []
    warnings += checkpoint.remarks
    try:
        config = ModelConfig.from_hf(checkpoint.config)
        if model.separate_head:
            config = replace(config, tie_word_embeddings=False)
        if config.architecture in ARCHITECTURES:
            warnings += [f"copied, but not used: {part}" for part in describe(check_inventory(config, checkpoint))]
    except AiakqError as problem:
        if problem.id in ("tensor_inventory", "config_key_unsupported"):
            raise
        # A native family may not support this config; transformers then runs the output.
    for name, _ in model.model.named_parameters():
        _check_floats(model, name)
    return [f"{each[:1].upper()}{each[1:]}." for each in warnings]


def _check_floats(model: SourceModel, name: str) -> None:
    source = model.stored_name(name)
    info = model.checkpoint.inventory.get(source)
    if info is not None and info.dtype not in FLOATS:
        reason = f"tensor {source} holds {info.dtype} without a scale"
        raise error("tensor_mismatch", path=str(model.checkpoint.path), reason=reason)
