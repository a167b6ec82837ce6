"""RecurrentGemma: the layers that its files list, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops import Ops, PlannedOps
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import build_without_weights

#: A published file with smaller sizes, as transformers 4 wrote it.
PUBLISHED: dict[str, Any] = {
    "_block_types": ["recurrent", "recurrent", "attention"], "architectures": ["RecurrentGemmaForCausalLM"],
    "attention_bias": False, "attention_dropout": 0.0, "attention_window_size": 16, "bos_token_id": 2,
    "conv1d_width": 4, "eos_token_id": 1, "final_w_init_variance_scale": 0.5, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 128, "intermediate_size": 512, "logits_soft_cap": 30.0, "lru_width": 128,
    "model_type": "recurrent_gemma", "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 1,
    "pad_token_id": 0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "use_cache": True,
    "torch_dtype": "float32", "transformers_version": "4.40.0.dev0", "vocab_size": 320, "w_init_variance_scale": 0.01,
}  # fmt: skip


def test_a_published_file_is_read() -> None:
    model = ModelConfig.from_hf(PUBLISHED)
    assert model.layer_kinds == ("linear_attention", "linear_attention", "sliding_attention", "linear_attention")
    assert model.sliding_windows == (None, None, 16, None) and model.context == 8192
    assert model.rope["partial_rotary_factor"] == 0.5 and model.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_types": ["recurrent", "other"]}, "block_types"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
        ({"lru_width": 130}, "lru_width"),
        ({"head_dim": 16}, "its head_dim is 16"),
        ({"conv1d_width": 1}, "conv1d_width"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], reason: str, tiny_model: Callable[..., Path]
) -> None:
    checkpoint = Checkpoint.open(tiny_model("RecurrentGemmaForCausalLM"))
    ops = PlannedOps(Ops(torch.device("cpu"), torch.float32))
    with pytest.raises(AiakqError, match=reason):
        build_without_weights(ModelConfig.from_hf({**checkpoint.config, **changes}), checkpoint, ops)


def test_gpus_are_refused(tiny_model: Callable[..., Path]) -> None:
    ops = Ops(torch.device("cpu"), torch.float32)
    ops.device_type = "cuda"
    checkpoint = Checkpoint.open(tiny_model("RecurrentGemmaForCausalLM"))
    with pytest.raises(AiakqError, match="on a GPU is not supported.*--device cpu"):
        build_without_weights(ModelConfig.from_hf(checkpoint.config), checkpoint, PlannedOps(ops))
