"""Checks the source's files and tensors before any work, as the loader will check those of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from aiakq.errors import AiakqError, error
from aiakq.formats import separate_head
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.dequantized import dequantized
from aiakq.formats.inventory import FLOATS
from aiakq.formats.left_out import describe
from aiakq.formats.model_folder import (
    ROTATION_KEY,
    SCALING_METHODS,
    SOURCE_KEY,
    first_architecture,
    has_scaled_inputs,
)
from aiakq.quantizers.model.composite import predicts_text
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.runtime.config.encoder_families import encoder_of, extra_positions
from aiakq.runtime.config.hf_config import check_generation_config
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.models import is_native as is_native_class


def is_native(model: SourceModel) -> bool:
    """Whether aiakq has a native model for this architecture."""
    architecture = type(model.model).__name__
    return bool(model.decoder) or is_native_class(encoder_of(architecture) or architecture)


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Raise ``weights_unknown`` for codes without a config, or ``generation_config`` for values that would end the
    start of a server."""
    if checkpoint.spec is None and checkpoint.quantized_linears():
        raise error("weights_unknown", path=str(checkpoint.path))
    check_generation_config(checkpoint.path, checkpoint.config)


def check_lora(options: QuantizeOptions, checkpoint: Checkpoint) -> None:
    """Raise ``option_conflict`` for an adapter of the original model that does not fit the source's weights."""
    if options.lora is None:
        return
    own = checkpoint.config.get("aiakq")
    rotated = isinstance(own, Mapping) and ROTATION_KEY in own
    scaled = checkpoint.spec is not None and checkpoint.spec.method in SCALING_METHODS
    if rotated or scaled or has_scaled_inputs(checkpoint.config):
        raise error(
            "option_conflict",
            option="--lora",
            other="a source that was " + ("rotated" if rotated else "scaled when it was quantized"),
            reason="adapters of the original model do not fit its weights",
            hint="Quantize the original model with the adapter.",
        )


def check_decoder(options: QuantizeOptions, model: SourceModel) -> None:
    """Raise ``option_conflict`` for what would change a multimodal model's decoder but not the towers beside it."""
    refused: list[tuple[str, bool, str, str]] = [
        (
            "--rotate",
            options.rotate != "none",
            "what its towers write into the decoder would have to be rotated with it",
            "Leave it away.",
        ),
        (
            "--lora",
            options.lora is not None,
            "adapters of such models may change the towers, which are copied as they are",
            "Merge the adapter into the original first, with PEFT's merge_and_unload.",
        ),
    ]
    for option, given, reason, hint in refused:
        if model.decoder and given:
            other = "a multimodal model, of which only the decoder is quantized"
            raise error("option_conflict", option=option, other=other, reason=reason, hint=hint)


def longest_text(config: Any) -> int | None:
    """Return the longest text of a model, as its config in transformers says; None if it does not."""
    rows = getattr(config, "max_position_embeddings", None)
    return rows if rows is None else rows - extra_positions(config.to_dict())


def check_encoder(options: QuantizeOptions, checkpoint: Checkpoint) -> None:
    """Raise ``option_conflict`` for what needs decoder blocks and an output layer, which an encoder does not have."""
    if predicts_text(checkpoint.config):
        return
    architecture = first_architecture(checkpoint.config)
    if encoder_of(architecture) in ("GteModel", "NomicBertModel", "JinaBertModel", "JinaEmbeddingsV3Model"):
        what = f"Quantizing {architecture}, whose files name other layers than its class in transformers,"
        raise error("unsupported", what=what, hint="aiakq serve --quantization int8 rounds it while it is loaded.")
    recipe, reason = (
        options.resolved_recipe,
        "an encoder has no text to predict, and its layers are rounded as they are",
    )
    hint = "Use -quant_type weight_only_int8, without these options."
    refused = {
        f"-quant_type {options.method}": recipe.needs_inputs or bool(recipe.transforms),
        "--tune": options.tune,
        "--rotate": options.rotate != "none",
        "--lora": options.lora is not None,
        "--lm-head": options.lm_head is not None,
    }
    for option, is_given in refused.items():
        if is_given:
            raise error("option_conflict", option=option, other=architecture, reason=reason, hint=hint)


def dequantized_source(checkpoint: Checkpoint, storage: torch.dtype) -> tuple[Checkpoint, list[str]]:
    """Return the source with its weights as floats of ``storage``, and notes for the report if it is quantized."""
    spec = checkpoint.spec
    if spec is None:
        return checkpoint, _once_quantized(checkpoint.config)
    word = str(storage).removeprefix("torch.")
    notes = [
        f"The source is quantized already ({spec.method}, {spec.format} format, {spec.describe()}): its weights were "
        f"dequantized to {word}, and all figures compare with it, not with the model that it was made from."
    ]
    if spec.activation_bits:
        notes.append(
            f"The source rounds activations to {spec.activation_bits} bits; its dequantized weights were calibrated "
            "without that."
        )
    return dequantized(checkpoint, storage), notes


def _once_quantized(config: Mapping[str, object]) -> list[str]:
    """Return a note about floats that config.json says were made from a quantized model."""
    own = config.get("aiakq")
    source = own.get(SOURCE_KEY) if isinstance(own, Mapping) else None
    if not isinstance(source, Mapping):
        return []
    return [
        f"The source was made from a quantized model ({source.get('format')!s:.40} format, "
        f"{source.get('scheme')!s:.80}): its weights are rounded a second time, and all figures compare with it, not "
        "with the model before that."
    ]


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
        if is_native_class(config.architecture):
            unused = check_inventory(config, checkpoint)
            if predicts_text(checkpoint.config):  # of an encoder, the head is not known here
                warnings += [f"copied, but not used: {part}" for part in describe(unused)]
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
