"""Limits of a loaded model that requests are validated against, and how it pools prompts."""

from __future__ import annotations

from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.loader.opening import open_weights
from aiakq.runtime.loader.required import adaptable_modules
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import Model
from aiakq.runtime.multimodal.parts import media_limits
from aiakq.runtime.protocol.limits import AdapterLimits, ModelLimits
from aiakq.runtime.protocol.pooling_params import PoolingLimits
from aiakq.runtime.protocol.transcripts import SpeechLimits


def bounds_of(config: EngineConfig, max_kv_tokens: int) -> Bounds:
    """Return the largest step, with room for ``max_kv_tokens`` in the KV cache."""
    scheduler = config.scheduler
    tokens = scheduler.max_num_batched_tokens
    every_token = config.pooling is not None and config.pooling.every_token
    return Bounds(tokens, tokens if every_token else scheduler.max_rows, min(config.max_model_len, max_kv_tokens))


def limits_of(config: EngineConfig, model: Model, max_kv_tokens: int) -> ModelLimits:
    """Return the limits of ``model`` with a KV cache of ``max_kv_tokens`` tokens. Raises ``model_malformed``."""
    return ModelLimits(
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len,
        max_kv_tokens=max_kv_tokens,
        max_logprobs=config.max_logprobs,
        eos_token_ids=config.generation.eos_token_ids,
        max_new_tokens=config.generation.max_new_tokens,
        by_priority=config.scheduler.scheduling_policy == "priority",
        grammars=config.generation.grammars,
        pooling=_pooling_limits(config, model),
        adapters=_adapter_limits(config, model),
        media=media_limits(config, model),
        short_context=config.model.short_context,
        speech=None if config.speech is None else SpeechLimits(config.speech.num_states),
    )


def _adapter_limits(config: EngineConfig, model: Model) -> AdapterLimits | None:
    lora = config.scheduler.lora
    if lora is None:
        return None
    assert isinstance(model, Decoder) and model.adapters is not None, "only native models have adapters"
    modules = model.adapters.modules
    if not (model.stage.is_first and model.stage.is_last) and config.load.load_format != "dummy":
        modules = adaptable_modules(config.model, open_weights(config).checkpoint)
    return AdapterLimits(
        max_rank=lora.max_rank,
        max_bytes=lora.max_bytes,
        max_loras=lora.max_loras,
        modules=modules,
        widths=dict(model.adapters.base.widths),
        model_type=str(config.model.raw.get("model_type", "")),
    )


def _pooling_limits(config: EngineConfig, model: Model) -> PoolingLimits | None:
    if config.pooling is None:
        return None
    assert isinstance(model, Decoder), "only native models are pooled"
    return config.pooling.limits_of(config.pooling.num_labels or model.output_width)
