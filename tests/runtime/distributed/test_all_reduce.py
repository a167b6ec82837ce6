"""Row-parallel layers with an all-reduce, over torch.distributed: close to one process, with few collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint

FAST = {"tensor_parallel_math": "fast"}
EXACT = {"tensor_parallel_math": "exact"}
#: Operations of a step of two layers besides those of embedding and head: after attention and after the MLP.
TWICE = 4
#: Family -> operations of a step on two ranks, besides those of the embedding and the head.
FAMILIES = {
    "LlamaForCausalLM": TWICE,
    "Qwen3ForCausalLM": TWICE,
    "GPT2LMHeadModel": TWICE + 1,  # a position embedding
    "Gemma2ForCausalLM": 2 * TWICE,  # four layers
    "BloomForCausalLM": TWICE,
    "GptOssForCausalLM": TWICE,  # experts instead of an MLP
    "Qwen2MoeForCausalLM": 8,  # three layers, two of which have a shared expert beside the others
    "FalconForCausalLM": TWICE,
}


def close(found: Any, wanted: Any, tolerance: float) -> None:
    """Relative RMS error of the logits of every rank."""
    for rank in found:
        for ours, theirs in zip(rank.logits, wanted.logits, strict=True):
            assert ours.shape == theirs.shape
            error = (ours - theirs).norm() / theirs.norm()
            assert error < tolerance, error


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_layer_of_most_families_needs_two_collectives(architecture, tiny_model, steps):
    folder = tiny_model(architecture)
    [alone] = steps(folder, 1)
    for size in (2, 4):
        found = steps(folder, size, **FAST)
        close(found, alone, 2e-5)
        # Embedding and head need one collective each.
        assert found[0].num_operations == [FAMILIES[architecture] + 2] * 2, found[0].facts
        assert all(torch.equal(rank.logits[0], found[0].logits[0]) for rank in found)
        assert found[0].facts["tensor parallel"].count("gathered") == 1, "only the head"


@pytest.mark.parametrize(
    "architecture, said",
    [
        ("Olmo2ForCausalLM", "attention, its projections gathered; "),  # norms read all heads
        ("DeepseekV3ForCausalLM", "attention, its projections and its output gathered; "),
        ("Qwen3NextForCausalLM", "1 x attention; "),  # with a gate; recurrent layers use all-gather
        ("Mamba2ForCausalLM", "linear layers gathered"),
        ("Lfm2ForCausalLM", "linear layers gathered"),
        ("Lfm3ForCausalLM", "2 x attention; "),  # with a gate per head
    ],
)
def test_layers_that_cannot_be_row_parallel_use_all_gather_and_are_named(architecture, said, tiny_model, steps):
    folder = tiny_model(architecture)
    [alone] = steps(folder, 1)
    found = steps(folder, 2, **FAST)
    close(found, alone, 2e-5)
    assert said in found[1].facts["tensor parallel"] + "; "


def test_more_ranks_than_heads_use_all_gather(tiny_model, steps):
    folder = tiny_model("LlamaForCausalLM")
    [alone] = steps(folder, 1)
    found = steps(folder, 5, **FAST)
    close(found, alone, 2e-5)
    assert (
        "2 x attention, its projections and its output (there are fewer heads than ranks) gathered"
        in found[0].facts["tensor parallel"]
    )


@pytest.mark.parametrize("size", [2, 3])
def test_embedding_and_head_share_one_shard_of_an_odd_vocabulary(size, tiny_model, steps):
    folder = tiny_model("LlamaForCausalLM", vocab_size=331, num_key_value_heads=1, tie_word_embeddings=True)
    [alone] = steps(folder, 1)
    found = steps(folder, size, **FAST)
    close(found, alone, 2e-5)
    assert found[0].num_operations == [TWICE + 2] * 2


#: Method -> its settings, and how far logits may be off: those of 8-bit activations are rounded for each rank's part.
FORMATS: dict[str, tuple[dict[str, Any], float]] = {
    "weight_only_int8": ({}, 2e-5),
    "awq": ({"group_size": 64}, 2e-5),
    "gptq": ({"group_size": 64, "act_order": "group"}, 2e-5),
    "smooth_quant": ({}, 0.05),
}


@pytest.fixture(scope="session")
def quantized(tmp_path_factory, tiny_model):
    """``quantized(method, **options)`` -> folder of a Llama of 8 heads."""
    made: dict[str, Any] = {}

    def make(method: str, **options: Any) -> Any:
        key = f"{method} {options}"
        if key not in made:
            model = tiny_model("LlamaForCausalLM", num_attention_heads=8, head_dim=32, intermediate_size=320)
            out = made[key] = tmp_path_factory.mktemp(method) / "out"
            ids = out.parent / "ids.txt"
            ids.write_text("\n".join(" ".join(str(3 + (7 * row + at) % 300) for at in range(32)) for row in range(8)))
            quantize_checkpoint(
                QuantizeOptions(str(model), str(out), method, token_ids=ids, seqlen=32, evaluate=False, **options)
            )
        return made[key]

    return make


@pytest.mark.parametrize("method", sorted(FORMATS))
def test_every_format_is_sharded_along_its_inputs(method, quantized, steps):
    settings, tolerance = FORMATS[method]
    folder = quantized(method, **settings)
    [alone] = steps(folder, 1, cpu_math="exact")
    for size in (2, 4):
        found = steps(folder, size, cpu_math="exact", **FAST)
        close(found, alone, tolerance)
        # Shards of 320 inputs are whole groups of 64 on two and on five ranks, but not on four.
        said = found[0].facts["tensor parallel"]
        assert "2 x MLP" in said and "MLP gathered" not in said


@pytest.mark.parametrize("method", sorted(FORMATS))
def test_column_parallel_shards_match_one_process_bit_for_bit(method, quantized, steps):
    folder = quantized(method, **FORMATS[method][0])
    [alone] = steps(folder, 1)
    for rank in steps(folder, 3, **EXACT):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rank.logits, alone.logits, strict=True))
