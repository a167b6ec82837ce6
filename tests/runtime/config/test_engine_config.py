"""EngineConfig: its parts carry the arguments under their own names."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.arguments.argument import rows_of
from aiakq.arguments.engine import CacheArguments, LoadArguments, SchedulerArguments
from aiakq.runtime.config.engine import EngineConfig

#: Values other than the defaults, for every argument of these parts.
GIVEN: dict[str, tuple[type, dict[str, Any]]] = {
    "load": (
        LoadArguments,
        {
            "load_format": "dummy",
            "config_format": "hf",
            "model_loader_extra_config": {"enable_multithread_load": True},
            "ignore_patterns": ("consolidated*",),
            "trust_remote_code": True,
            "model_impl": "aiakq",
            "dequantize": "never",
            "cpu_math": "exact",
            "seed": 3,
        },
    ),
    "cache": (
        CacheArguments,
        {
            "block_size": 8,
            "gpu_memory_utilization": 0.5,
            "kv_cache_dtype": "int8",
            "kv_cache_memory_bytes": 2**20,
            "num_gpu_blocks_override": 30,
            "enable_prefix_caching": False,
        },
    ),
    "scheduler": (
        SchedulerArguments,
        {
            "max_num_seqs": 3,
            "max_num_batched_tokens": 33,
            "enable_chunked_prefill": False,
            "async_scheduling": True,
            "max_num_partial_prefills": 3,
            "max_long_partial_prefills": 2,
            "long_prefill_token_threshold": 5,
            "scheduling_policy": "priority",
            "scheduler_delay_factor": 0.5,
        },
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_every_argument_of_a_part_is_found_there_under_its_name(name, tiny_model):
    part, given = GIVEN[name]
    assert set(given) == {row.name for row in rows_of(part)}
    for argument, value in given.items():
        also = {"max_num_partial_prefills": 2} if argument == "max_long_partial_prefills" else {}
        context = {"max_model_len": 32} if argument == "enable_chunked_prefill" else {}
        arguments = {"model": str(tiny_model("LlamaForCausalLM")), argument: value, **also, **context}
        assert getattr(getattr(EngineConfig.from_args(arguments), name), argument) == value


def test_a_long_prompt_is_a_share_of_the_context_where_several_prompts_run_together(tiny_model):
    def scheduler(**given: Any):
        return EngineConfig.from_args({"model": str(tiny_model("LlamaForCausalLM")), **given}).scheduler

    assert scheduler().long_prompt_tokens == 0
    assert scheduler(long_prefill_token_threshold=7).long_prompt_tokens == 7
    assert scheduler(max_num_partial_prefills=2).long_prompt_tokens == int(512 * 0.04)
    assert scheduler(max_num_partial_prefills=2).long_prefill_token_threshold == 0
