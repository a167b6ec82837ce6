"""What media add to an engine. Its modules are imported only for a model that reads images, videos or audio."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.multimodal.config_keys import refused_key, refused_video_key
from aiakq.runtime.multimodal.encoder_files import encoder_bytes, encoder_refusal
from aiakq.runtime.protocol.limits import TEXT_ONLY
from aiakq.runtime.protocol.media import PLURALS, MediaLimits, named_kinds

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.config.scheduler import SchedulerConfig
    from aiakq.runtime.engine.pages import PagePool
    from aiakq.runtime.models.interface import Model
    from aiakq.runtime.multimodal.encoding import MediaEncoding
    from aiakq.runtime.multimodal.resource import EncoderCache


def media_limits(config: EngineConfig, model: Model) -> MediaLimits:
    """Return what prompts of ``model`` may have besides text."""
    multimodal = config.multimodal
    if multimodal is None:
        return TEXT_ONLY
    if refusal := (
        multimodal.refusal
        or _refusal(model, multimodal)
        or _whole_refusal(config, model, multimodal.whole_tokens)
        or encoder_refusal(config)
        or refused_key(multimodal)
    ):
        return MediaLimits(refusal, dict(multimodal.max_items), refusals=dict(multimodal.refusals))
    refusals = dict(multimodal.refusals)
    if "video" in multimodal.max_items.keys() - refusals.keys() and (refusal := refused_video_key(multimodal)):
        refusals["video"] = refusal
    return MediaLimits("", dict(multimodal.max_items), config.scheduler.encoder_cache_tokens, refusals)


def media_read(config: EngineConfig, model: Model) -> str:
    """Return what prompts may have besides text, such as images and videos; "" for nothing."""
    return named_kinds(media_limits(config, model).kinds)


def _whole_refusal(config: EngineConfig, model: Model, tokens: int) -> str:
    """Return why images of ``tokens`` tokens that attend to each other are refused; "" if they are not, or for 0."""
    needed, budget = tokens + config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if not tokens or not isinstance(model, Decoder):
        return ""
    others = model.ops.selected("attention") - {"cpu", "torch"}
    if config.device.device.type != "cpu" or others:
        what = f"not by the attention of {', '.join(sorted(others))}" if others else "on CPUs only"
        return f"tokens of an image attend to each other in both directions, which is computed {what}"
    if needed > budget:
        return (
            f"a step has to have room for the {tokens} tokens of an image beside {config.scheduler.max_num_seqs} "
            f"sequences, but --max-num-batched-tokens is {budget}; raise it to {needed}, or lower --max-num-seqs"
        )
    return ""


def _refusal(model: Model, multimodal: MultimodalConfig) -> str:
    """Return why the language model cannot read embeddings of media; "" if it can."""
    named = PLURALS[multimodal.kind]
    if not isinstance(model, Decoder):
        return f"{named} are read by native models only"
    # Gemma 3 multiplies embeddings of tokens only, and so does ``Decoder``.
    is_scaled = model.after_embedding is not None and not multimodal.whole_tokens
    if model.stage.is_first and (is_scaled or model.project_in is not None):
        return f"{named} are not computed with a language model of {model.config.architecture}"
    return ""


def reserved_bytes(config: EngineConfig, model: Model) -> int:
    """Return the bytes of the encoder and of its cache on a rank of ``model``; 0 without one."""
    if not _reads_embeddings(model, config):
        return 0
    assert config.multimodal is not None
    width = model.config.hidden_size * config.device.dtype.itemsize * (1 + config.multimodal.added_layers)
    return encoder_bytes(config) + config.scheduler.encoder_cache_tokens * width


def _reads_embeddings(model: Model, config: EngineConfig) -> TypeGuard[Decoder]:
    """Whether the stage ``model`` reads what is computed of images: before its first layer or behind one of them."""
    if media_limits(config, model).refusal or not isinstance(model, Decoder):
        return False
    return model.stage.is_first or (
        config.multimodal is not None and model.stage.first < config.multimodal.added_layers
    )


def new_resource(config: SchedulerConfig, pool: PagePool) -> EncoderCache | None:
    """Return the scheduler's part; None for a model that reads text only."""
    if not config.encoder_cache_tokens:
        return None
    from aiakq.runtime.multimodal.resource import EncoderCache

    return EncoderCache(config.encoder_cache_tokens)


def new_part(config: EngineConfig, model: Model, samples: bool) -> MediaEncoding | None:
    """Return the part of an executor of the first stage, and of later ones if images are added to outputs of their
    layers; None elsewhere, and for a model that reads text only.

    Raises ``tensor_inventory`` for tensors of the encoder that are missing, and what reading them raises.
    """
    if not _reads_embeddings(model, config):
        return None
    from aiakq.runtime.multimodal.encoder import load_encoder
    from aiakq.runtime.multimodal.encoding import MediaEncoding

    return MediaEncoding(load_encoder(config))
