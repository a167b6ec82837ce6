"""What the transcription of audio adds to an executor; the scheduler's part is that of images, ``EncoderCache``. Its
modules are imported only for a model that transcribes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.runtime.models.whisper import CrossDecoder
from aiakq.runtime.multimodal.encoder_files import bytes_beside_text

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.models.interface import Model
    from aiakq.runtime.speech.encoding import SpeechEncoding


def reserved_bytes(config: EngineConfig, model: Model) -> int:
    """Return the bytes of the encoder, and of the keys and values of its states that are kept; 0 without one."""
    if config.speech is None or not isinstance(model, CrossDecoder):
        return 0
    per_state = sum(layer.spec.cache_bytes(config.cache.dtype) for layer in model.encoder_states.layers)
    return bytes_beside_text(config, config.speech.raw) + config.scheduler.encoder_cache_tokens * per_state


def new_part(config: EngineConfig, model: Model, samples: bool) -> SpeechEncoding | None:
    """Return the part of an executor; None for a model that does not transcribe.

    Raises ``model_incomplete`` and ``model_malformed`` for an encoder that cannot be loaded.
    """
    if config.speech is None or not isinstance(model, CrossDecoder):
        return None
    from aiakq.runtime.speech.encoder import load_encoder
    from aiakq.runtime.speech.encoding import SpeechEncoding

    return SpeechEncoding(load_encoder(config), model.encoder_states)
