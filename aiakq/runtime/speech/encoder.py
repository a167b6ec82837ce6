"""The encoder of audio: transformers' module of the family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error, one_line
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.multimodal.encoder_files import open_with_config
from aiakq.runtime.protocol.media import MediaItem

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig

#: Keys of config.json that transformers would interpret for the whole model.
_DROPPED = ("quantization_config", "compression_config", "dtype", "torch_dtype")
_PREFIX = "model.encoder."


class SpeechEncoder:
    """``WhisperEncoder`` of transformers, with the attention of torch, which needs the least memory."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    @torch.inference_mode()
    def __call__(self, item: MediaItem) -> Tensor:
        """Return the states [E, hidden] of one audio, which is computed alone. Raises ValueError for its shape."""
        record = item.tensors["input_features"]
        features = torch.frombuffer(bytearray(record.data), dtype=torch.float32).reshape(record.shape)
        states: Tensor = self._module(features[None].to(self._dtype)).last_hidden_state[0]
        return states


def load_encoder(config: EngineConfig) -> SpeechEncoder:
    """Load the encoder of ``config``'s checkpoint.

    Raises ``model_incomplete`` for missing tensors and those of another shape, ``model_malformed`` for a config that
    transformers rejects, ``unsupported`` for quantized tensors, and what ``Checkpoint`` raises.
    """
    assert config.speech is not None
    try:
        return _load_encoder(config, config.speech.raw)
    except AiakqError:
        raise
    except Exception as failure:  # transformers raises anything for invalid values
        if is_out_of_memory(failure):
            raise
        reason = one_line(failure).rstrip(".")[:200]
        file = f"the encoder of audio in '{config.load.path}'"
        raise error("model_malformed", file=file, reason=reason) from failure


def _load_encoder(config: EngineConfig, raw: Mapping[str, Any]) -> SpeechEncoder:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    hf_config = WhisperConfig(**{name: value for name, value in raw.items() if name not in _DROPPED})
    hf_config._attn_implementation = "sdpa"
    dtype = config.device.dtype
    with torch.device("meta"):
        module = WhisperEncoder(hf_config)
    tensors = _tensors(config, raw)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    wrong = [name for name, shape in expected.items() if name not in tensors or tuple(tensors[name].shape) != shape]
    wrong += tensors.keys() - expected.keys()
    if wrong:
        missing = (
            f"{len(wrong)} tensors of its encoder are not those of config.json, such as {_PREFIX}{sorted(wrong)[0]}"
        )
        raise error("model_incomplete", path=str(config.load.path), missing=missing)
    module.load_state_dict(tensors, assign=True)
    return SpeechEncoder(module.eval(), dtype)


def _tensors(config: EngineConfig, raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the encoder in the activation dtype. Raises ``unsupported`` for quantized ones."""
    checkpoint = open_with_config(config, raw)
    try:
        quantized = [name for name in checkpoint.quantized_linears() if name.startswith(_PREFIX)]
        if quantized:
            hint = "Quantize the decoder only."
            raise error("unsupported", what=f"A quantized encoder of audio ({quantized[0]})", hint=hint)
        dtype, names = config.device.dtype, checkpoint.beside_text
        return {name.removeprefix(_PREFIX): checkpoint.checked_tensor(name).to(dtype) for name in names}
    finally:
        checkpoint.close()
