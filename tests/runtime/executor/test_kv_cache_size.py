"""The size of the KV cache: what it leaves for activations, and if it is given in bytes."""

from __future__ import annotations

import pytest

from aiakq import LLM
from aiakq.errors import AiakqError
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.kv_cache import memory_for_pages


def test_the_kv_cache_has_the_given_size(tiny_model):
    folder = str(tiny_model("LlamaForCausalLM"))
    common = {"max_model_len": 32, "block_size": 16, "max_num_seqs": 64}
    small, large = (
        LLM(folder, kv_cache_memory_bytes=size, **common).engine.limits.max_kv_tokens // 16 + 1
        for size in (1 << 17, 1 << 18)
    )
    assert 2 < small < large and abs(large - 2 * small) <= 1
    with pytest.raises(AiakqError, match="--kv-cache-memory-bytes is .* the free memory"):
        LLM(folder, kv_cache_memory_bytes=1 << 60, **common)


@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "MixtralForCausalLM", "Llama4ForCausalLM"])
def test_room_is_left_for_all_of_a_tokens_experts(architecture, tiny_model, monkeypatch):
    """Inputs and outputs of the experts, gate and up projections and their products exist at once."""
    config = EngineConfig.from_args({"model": str(tiny_model(architecture)), "device": "cpu", "dtype": "float16"})
    model, _ = load_model(config)
    raw = config.model.raw
    top_k, width, hidden = raw["num_experts_per_tok"], config.model.intermediate_size, config.model.hidden_size
    elements = top_k * (3 * width + 2 * hidden)
    assert model.mixture_elements() == elements
    before = memory_for_pages(config, model, 1 << 30)
    more = 16 * width
    monkeypatch.setattr(model, "mixture_elements", lambda: elements + more)
    after = memory_for_pages(config, model, 1 << 30)
    grown = max(2 * (elements + more), 16 * width) - max(2 * elements, 16 * width)
    assert before - after == config.scheduler.max_num_batched_tokens * grown > 0
