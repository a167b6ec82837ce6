"""Settings of a GGUF file: types are checked, floats are those of config.json, and unknown keys are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.gguf_model import config_of, tensor_names
from aiakq.formats.gguf_model.keys import Metadata, shortest

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (300, 64), "output.weight": (300, 64)}


def config(changes: dict[str, Any], shapes: dict[str, tuple[int, ...]] = SHAPES) -> Any:
    values = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    return config_of(Metadata(values, "x.gguf"), shapes, lambda name: torch.ones(0))


def test_floats_are_the_shortest_with_their_float32():
    assert shortest(9.999999747378752e-06) == 1e-05 and shortest(0.1) == 0.1 and shortest(1e300) == 1e300
    assert config({})["rms_norm_eps"] == 1e-05


def test_the_embedding_is_the_head_without_one():
    assert config({})["tie_word_embeddings"] is False
    assert config({}, {"token_embd.weight": (300, 64)})["tie_word_embeddings"] is True


def test_the_same_value_for_each_layer_is_one_value():
    assert config({"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(AiakqError, match=r"head_count_kv differs from layer to layer"):
        config({"llama.attention.head_count_kv": [2, 4]})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.of_tomorrow": 3}, "llama.of_tomorrow"),
        ({"clip.vision": True}, "clip.vision"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_gating_func": 2}, "expert_gating_func"),
        ({"general.type": "adapter"}, "adapter"),
        ({"general.architecture": "of-tomorrow"}, "of-tomorrow"),
        ({"llama.attention.causal": False}, "llama.attention.causal"),
        ({"llama.rope.scaling.type": "of-tomorrow"}, "of-tomorrow"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.attention.value_length": 8}, "value_length"),
    ],
)
def test_what_may_change_results_is_refused_by_name(changes, named):
    with pytest.raises(AiakqError) as refused:
        config(changes)
    assert refused.value.id == "gguf_unsupported" and named in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.block_count": "2"}, "llama.block_count"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": True}, "llama.block_count"),
        ({"llama.embedding_length": -1}, "llama.embedding_length"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count is 2147483647, not at most 10000"),
        ({"llama.attention.head_count": 65}, "llama.attention.head_count is 65, not at most 64"),
        ({"llama.attention.head_count": [4, "4"]}, "llama.attention.head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"llama.rope.dimension_count": 999}, "llama.rope.dimension_count"),
        ({"general.architecture": 3}, "general.architecture"),
        ({"llama.rope.scaling.type": "yarn"}, "the factor of YaRN"),
    ],
)
def test_values_of_wrong_types_are_refused_by_name(changes, named):
    with pytest.raises(AiakqError) as refused:
        config(changes)
    assert refused.value.id == "model_malformed" and named in str(refused.value)


def test_keys_about_the_file_are_harmless():
    values = {"general.name": "x", "general.license": "mit", "general.file_type": 15, "quantize.imatrix.file": "y"}
    assert config({**values, "general.base_model.0.name": "z", "split.count": 0}) == config({})


def test_scaling_is_that_of_the_original():
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config(linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 128}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert config(yarn)["rope_scaling"] == expected


def llama3_factors(dim: int, base: float, factor: float) -> torch.Tensor:
    """As ``LlamaModel.generate_extra_tensors``, for 8192 positions and the factors 1 and 4."""
    found = []
    for frequency in 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)):
        length = 2 * torch.pi / frequency
        smooth = (8192 / length - 1) / 3
        found.append(1 if length < 2048 else factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found, dtype=torch.float32)


def with_factors(factors: torch.Tensor) -> Any:
    shapes = SHAPES | {"rope_freqs.weight": tuple(factors.shape)}
    return config_of(Metadata(LLAMA, "x.gguf"), shapes, lambda name: factors)


def test_factors_of_frequencies_are_recognized_as_llama_3s():
    assert with_factors(llama3_factors(16, 500000.0, 8.0))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    others = torch.linspace(1, 3, 8)
    scaling = with_factors(others)["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and torch.tensor(scaling["long_factor"]).allclose(others)
    assert "rope_scaling" not in with_factors(torch.ones(8))
    with pytest.raises(AiakqError, match=r"rope_freqs\.weight"):
        with_factors(torch.ones(9))


def test_a_tensor_of_another_family_is_refused_by_name():
    for name, named in (("blk.0.ssm_in.weight", "ssm_in"), ("of_tomorrow", "of_tomorrow")):
        with pytest.raises(AiakqError, match=named):
            tensor_names(config({}), Metadata(LLAMA, "x.gguf"), SHAPES | {name: (64, 64)})


def test_a_tensor_of_another_shape_is_refused_by_name():
    with pytest.raises(AiakqError, match=r"blk\.0\.attn_q\.weight has the shape"):
        tensor_names(config({}), Metadata(LLAMA, "x.gguf"), SHAPES | {"blk.0.attn_q.weight": (66, 64)})


def test_layers_beyond_those_of_the_metadata_are_refused_by_name():
    shapes = {**SHAPES, "blk.2.attn_norm.weight": (64,)}
    keys = Metadata(LLAMA, "x.gguf")
    with pytest.raises(AiakqError, match=r"x.gguf has the tensor 'blk.2.attn_norm.weight'"):
        tensor_names(config({}, shapes), keys, shapes)
