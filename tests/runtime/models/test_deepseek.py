"""DeepSeek: what is refused by name, and what stays float32 when activations are in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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
