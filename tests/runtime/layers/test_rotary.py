"""Rotary tables against transformers, for every scaling and for heads that are rotated in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from aiakq.errors import AiakqError
from aiakq.kernels.ops.rotary import apply_rotary, rotary_factors
from aiakq.runtime.layers.rotary import new_grid_rotary, rotary_tables

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "large base": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn with its own betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn with its own magnitude": {**YARN, "attention_factor": 0.7},
    "yarn with two scales": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn not truncated": {**YARN, "truncate": False},
    "linear in part": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "yarn in part": {**YARN, "partial_rotary_factor": 0.25},
}


def hf_config(rope: dict[str, Any], head_dim: int, max_position: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )


def hf_factors(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, T, R] float32 of transformers."""
    return LlamaRotaryEmbedding(config)(torch.empty(1), positions.unsqueeze(0))


@pytest.mark.parametrize("head_dim", [128, 48, 6])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_tables_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    length = 257
    tables = rotary_tables({"rope_theta": 10000.0, **rope}, head_dim, length, CPU)
    cosines, sines = hf_factors(hf_config(rope, head_dim, length), torch.arange(length))
    assert tables.cosines.dtype == tables.sines.dtype == torch.float32
    assert tables.cosines.shape == (length, tables.rotated // 2)
    torch.testing.assert_close(tables.cosines, cosines[0, :, : tables.rotated // 2], rtol=0, atol=2e-5)
    torch.testing.assert_close(tables.sines, sines[0, :, : tables.rotated // 2], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rope", [ROPES["llama3"], ROPES["yarn"]], ids=["llama3", "yarn"])
def test_heads_are_rotated_as_by_transformers(rope: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.tensor([0, 7, 3, 200, 131])
    q, k = (torch.randn(5, heads, 40, generator=generator).to(dtype) for heads in (6, 2))
    tables = rotary_tables({"rope_theta": 10000.0, **rope}, 40, 256, CPU)
    factors = rotary_factors(tables, positions, dtype)
    cosines, sines = (each.to(dtype) for each in hf_factors(hf_config(rope, 40, 256), positions))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cosines, sines)
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for x, wanted in zip((q, k), expected, strict=True):
        found = apply_rotary(x, factors)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted[0].transpose(0, 1), rtol=0, atol=tolerance)


def test_elements_beyond_the_rotated_part_stay_as_they_are() -> None:
    tables = rotary_tables({"partial_rotary_factor": 0.25}, 48, 64, CPU)
    assert tables.rotated == 12
    x = torch.randn(9, 3, 48, generator=torch.Generator().manual_seed(2))
    found = apply_rotary(x, rotary_factors(tables, torch.arange(9) * 5, x.dtype))
    assert torch.equal(found[..., 12:], x[..., 12:])
    assert not torch.equal(found[1:, :, :12], x[1:, :, :12])
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1), msg="a rotation keeps lengths")


def test_scores_depend_on_the_distance_alone() -> None:
    tables = rotary_tables({"rope_theta": 10000.0}, 64, 512, CPU)
    q, k = (torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))

    def score(query_position: int, key_position: int) -> Tensor:
        at = [torch.tensor([position]) for position in (query_position, key_position)]
        rotated = [apply_rotary(x, rotary_factors(tables, p, x.dtype)) for x, p in zip((q, k), at, strict=True)]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(10, 3), score(500, 493), rtol=1e-3, atol=1e-3)


def test_dynamic_scaling_is_that_of_transformers_at_full_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "grows_from": 128}
    tables = rotary_tables(rope, 64, 256, CPU)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf_config(rope, 64, 128), "cpu", seq_len=256)
    torch.testing.assert_close(tables.cosines, torch.outer(torch.arange(256.0), inv_freq).cos(), rtol=0, atol=1e-4)


def test_dynamic_scaling_does_nothing_within_the_trained_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    assert torch.equal(rotary_tables(rope, 64, 128, CPU).cosines, rotary_tables({}, 64, 128, CPU).cosines)


def test_on_the_meta_device_nothing_is_computed() -> None:
    tables = rotary_tables({**YARN, "partial_rotary_factor": 0.5}, 128, 2**40, torch.device("meta"))
    assert tables.cosines.is_meta and tables.cosines.shape == tables.sines.shape == (2**40, 32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_unknown_scaling_is_refused_by_name(device: str) -> None:
    with pytest.raises(AiakqError, match="^The rotary scaling 'spiral' .* is not supported. Supported: "):
        rotary_tables({"rope_type": "spiral", "factor": 2.0}, 64, 128, torch.device(device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_missing_parameters_are_named(device: str) -> None:
    with pytest.raises(AiakqError, match="short_factor is missing in the parameters of rope_type longrope") as caught:
        rotary_tables({"rope_type": "longrope", "factor": 2.0}, 64, 128, torch.device(device))
    assert caught.value.id == "model_malformed"


@pytest.mark.parametrize("context", [64, 65, 256])
def test_longrope_is_that_of_the_longest_sequence(context: int) -> None:
    """transformers takes one set of factors up to the original length, and another for a longer text."""
    factors = {"short_factor": [1.0 + i / 40 for i in range(20)], "long_factor": [2.0 + i / 10 for i in range(20)]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    tables = rotary_tables({"rope_theta": 10000.0, **rope}, 40, 256, CPU, context)
    first = rotary_tables({"rope_theta": 10000.0, **rope}, 40, 256, CPU, context, rows=7)
    assert torch.equal(first.cosines, tables.cosines[:7]) and torch.equal(first.sines, tables.sines[:7])
    cosines, sines = hf_factors(hf_config(rope, 40, 256), torch.arange(context))
    torch.testing.assert_close(tables.cosines, cosines[0, :, :20], rtol=0, atol=2e-5)
    torch.testing.assert_close(tables.sines, sines[0, :, :20], rtol=0, atol=2e-5)


@pytest.mark.parametrize("alternate", [False, True])
def test_rows_of_three_positions_are_those_of_transformers(alternate):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
    from vision_models import config_of

    sizes = [4, 2, 2] if alternate else [2, 3, 3]
    config = config_of("qwen2_5_vl").text_config
    config.head_dim, config.rope_parameters["mrope_section"] = 16, sizes
    theirs = (Qwen3VLTextRotaryEmbedding if alternate else Qwen2_5_VLRotaryEmbedding)(config)
    positions = torch.tensor([[3, 4, 9], [0, 0, 0], [11, 2, 5], [7, 7, 7]])
    expected = theirs(torch.zeros(1, 4, 16), positions.T[:, None])

    tables = rotary_tables({"rope_type": "default", "rope_theta": 10000.0}, 16, 40, CPU, rows=30)
    text = tables.cosines[:20].clone()
    new_grid_rotary({"mrope_section": sizes}, (1, 1, 1), alternate, [tables], 20).write(positions)
    for table, factors in zip((tables.cosines, tables.sines), expected, strict=True):
        torch.testing.assert_close(table[20:24], factors[0, :, :8], rtol=0, atol=2e-7)
    torch.testing.assert_close(tables.cosines[23], tables.cosines[7], rtol=0, atol=0)
    assert torch.equal(tables.cosines[:20], text)


@pytest.mark.parametrize(
    "rope",
    [{"mrope_section": sizes} for sizes in ([2, 3], [2, 3, 4], "abc", [2, 3, 3.0], [9, -1, 0], None)]
    + [{"mrope_section": [2, 3, 3], "mrope_interleaved": True}],
)
def test_frequencies_that_cannot_be_distributed_are_refused(rope):
    tables = rotary_tables({"rope_type": "default"}, 16, 40, CPU)
    with pytest.raises(AiakqError, match="mrope_section"):
        new_grid_rotary(rope, (2, 3, 3), False, [tables], 20)
