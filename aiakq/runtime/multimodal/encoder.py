"""The encoder of a checkpoint's images: transformers' modules of the family, without its language model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error, one_line
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.multimodal import MultimodalConfig
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.hf.quiet import without_progress
from aiakq.runtime.multimodal.encoder_files import open_encoder
from aiakq.runtime.protocol.media import MediaItem, TensorRecord

#: Modules of transformers' models that are not part of the encoder.
_LANGUAGE = ("language_model.", "text_model.", "lm_head.")


class TransformersEncoder:
    """The vision tower and projector of a model of transformers, with eager attention."""

    def __init__(self, hf: Any, dtype: torch.dtype, device: torch.device, added_layers: int) -> None:
        """added_layers: see ``MultimodalConfig``."""
        # Kind of a medium -> the function for it, and the names of its arguments.
        self._features = {"image": _features(hf, "get_image_features")}
        if hasattr(_inner(hf), "get_video_features"):
            self._features["video"] = _features(hf, "get_video_features")
        self._width = hf.config.text_config.hidden_size
        self._dtype, self._device, self._added_layers = dtype, device, added_layers

    @torch.inference_mode()
    def __call__(self, item: MediaItem) -> Tensor:
        """Return the embeddings of one image or video; see ``Encoder``."""
        function, names = self._features[item.kind]
        output = function(**{name: self._tensor(tensor) for name, tensor in item.tensors.items() if name in names})
        features = getattr(output, "pooler_output", output)
        if not isinstance(features, Tensor):
            features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
        features = features.reshape(-1, features.shape[-1])
        if len(features) != item.num_embeddings:
            raise ValueError(f"the encoder returns {len(features)} embeddings for {item.num_embeddings} tokens")
        added = [each for [each] in output.deepstack_features] if self._added_layers else []
        return torch.stack([features, *added]).to(self._dtype)

    def zeros(self, count: int) -> Tensor:
        """Return [1 + L, count, hidden] zeros; see ``Encoder``."""
        return torch.zeros(1 + self._added_layers, count, self._width, dtype=self._dtype, device=self._device)

    def _tensor(self, record: TensorRecord) -> Tensor:
        tensor = torch.frombuffer(bytearray(record.data), dtype=getattr(torch, record.dtype)).reshape(record.shape)
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)


def load_encoder(config: EngineConfig) -> TransformersEncoder:
    """Load the encoder of ``config``'s checkpoint.

    Raises ``model_incomplete`` for missing tensors and those of another shape, ``model_malformed`` for a config that
    transformers rejects, and what ``Checkpoint`` raises.
    """
    try:
        return _load_encoder(config)
    except AiakqError:
        raise
    except Exception as failure:  # transformers raises anything for invalid values
        if is_out_of_memory(failure):
            raise
        reason = f"{one_line(failure).rstrip('.')[:200]}; --language-model-only leaves it out"
        file = f"the encoder of images in '{config.load.path}'"
        raise error("model_malformed", file=file, reason=reason) from failure


def _load_encoder(config: EngineConfig) -> TransformersEncoder:
    from transformers import AutoConfig, AutoModelForImageTextToText

    assert config.multimodal is not None
    raw = dict(config.multimodal.raw)
    hf_config = AutoConfig.for_model(**_without_language_model(raw))
    tensors = _encoder_tensors(config)
    with torch.device("meta"):
        family = type(AutoModelForImageTextToText.from_config(hf_config))
    with without_progress():
        hf, info = family.from_pretrained(
            None,
            config=hf_config,
            state_dict=tensors,
            dtype=config.device.dtype,
            attn_implementation=_attention(config.multimodal),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check_complete(config, info)
    hf, device = hf.to(config.device.device).eval(), config.device
    return TransformersEncoder(hf, device.dtype, device.device, config.multimodal.added_layers)


def _attention(multimodal: MultimodalConfig) -> str:
    """Return the name of the attention: in encoders that see a large image whole, its scores would take gigabytes."""
    is_pixtral = multimodal.raw["vision_config"].get("model_type") == "pixtral"
    return "sdpa" if is_pixtral or multimodal.architecture.startswith(("Qwen", "Gemma3")) else "eager"


def _without_language_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with a language model of no layers and a tiny vocabulary, of the same width."""
    changed = copy.deepcopy(dict(raw))
    for name in ("quantization_config", "compression_config", "dtype", "torch_dtype"):
        changed.pop(name, None)
    text = changed["text_config"]
    text |= {"num_hidden_layers": 0, "vocab_size": 8}
    for name in ("layer_types", "pad_token_id", "bos_token_id", "eos_token_id", "max_window_layers", "dtype"):
        text.pop(name, None)
    text["pad_token_id"] = None
    changed["pad_token_id"] = None
    return changed


def _encoder_tensors(config: EngineConfig) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint that are not the language model's, in the activation dtype."""
    checkpoint = open_encoder(config)
    try:
        return {name: checkpoint.checked_tensor(name).to(config.device.dtype) for name in checkpoint.beside_text}
    finally:
        checkpoint.close()


def _check_complete(config: EngineConfig, info: Mapping[str, Any]) -> None:
    missing = [name for name in info["missing_keys"] if not name.removeprefix("model.").startswith(_LANGUAGE)]
    wrong = [name for name, *_ in info["mismatched_keys"] if not name.removeprefix("model.").startswith(_LANGUAGE)]
    if missing or wrong:
        names = sorted([*missing, *wrong])
        path, count = str(config.load.path), len(names)
        raise error(
            "model_incomplete", path=path, missing=f"its encoder of images lacks {count} tensors, such as {names[0]}"
        )


def _features(hf: Any, name: str) -> tuple[Callable[..., Any], frozenset[str]]:
    """Return a function of ``hf``, and the names of its arguments."""
    return getattr(hf, name), frozenset(inspect.signature(getattr(_inner(hf), name)).parameters)


def _inner(hf: Any) -> Any:
    """Return the model inside ``hf``, whose function of the same name lists its arguments."""
    return getattr(hf, "model", hf)
