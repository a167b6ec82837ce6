"""What the models of transformers compute of an audio, behind one function for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def audio_features(hf: Any) -> Callable[..., Tensor]:
    """Return the function that computes the embeddings [E, hidden] of one audio with transformers' model ``hf``."""
    return _qwen2_audio(hf) if hf.config.model_type == "qwen2_audio" else _windows(hf)


def _qwen2_audio(hf: Any) -> Callable[..., Tensor]:
    inner = getattr(hf, "model", hf)
    tower, projector = inner.audio_tower, inner.multi_modal_projector

    def compute(input_features: Tensor, num_states: Tensor) -> Tensor:
        """Encode a spectrogram [bins, frames], of whose states the first ``num_states`` [1] are no silence behind the
        audio: only these are attended to. In transformers it is a part of the model's forward.
        """
        count, total = int(num_states), tower.config.max_source_positions
        mask = (torch.arange(total, device=input_features.device) < count).expand(1, 1, total, total)
        states = tower(input_features[None], attention_mask=None if count >= total else mask).last_hidden_state
        embeddings: Tensor = projector(states)[0, : (count - 2) // 2 + 1]
        return embeddings

    return compute


def _windows(hf: Any) -> Callable[..., Tensor]:
    def compute(input_features: Tensor) -> Tensor:
        """Encode windows [W, bins, frames], one after the other: all of an hour would take gigabytes at once."""
        found = [hf.get_audio_features(input_features=window[None]) for window in input_features]
        return torch.cat([getattr(each, "pooler_output", each) for each in found])

    return compute
