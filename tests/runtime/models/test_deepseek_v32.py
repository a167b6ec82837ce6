"""DeepSeek-V3.2 and GLM-5: what is refused by name, the cache of the index, and the bits of mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops import Ops, PlannedOps
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint
from aiakq.runtime.layers.indexed_attention import IndexedCache, IndexedLatentAttention
from aiakq.runtime.loader.required import RequiredWeights, build_without_weights, required_tensors
from aiakq.runtime.models.deepseek_v32 import build
from aiakq.runtime.models.stage import Stage
from aiakq.runtime.offline_prompts import PromptDict

DEEPSEEK, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        (DEEPSEEK, {"layer_types": ["indexed_attention", "full_attention"]}, "'full_attention'"),
        (DEEPSEEK, {"layer_types": ["indexed_attention", "sliding_attention"]}, "no such layers"),
        (DEEPSEEK, {"index_head_dim": 8}, "at least qk_rope_head_dim, 16"),
        (DEEPSEEK, {"q_lora_rank": None}, "q_lora_rank"),
        (DEEPSEEK, {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        (DEEPSEEK, {"indexer_types": ["full", "shared"]}, "indexer_types"),
        (DEEPSEEK, {"mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types"),
        (DEEPSEEK, {"mlp_bias": True}, "mlp_bias"),
        (DEEPSEEK, {"index_topk": 0}, "index_topk"),
        (
            DEEPSEEK,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ("AXK2ForCausalLM", {"n_group": 2, "topk_group": 1}, "n_group is 2"),
        ("HYV4ForCausalLM", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0"),
        ("HYV4ForCausalLM", {"rope_interleave": True}, "rope_interleave"),
        (GLM, {"indexer_types": ["full", "shared"]}, "3 times one of full, shared"),
        (GLM, {"indexer_types": ["shared", "full", "full"]}, "its first layer has no index of its own"),
        (GLM, {"indexer_types": None, "index_topk_pattern": "FSX"}, "index_topk_pattern"),
        (GLM, {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(
    architecture: str, changes: dict[str, Any], reason: str, tiny_model: Callable[..., Path]
) -> None:
    checkpoint = Checkpoint.open(tiny_model(architecture))
    with pytest.raises(AiakqError, match=reason):
        required_tensors(ModelConfig.from_hf({**checkpoint.config, **changes}), checkpoint)


def test_a_pattern_says_which_layers_share(tiny_model: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(tiny_model(GLM))
    config = {**checkpoint.config, "indexer_types": None, "index_topk_pattern": "FFS"}
    expected = required_tensors(ModelConfig.from_hf(checkpoint.config), checkpoint)
    assert required_tensors(ModelConfig.from_hf(config), checkpoint) == expected


def test_the_keys_of_published_files_are_known(tiny_model: Callable[..., Path]) -> None:
    published: dict[str, dict[str, Any]] = {
        DEEPSEEK: {"ep_size": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        GLM: {
            "head_dim": 192, "qk_head_dim": 256, "index_share_for_mtp_iteration": True, "index_topk_pattern": None,
            "index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_rope_interleave": True, "rope_interleave": True,
            "moe_router_dtype": "float32", "num_nextn_predict_layers": 1, "ep_size": 1, "moe_layer_freq": 1,
        },
    }  # fmt: skip
    for architecture, keys in published.items():
        checkpoint = Checkpoint.open(tiny_model(architecture))
        expected = required_tensors(ModelConfig.from_hf(checkpoint.config), checkpoint)
        assert required_tensors(ModelConfig.from_hf({**checkpoint.config, **keys}), checkpoint) == expected


def test_gpus_are_refused(tiny_model: Callable[..., Path]) -> None:
    ops = Ops(torch.device("cpu"), torch.float32)
    ops.device_type = "cuda"
    checkpoint = Checkpoint.open(tiny_model(DEEPSEEK))
    with pytest.raises(AiakqError, match="on a GPU is not supported.*--device cpu"):
        build_without_weights(ModelConfig.from_hf(checkpoint.config), checkpoint, PlannedOps(ops))


def test_a_stage_that_begins_with_a_shared_index_is_refused(tiny_model: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(tiny_model(GLM))
    config = ModelConfig.from_hf(checkpoint.config)
    for first in (0, 1):
        build(config, RequiredWeights(checkpoint, 1000, Stage(first, 3, 3)))
    with pytest.raises(AiakqError, match="begins with layer 2, which shares.*-pp"):
        build(config, RequiredWeights(checkpoint, 1000, Stage(2, 3, 3)))


def test_its_layer_for_further_tokens_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(AiakqError, match="multi-token prediction for a model whose attention selects positions"):
        LLM(str(tiny_model(DEEPSEEK)), dtype="float32", max_model_len=64, speculative_config={"method": "mtp"})


def test_the_cache_has_a_key_for_each_token_in_layers_with_an_index(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(GLM)
    found = inspect_checkpoint(str(folder), device="cpu", dtype="bfloat16")
    assert found.kv_bytes_per_token == (3 * (32 + 16) + 2 * 32) * 2
    arguments = {"model": str(folder), "dtype": "bfloat16", "device": "cpu", "kv_cache_dtype": "int8"}
    model = load_model(EngineConfig.from_args(arguments))[0]
    caches = model.new_caches(5, 16)
    for cache, indexed in zip(caches, (True, True, False), strict=True):
        assert isinstance(cache, IndexedCache)
        assert (cache.keys is not None) == indexed
        if cache.keys is not None:
            assert cache.keys.dtype == torch.bfloat16 and cache.keys.shape == (5, 16, 32)
        for pages, tokens in zip(cache.latents, cache.tokens, strict=True):
            assert len(tokens) == 5 * 16 and tokens.data_ptr() == pages.data_ptr()


def test_weights_per_index_head_stay_float32(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(DEEPSEEK)
    model = load_model(EngineConfig.from_args({"model": str(folder), "dtype": "bfloat16", "device": "cpu"}))[0]
    attention = model.blocks[0].attention  # type: ignore[attr-defined]
    assert isinstance(attention, IndexedLatentAttention) and attention.indexer is not None
    stored = Checkpoint.open(folder).tensor("model.layers.0.self_attn.indexer.weights_proj.weight").float()
    assert not torch.equal(stored, stored.bfloat16().float()), "nothing to round"
    x = torch.randn(4, 128)
    torch.testing.assert_close(attention.indexer.weights(x), x @ stored.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_the_bits_of_a_request_do_not_depend_on_others(cache: str, tiny_model: Callable[..., Path]) -> None:
    """Also where scores are equal: with one index head, many are 0."""
    folder = tiny_model(GLM, index_n_heads=1)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 320, (length,), generator=draw).tolist() for length in (5, 8, 9, 33, 70)]
    prompts += [[*prompts[4][:48], 7, 8], prompts[3][:20]]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True)

    def run(together: bool, **arguments: Any) -> list[Any]:
        llm = LLM(str(folder), dtype="bfloat16", max_model_len=96, kv_cache_dtype=cache, **arguments)
        inputs: list[PromptDict] = [{"prompt_token_ids": prompt} for prompt in prompts]
        if together:
            answers = llm.generate(inputs, params, use_tqdm=False)
        else:
            answers = [llm.generate([each], params, use_tqdm=False)[0] for each in inputs]
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in answers]

    alone = run(False, enable_prefix_caching=False)
    assert run(True, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, num_gpu_blocks_override=60) == alone
    assert run(True, block_size=16) == alone
