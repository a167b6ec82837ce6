"""What the models of transformers compute of an audio, behind one function for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def audio_features(hf: Any) -> Callable[..., Any]:
    """Return the function of transformers' model ``hf`` that computes the embeddings of one audio."""
    if hf.config.model_type != "qwen2_audio":
        features: Callable[..., Any] = hf.get_audio_features
        return features
    inner = getattr(hf, "model", hf)
    tower, projector = inner.audio_tower, inner.multi_modal_projector

    def compute(input_features: Tensor, num_states: Tensor) -> Tensor:
        """Return [E, hidden] of a spectrogram [bins, frames], of whose states the first ``num_states`` [1] are no
        silence behind the audio: only these are attended to. It is a part of the model's forward in transformers.
        """
        count, total = int(num_states), tower.config.max_source_positions
        mask = (torch.arange(total, device=input_features.device) < count).expand(1, 1, total, total)
        states = tower(input_features[None], attention_mask=None if count >= total else mask).last_hidden_state
        embeddings: Tensor = projector(states)[0, : (count - 2) // 2 + 1]
        return embeddings

    return compute
