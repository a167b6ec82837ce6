"""Any number of ranks gives the same tokens and log-probabilities as one process, for every format and family."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoint_copies import with_signed_scales

from aiakq import LLM, SamplingParams
from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.conversion import convert_checkpoint
from aiakq.quantizers import METHODS as ALL_METHODS
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.models import ARCHITECTURES
from aiakq.spec import QuantSpec

#: Methods whose output is a folder; gguf writes a file.
METHODS = sorted(set(ALL_METHODS) - {"gguf"})

#: One for each way of computing; ``AIAKQ_EVERY_ARCHITECTURE=1`` takes all.
FAMILIES = (
    "LlamaForCausalLM", "OPTForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "Qwen2MoeForCausalLM",
    "BloomForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM",
    "NemotronHForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM", "GPT2LMHeadModel",
    "Gemma3nForCausalLM",
)  # fmt: skip
#: Those whose later layers read what the first stage has.
ONE_STAGE = {"Zamba2ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM"}
#: Ranks of a stage, and stages.
SHAPES = {"float32": ((2, 1), (3, 1), (4, 1), (1, 2), (2, 2)), "bfloat16": ((2, 1), (1, 3))}
if os.environ.get("AIAKQ_EVERY_ARCHITECTURE"):
    FAMILIES = tuple(ARCHITECTURES)
    SHAPES = dict.fromkeys(SHAPES, tuple((size, stages) for size in (1, 2, 3, 4) for stages in (1, 2))[1:])


def answers(folder: Path | str, **arguments: Any) -> list[tuple[list[int], Any]]:
    """Results of prompts of several lengths with a common prefix, sampled and greedy, in a small KV cache."""
    llm = LLM(
        str(folder), max_model_len=128, max_num_seqs=6, num_gpu_blocks_override=60, block_size=4,
        **{"max_num_batched_tokens": 40, **arguments},
    )  # fmt: skip
    draw = random.Random(3)
    shared = [draw.randrange(5, 250) for _ in range(24)]
    prompts = [
        {
            "prompt_token_ids": [
                *(shared if number % 2 else []),
                *(draw.randrange(5, 250) for _ in range(1 + 7 * number)),
            ]
        }
        for number in range(8)
    ]
    params = [
        SamplingParams(
            temperature=number % 2, seed=number, max_tokens=12, logprobs=3, prompt_logprobs=number % 3 or None
        )
        for number in range(8)
    ]
    results = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check()
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_every_format_gives_the_same_on_any_number_of_ranks_and_stages(method, dtype, example_model, tmp_path):
    folder = tmp_path / method
    grouped: dict[str, Any] = {"act_order": "group"} if method == "gptq" else {}
    quantize_checkpoint(
        QuantizeOptions(
            str(example_model), str(folder), method, dtype="bf16", samples=8, seqlen=64, evaluate=False, **grouped
        )
    )
    alone = answers(folder, dtype=dtype)
    for size, stages in SHAPES[dtype]:
        found = answers(folder, dtype=dtype, tensor_parallel_size=size, pipeline_parallel_size=stages)
        assert found == alone, (size, stages)


@pytest.mark.parametrize("spec", [QuantSpec("gptq", "gptq", 4, 32), QuantSpec("gptq", "compressed-tensors", 3, 64)])
def test_scales_of_either_sign_give_the_same_on_two_ranks(spec, tiny_model, tmp_path):
    """Groups of 64 straddle the shards of a down projection."""
    folder = with_signed_scales(tiny_model("LlamaForCausalLM", intermediate_size=192), tmp_path / "signed", spec)
    assert answers(folder, dtype="float32", tensor_parallel_size=2) == answers(folder, dtype="float32")


@pytest.mark.parametrize(("kind", "dtype", "size"), [("q4_0", "float32", 3), ("q4_k_m", "bfloat16", 2)])
def test_a_quantized_embedding_that_is_the_output_layer_too_gives_the_same(kind, dtype, size, example_model, tmp_path):
    """Every rank looks up and computes with its rows of the blocks; those of three are unequal."""
    file = str(tmp_path / f"{kind}.gguf")
    convert_checkpoint(ConvertArguments(input=str(example_model), output=file, to="gguf", gguf_type=kind, lossy=True))
    assert answers(file, dtype=dtype, tensor_parallel_size=size) == answers(file, dtype=dtype)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_gives_the_same_on_two_ranks_and_two_stages(architecture, tiny_model):
    folder = tiny_model(architecture)
    alone = answers(folder, dtype="float32")
    assert answers(folder, dtype="float32", tensor_parallel_size=2) == alone
    if architecture not in ONE_STAGE:
        assert answers(folder, dtype="float32", pipeline_parallel_size=2) == alone


@pytest.mark.parametrize(
    "options", [{"enforce_eager": True}, {"kv_cache_dtype": "int8"}, {"enable_chunked_prefill": False}]
)
def test_stages_give_the_same_with_other_options(options, example_model):
    arguments = {"dtype": "float32", "max_num_batched_tokens": 128, **options}
    assert answers(example_model, pipeline_parallel_size=3, **arguments) == answers(example_model, **arguments)


def test_steps_submitted_ahead_give_the_same(tiny_model):
    folder = tiny_model("LlamaForCausalLM")
    ahead = {"dtype": "float32", "async_scheduling": True}
    assert answers(folder, tensor_parallel_size=2, **ahead) == answers(folder, **ahead)


def test_groups_across_shard_boundaries_and_heads_that_do_not_divide(tiny_model, tmp_path):
    """Half of 640 inputs is no multiple of the group size 128, and six heads do not divide by four ranks."""
    sizes = {"hidden_size": 384, "intermediate_size": 640, "num_attention_heads": 6, "num_key_value_heads": 2}
    source = tiny_model("LlamaForCausalLM", **sizes)
    options = {"group_size": 128, "samples": 4, "seqlen": 32, "evaluate": False}
    quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "out"), "gptq", **options))
    alone = answers(tmp_path / "out", dtype="float32")
    for size in (2, 4):
        assert answers(tmp_path / "out", dtype="float32", tensor_parallel_size=size) == alone


def test_odd_vocabularies_and_a_single_kv_head(tiny_model):
    folder = tiny_model("LlamaForCausalLM", vocab_size=331, num_key_value_heads=1, tie_word_embeddings=True)
    alone = answers(folder, dtype="float32")
    for size in (2, 3):
        assert answers(folder, dtype="float32", tensor_parallel_size=size) == alone


def test_dummy_weights_equal_those_of_one_process(tiny_model):
    folder = tiny_model("LlamaForCausalLM")
    dummy = {"dtype": "float32", "load_format": "dummy"}
    alone = answers(folder, **dummy)
    assert answers(folder, tensor_parallel_size=2, **dummy) == alone
    assert answers(folder, pipeline_parallel_size=2, **dummy) == alone


def test_the_start_up_table_names_the_ranks(tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), tensor_parallel_size=2, max_model_len=64)
    assert llm.engine.facts["ranks"].startswith("2 processes share each layer")
