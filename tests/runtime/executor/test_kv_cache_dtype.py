"""Keys and values stored in fewer bits: --kv-cache-dtype."""

from __future__ import annotations

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.config import device as device_config
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.kv_cache import kv_bytes_per_page

#: How far log-probabilities may be off, and how the cache's dtype is called.
DTYPES = {
    "float16": (0.05, "float16"),
    "bfloat16": (0.05, "bfloat16"),
    "int8": (0.15, "int8"),
    "fp8": (0.3, "float8_e4m3fn"),
    "fp8_e5m2": (0.6, "float8_e5m2"),
}


@pytest.mark.parametrize("native_attention", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_may_be_stored_in_fewer_bits(dtype, native_attention, tiny_model, monkeypatch):
    """Results are close to float32 and independent of the batch, and pages have the expected size."""
    if not native_attention:
        monkeypatch.setenv("AIAKQ_KERNELS", "attention=torch")
    whole = LLM(str(tiny_model("Qwen3ForCausalLM")), dtype="float32", max_model_len=64)
    llm = LLM(str(tiny_model("Qwen3ForCausalLM")), dtype="float32", max_model_len=64, kv_cache_dtype=dtype)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    prompts = [{"prompt_token_ids": list(range(start, start + 30))} for start in range(3, 40, 5)]
    ours = [answer.outputs[0].logprobs[0] for answer in llm.generate(prompts, params, use_tqdm=False)]
    exact = [answer.outputs[0].logprobs[0] for answer in whole.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([one], params, use_tqdm=False)[0].outputs[0].logprobs[0] for one in prompts]
    assert ours == alone
    gaps = [
        abs(exact_row[token].logprob - row[token].logprob)
        for row, exact_row in zip(ours, exact, strict=True)
        for token in row.keys() & exact_row.keys()
    ]
    most, name = DTYPES[dtype]
    assert 0 < max(gaps) < most
    of_page = [sum(t[0].numel() * t.element_size() for t in cache) for cache in llm.engine.executor.runner.caches]
    model = llm.engine.executor.runner.model
    assert sum(of_page) == kv_bytes_per_page(model, llm.config.cache)
    assert llm.engine.facts["KV pages"].endswith(f", {name}")


def test_a_gpu_without_eight_bit_floats_says_what_to_take(monkeypatch, tiny_model):
    folder = str(tiny_model("LlamaForCausalLM"))
    monkeypatch.setattr(device_config, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    for name in ("fp8", "fp8_e5m2"):
        with pytest.raises(AiakqError, match="int8 takes the same"):
            EngineConfig.from_args({"model": folder, "kv_cache_dtype": name})
    assert EngineConfig.from_args({"model": folder, "kv_cache_dtype": "int8"}).cache.dtype == torch.int8


def test_an_unknown_dtype_is_refused_with_those_that_are_known(tiny_model):
    with pytest.raises(AiakqError, match="int8"):
        LLM(str(tiny_model("LlamaForCausalLM")), kv_cache_dtype="int4")
