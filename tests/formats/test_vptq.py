"""VPTQ: what its config and tensors may not say; test_interop.py computes a model that VPTQ's own code wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats import quantization_config, vptq
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.spec import QuantSpec

FIXTURE = Path(__file__).parent / "fixtures" / "vptq"
#: A linear with outliers, residuals, padding, an order and norms.
NAME = "model.layers.0.self_attn.o_proj"


def opened() -> tuple[QuantSpec, dict[str, Tensor]]:
    checkpoint = Checkpoint.open(FIXTURE)
    tensors = {suffix: checkpoint.tensor(name) for suffix, name in checkpoint.linear_tensors(NAME).items()}
    return checkpoint.linear_spec(NAME), tensors


def test_each_weight_is_a_sum_of_vectors_from_code_books() -> None:
    """Written out for one column of an outlier and of others, bit by bit."""
    spec, tensors = opened()
    weight = vptq.read(tensors, spec, NAME)
    layer = spec.notes["stored"]
    assert (layer.n, layer.k, layer.outliers, layer.outlier_width, layer.width) == (64, 64, 8, 4, 6)
    stream = [int(word) & 0xFFFFFFFF for word in tensors["indices"][0, 3]]
    bits = [stream[place // 32] >> (place % 32) & 1 for place in range(32 * len(stream))]
    for column in (0, 7, 8, 20, 63):
        k = int(tensors["perm"][column])
        for n in range(18, 24):  # the vector 3 of 6 outputs
            if column < 8:
                index = int(tensors["outlier_indices"][0, n // 4, column])
                value = tensors["outlier_centroids.weight"][0, 4 * index + n % 4]
            else:
                first = (column - 8) * 11
                index = sum(bits[first + place] << place for place in range(7))
                residual = sum(bits[first + 7 + place] << place for place in range(4))
                value = tensors["centroids.weight"][0, 6 * index + n % 6]
                value = value + tensors["res_centroids.weight"][0, 6 * residual + n % 6]
            assert weight.values[n, k] == value * tensors["weight_scale"][k] + tensors["weight_bias"][k]


def test_the_shapes_of_the_config_are_those_of_the_files() -> None:
    checkpoint = Checkpoint.open(FIXTURE)
    assert len(checkpoint.quantized_linears()) == 7
    for name in checkpoint.quantized_linears():
        spec, headers = checkpoint.linear_spec(name), checkpoint.linear_headers(name)
        dimensions, _ = checkpoint.dimensions(name)
        shapes = vptq.packed_shapes(headers, spec, dimensions.n, dimensions.k)
        assert shapes == {suffix: tuple(info.shape) for suffix, info in headers.items()}
        assert isinstance(checkpoint.read_linear(name), DecodedWeight)


@pytest.mark.parametrize(
    "changes",
    [
        {"indices": torch.zeros(1, 11, 19, dtype=torch.int32)},
        {"indices": torch.zeros(1, 11, 20)},
        {"indices": torch.zeros(2, 11, 20, dtype=torch.int32)},
        {"centroids.weight": torch.zeros(1, 767)},
        {"centroids.weight": torch.full((1, 768), torch.nan)},
        {"centroids.weight": None},
        {"res_centroids.weight": None},
        {"res_centroids.weight": torch.zeros(1, 6 << 10)},
        {"outlier_indices": torch.full((1, 16, 8), 32, dtype=torch.int16)},
        {"outlier_indices": torch.full((1, 16, 8), -1, dtype=torch.int16)},
        {"outlier_centroids.weight": None},
        {"perm": torch.zeros(64, dtype=torch.int16)},
        {"perm": torch.arange(1, 65, dtype=torch.int16)},
        {"perm": torch.arange(-1, 63)},
        {"perm": None},
        {"weight_bias": torch.zeros(63)},
        {"weight_scale": torch.full((64,), torch.inf)},
        {"bias": torch.zeros(63)},
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_tensors_are_refused(changes: dict[str, Tensor | None]) -> None:
    spec, tensors = opened()
    changed = {suffix: tensor for suffix, tensor in {**tensors, **changes}.items() if tensor is not None}
    with pytest.raises(AiakqError) as caught:
        vptq.read(changed, spec, NAME)
    assert caught.value.id in ("tensor_mismatch", "not_finite") and NAME in str(caught.value)


def test_indices_without_sign_are_read() -> None:
    """Newer files have 16 bits without sign, older ones an order of 64 bits."""
    spec, tensors = opened()
    other = {**tensors, "perm": tensors["perm"].to(torch.int64)}
    other["outlier_indices"] = tensors["outlier_indices"].view(torch.uint16)
    assert torch.equal(vptq.read(other, spec).values, vptq.read(tensors, spec).values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_indice_packed": False}, "not packed"),
        ({"indices_as_float": True}, "indices_as_float"),
        ({"vector_quant_dim": "in"}, "along 'in'"),
        ({"num_centroids": [32, 100]}, "no power of two"),
        ({"num_centroids": [32, 2**20]}, "code books of"),
        ({"num_res_centroids": [8, 16]}, "residual vectors for them"),
        ({"group_size": 57}, "of 64 inputs"),
        ({"group_num": 2**31 - 1}, "of 64 inputs"),
        ({"out_features": 0}, "of 64 inputs"),
        ({"vector_lens": 8}, "not two numbers"),
        ({"vector_lens": [4, 2**40]}, "vector_lens is"),
        ({"rotation": 1}, "'rotation' (1)"),
    ],
    ids=str,
)
def test_what_a_config_says_otherwise_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    entry = Checkpoint.open(FIXTURE).config["quantization_config"]["config_for_layers"][NAME]
    with pytest.raises(AiakqError) as caught:
        quantization_config.read({"quant_method": "vptq", "config_for_layers": {NAME: {**entry, **changes}}})
    assert caught.value.id == "format_unsupported" and said in str(caught.value)


def test_layers_may_share_an_entry_and_none_may_be_without_one() -> None:
    config = Checkpoint.open(FIXTURE).config["quantization_config"]
    entry = config["config_for_layers"][NAME]
    shared = quantization_config.read({"quant_method": "vptq", "shared_layer_config": {"o_proj": entry}})
    assert vptq.described({}, shared, NAME).notes["stored"].n == 64
    with pytest.raises(AiakqError, match="says nothing about model.layers.0.mlp.up_proj"):
        vptq.described({}, shared, "model.layers.0.mlp.up_proj")
    with pytest.raises(AiakqError, match="no config_for_layers"):
        quantization_config.read({"quant_method": "vptq"})


def test_the_fixture_has_residuals_outliers_and_padding() -> None:
    names = {name.rpartition("proj.")[2] for name in load_file(FIXTURE / "model.safetensors")}
    assert {"res_centroids.weight", "outlier_indices", "perm", "weight_bias"} <= names
