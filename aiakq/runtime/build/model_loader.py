"""Loads a model from a checkpoint folder: a native one if the architecture has one, otherwise through transformers."""

from __future__ import annotations

import logging
from pathlib import Path

from aiakq.errors import error, first_line
from aiakq.kernels.ops.sharded import ShardedOps
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.distributed.model_share import ModelShare, stage_of
from aiakq.runtime.inspect.description import (
    describe_left_out,
    describe_model_part,
    describe_operations,
    separate_head_remark,
)
from aiakq.runtime.loader.memory_check import check_weights_fit
from aiakq.runtime.loader.opening import CheckpointWeights, DummyWeights, weights_for
from aiakq.runtime.lora.layers import AdaptableLayers
from aiakq.runtime.lora.quantized_base import QuantizedBase
from aiakq.runtime.models import FAMILIES, family_module, is_native
from aiakq.runtime.models.interface import Model
from aiakq.runtime.models.stage import whole_model
from aiakq.runtime.multimodal.parts import media_limits
from aiakq.runtime.protocol.media import MediaKind

logger = logging.getLogger("aiakq.runtime")


def load_model(config: EngineConfig, share: ModelShare | None = None) -> tuple[Model, dict[str, str]]:
    """Load the model of ``config``, or one rank's ``share`` of it.

    Returns the model, and rows of the start-up table about the implementations of its operations.

    Raises AiakqError: model_unsupported, ranks_unavailable, tensor_inventory, tensor_mismatch, not_finite, model_*.
    """
    share = share or ModelShare()
    first = share.stage == 0 and (share.collective is None or share.collective.rank == 0)
    if config.model.stored_head and first:
        logger.warning("%s", separate_head_remark(config.model.stored_head))
    architecture = config.model.architecture
    if not is_native(architecture) or config.load.model_impl == "transformers":
        return _load_through_transformers(config, share)
    weights = weights_for(config, share.collective)
    for remark in weights.checkpoint.remarks if first and isinstance(weights, CheckpointWeights) else ():
        logger.warning("%s: %s", config.load.path, remark)
    if first and config.load.rounds and isinstance(weights, CheckpointWeights) and weights.rounding is not None:
        logger.warning("%s: %s; aiakq quantize measures the error", config.load.path, weights.rounding.remark)
    if config.scheduler.lora is not None:
        base = QuantizedBase()
        if isinstance(weights, CheckpointWeights):
            base = QuantizedBase.read(Path(weights.checkpoint.path), weights.checkpoint.config)
        weights.adapters = AdaptableLayers(config.scheduler.lora, base)
    weights.stage = stage_of(config, share, weights.checkpoint if isinstance(weights, CheckpointWeights) else None)
    model = family_module(architecture).build(config.model, weights)
    if model.stage != (weights.stage or whole_model(config.model.num_layers)):
        reason = "it cannot be distributed by layers, because it builds all of them"
        raise error("model_unsupported", architecture=architecture, reason=reason, known=FAMILIES)
    model.adapters = weights.adapters
    media = media_limits(config, model)
    facts = _describe(weights, None if media.refusal else media.kind, config.speech is not None)
    return model, facts


def _load_through_transformers(config: EngineConfig, share: ModelShare) -> tuple[Model, dict[str, str]]:
    """Load a model without a native implementation, or with ``--model-impl transformers``. See ``load_model``."""
    architecture = config.model.architecture
    native = is_native(architecture)
    reason = None
    if config.pooling is not None and not native:
        architecture, reason = config.pooling.stated, "aiakq pools native models only, and has none for it"
    elif config.load.rounds:
        reason = "--quantization rounds weights at load for native models only"
    elif config.load.model_impl == "aiakq":
        reason = "aiakq has no native model for it"
    elif config.scheduler.lora is not None:
        reason = "LoRA adapters are supported for native models only"
    elif share != ModelShare():
        reason = "models that run through transformers are not distributed over ranks"
    if reason is not None:
        raise error("model_unsupported", architecture=architecture, reason=reason, known=FAMILIES)
    from aiakq.runtime.hf.transformers_fallback import load_transformers_model

    return load_transformers_model(config)


def _describe(weights: CheckpointWeights | DummyWeights, media: MediaKind | None, transcribes: bool) -> dict[str, str]:
    """Return rows of the start-up table about the implementations of the operations of a model.

    media        of which its encoder is loaded, too; None for none.
    transcribes  whether it transcribes audio.
    """
    facts = describe_operations(weights.ops)
    if isinstance(weights.ops, ShardedOps):
        facts["tensor parallel"] = weights.ops.describe()
    if weights.stage is not None:
        facts["layers"] = f"{len(weights.stage.layers)} of {weights.stage.num_layers}, and the others in other stages"
    decoded = weights.decoded_remarks if isinstance(weights, CheckpointWeights) else []
    facts["linear layers"] = "; ".join([facts["linear layers"], *weights.remarks, *decoded])
    if isinstance(weights, CheckpointWeights) and weights.checkpoint.beside_text:
        beside = weights.checkpoint.beside_text - weights.stored
        facts["model part"] = describe_model_part(beside, media, transcribes)
    if isinstance(weights, CheckpointWeights) and weights.left_out:
        facts["left out"] = "; ".join(describe_left_out(weights.left_out))
    return facts


def load_within_memory(
    config: EngineConfig, share: ModelShare | None = None, host_ranks: int = 1
) -> tuple[Model, dict[str, str]]:
    """Call load_model; raise ``weights_too_large`` before reading any weight that would not fit, and ``out_of_memory``
    if an allocation fails.

    host_ranks  number of ranks that share the memory of this machine.
    """
    check_weights_fit(config, host_ranks)
    try:
        return load_model(config, share)
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        raise error("out_of_memory", reason=first_line(failure, "an allocation failed")[:200]) from failure
