"""DeepSeek: what is refused by name, and what stays float32 when activations are in 16 bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_comparison import TOLERANCE, largest_difference, of_transformers, ours
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops.routing import SigmoidRouting
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import required_tensors


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("topk_method", "noaux_tc", "its topk_method is 'noaux_tc'"), ("norm_topk_prob", True, "norm_topk_prob")],
)
def test_routings_that_transformers_does_not_compute_are_refused(
    name: str, value: object, reason: str, tiny_model: Callable[..., Path]
) -> None:
    checkpoint = Checkpoint.open(tiny_model("DeepseekV2ForCausalLM"))
    config = ModelConfig.from_hf({**checkpoint.config, name: value})
    with pytest.raises(AiakqError, match=reason) as caught:
        required_tensors(config, checkpoint)
    assert caught.value.id == "unsupported"


@pytest.mark.parametrize("family", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_corrections_of_the_router_are_not_rounded(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family)
    model = load_model(EngineConfig.from_args({"model": str(folder), "dtype": "bfloat16", "device": "cpu"}))[0]
    routing = model.blocks[1].mlp.routing.routing  # type: ignore[attr-defined]
    assert isinstance(routing, SigmoidRouting) and routing.correction is not None
    stored = Checkpoint.open(folder).tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    assert torch.equal(routing.correction, stored.float())
    assert not torch.equal(stored, stored.bfloat16().float()), "nothing to round"


@pytest.mark.parametrize("family", ["V2", "V3"])
def test_what_an_int8_cache_costs_is_the_rounding_of_latents(family, tiny_model, monkeypatch):
    """0.9 to 1.6 nats of these random models: transformers' with latents and shared keys rounded, likewise."""
    module = importlib.import_module(
        f"transformers.models.deepseek_{family.lower()}.modeling_deepseek_{family.lower()}"
    )
    attention = getattr(module, f"Deepseek{family}Attention")
    expand = attention.expand_kv

    def rounded(self: Any, latents: Tensor, keys: Tensor) -> Any:
        joined = torch.cat([latents, keys], -1)
        scale = joined.abs().amax(-1, keepdim=True) / 127
        return expand(self, *((joined / scale).round() * scale).split([latents.shape[-1], keys.shape[-1]], -1))

    folder = tiny_model(f"Deepseek{family}ForCausalLM")
    found, exact = ours(folder, kv_cache_dtype="int8"), of_transformers(folder)
    monkeypatch.setattr(attention, "expand_kv", rounded)
    # A value between two codes may be rounded either way.
    differences = zip(found, of_transformers(folder), strict=True)
    assert torch.cat([(a - b).abs().amax(-1) for a, b in differences]).median() < TOLERANCE
    assert largest_difference(found, exact) > 0.1
