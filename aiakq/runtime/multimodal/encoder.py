"""The encoder of a checkpoint's media: transformers' modules of the family, without its language model."""

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
from aiakq.runtime.multimodal.audio_encoder import audio_features
from aiakq.runtime.multimodal.encoder_files import encoder_dtype, open_encoder
from aiakq.runtime.protocol.media import PLURALS, MediaItem, MediaKind, TensorRecord

#: Modules of transformers' models that are not part of the encoder.
_LANGUAGE = ("language_model.", "text_model.", "lm_head.")


class TransformersEncoder:
    """The tower and projector of a model of transformers."""

    def __init__(
        self,
        hf: Any,
        kind: MediaKind,
        dtype: torch.dtype,
        device: torch.device,
        added_layers: int,
        own_dtype: torch.dtype,
    ) -> None:
        """
        dtype      of the activations.
        own_dtype  of the modules; see ``encoder_dtype``.
        kind, added_layers: see ``MultimodalConfig``.
        """
        self._functions = _functions(hf, kind)
        self._width = hf.config.text_config.hidden_size
        self._dtype, self._device, self._added_layers = dtype, device, added_layers
        self._own_dtype = own_dtype

    @torch.inference_mode()
    def __call__(self, item: MediaItem) -> Tensor:
        """Return the embeddings of one item; see ``Encoder``."""
        function, names = self._functions[item.kind]
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
        return tensor.to(self._device, self._own_dtype if tensor.is_floating_point() else tensor.dtype)


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
        assert config.multimodal is not None
        file = f"the encoder of {PLURALS[config.multimodal.kind]} in '{config.load.path}'"
        raise error("model_malformed", file=file, reason=reason) from failure


def _load_encoder(config: EngineConfig) -> TransformersEncoder:
    import transformers

    assert config.multimodal is not None
    multimodal, device = config.multimodal, config.device
    hf_config = transformers.AutoConfig.for_model(**_without_language_model(multimodal.raw))
    if multimodal.kind == "audio":
        family = getattr(transformers, multimodal.architecture)
    else:
        with torch.device("meta"):
            family = type(transformers.AutoModelForImageTextToText.from_config(hf_config))
    tensors = _encoder_tensors(config, tuple(getattr(family, "_keep_in_fp32_modules_strict", None) or ()))
    with without_progress():
        hf, info = family.from_pretrained(
            None,
            config=hf_config,
            state_dict=tensors,
            dtype=encoder_dtype(config),
            attn_implementation=_attention(multimodal),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check_complete(config, info)
    hf = hf.to(device.device).eval()
    added, own_dtype = multimodal.added_layers, encoder_dtype(config)
    return TransformersEncoder(hf, multimodal.kind, device.dtype, device.device, added, own_dtype)


def _attention(multimodal: MultimodalConfig) -> str:
    """Return the name of the attention: in encoders that see a large image or a long audio whole, its scores would take
    gigabytes.
    """
    reads_whole = multimodal.kind == "audio" or multimodal.raw["vision_config"].get("model_type") == "pixtral"
    return "sdpa" if reads_whole or multimodal.architecture.startswith(("Qwen", "Gemma3")) else "eager"


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


def _encoder_tensors(config: EngineConfig, kept: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint that are not the language model's, in the dtype of ``encoder_dtype``.

    kept  parts of the names of modules that transformers computes in float32 whatever the dtype.
    """
    checkpoint, dtype = open_encoder(config), encoder_dtype(config)
    try:
        read = {name: checkpoint.checked_tensor(name) for name in checkpoint.beside_text}
        return {
            name: tensor.to(torch.float32 if any(part in name for part in kept) else dtype)
            for name, tensor in read.items()
        }
    finally:
        checkpoint.close()


def _check_complete(config: EngineConfig, info: Mapping[str, Any]) -> None:
    missing = [name for name in info["missing_keys"] if not name.removeprefix("model.").startswith(_LANGUAGE)]
    wrong = [name for name, *_ in info["mismatched_keys"] if not name.removeprefix("model.").startswith(_LANGUAGE)]
    assert config.multimodal is not None
    if missing or wrong:
        names = sorted([*missing, *wrong])
        named = PLURALS[config.multimodal.kind]
        missing_text = f"its encoder of {named} lacks {len(names)} tensors, such as {names[0]}"
        raise error("model_incomplete", path=str(config.load.path), missing=missing_text)


def _functions(hf: Any, kind: MediaKind) -> dict[MediaKind, tuple[Callable[..., Any], frozenset[str]]]:
    """Return kind of media -> the function that computes its embeddings, and the names of its arguments.

    kind  the first that the model of transformers ``hf`` reads; see ``MultimodalConfig``.
    """
    if kind == "audio":
        compute = audio_features(hf)
        return {"audio": (compute, _parameters(compute))}
    functions: dict[MediaKind, str] = {"image": "get_image_features", "video": "get_video_features"}
    inner = _inner(hf)
    return {
        each: (getattr(hf, name), _parameters(getattr(inner, name)))
        for each, name in functions.items()
        if hasattr(inner, name)
    }


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the arguments of a function."""
    return frozenset(inspect.signature(function).parameters)


def _inner(hf: Any) -> Any:
    """Return the model inside ``hf``, whose function of the same name lists its arguments."""
    return getattr(hf, "model", hf)
