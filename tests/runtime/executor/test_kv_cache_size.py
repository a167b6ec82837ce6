"""The size of the KV cache, if it is given in bytes."""

from __future__ import annotations

import pytest

from aiakq import LLM
from aiakq.errors import AiakqError


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
