"""Integers of compressed-tensors that no scheme of vLLM's main kernels has: 2 to 7 bits beside rounded activations,
activations with a zero point, and sparse weights. The package itself packs the weights and rounds the activations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_codes
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.kernels.ops import Ops
from aiakq.kernels.types import QWeight

INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
N, K = 48, 96

CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    **{
        f"w{bits}a16": ({"num_bits": bits, "group_size": 32}, None, f"w{8 if bits == 7 else bits}a16")
        for bits in (5, 6, 7)
    },
    **{
        f"w{bits}a16 asymmetric": (
            {"num_bits": bits, "group_size": 32, "symmetric": False},
            None,
            f"w{8 if bits == 7 else bits}a16",
        )
        for bits in (5, 6, 7)
    },
    "w4a8": ({"num_bits": 4, "group_size": 32}, INT8, "w4a8"),
    "w4a8 per channel": ({"num_bits": 4}, INT8, "w4a8"),
    "w4a8 in bytes": ({"num_bits": 4, "group_size": 32}, INT8, "w4a8"),
    "w4a8 asymmetric": ({"num_bits": 4, "group_size": 32, "symmetric": False}, INT8 | {"symmetric": False}, "w4a8"),
    "w4a8 with floats": ({"num_bits": 4, "group_size": 32}, FP8, "w4a8"),
    "w3a8": ({"num_bits": 3, "group_size": 32}, INT8, "w3a8"),
    "w7a8": ({"num_bits": 7, "group_size": 32}, INT8, "w8a8"),
    "w8a8 in groups": ({"num_bits": 8, "group_size": 32}, INT8, "w8a8"),
    "w8a8, asymmetric activations": ({"num_bits": 8}, INT8 | {"symmetric": False}, "w8a8"),
    "w8a8, asymmetric static activations": ({"num_bits": 8}, STATIC | {"symmetric": False}, "w8a8"),
    "w4a8, static activations": ({"num_bits": 4, "group_size": 32}, STATIC, "w4a8"),
}
_BYTES = {"w4a8 in bytes", "w8a8 in groups", "w8a8, asymmetric activations", "w8a8, asymmetric static activations"}


def config_of(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str) -> dict[str, Any]:
    strategy = "group" if weights.get("group_size") else "channel"
    group = {"targets": ["Linear"], "weights": {"type": "int", "strategy": strategy, **weights}}
    if inputs:
        group["input_activations"] = inputs
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def stored(
    weight: torch.Tensor, args: QuantizationArgs, in_bytes: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight [N, K] and what compressed-tensors decodes of them."""
    groups = weight.view(N, -1, args.group_size or K)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    codes = quantize(weight, scale, zero, args, dtype=torch.int8)
    decoded = dequantize_codes(codes, scale, zero, args)
    tensors = {"weight_scale": scale}
    if in_bytes:
        tensors["weight"] = codes
    else:
        tensors |= {"weight_packed": pack_to_int32(codes, args.num_bits), "weight_shape": torch.tensor([N, K])}
    if not args.symmetric:
        tensors["weight_zero_point"] = zero.to(torch.int8) if in_bytes else pack_to_int32(zero, args.num_bits, 0)
    return tensors, decoded


def rounded_inputs(x: torch.Tensor, inputs: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What is stored for activations, and x [M, K] as compressed-tensors rounds it."""
    if inputs is None:
        return {}, x
    args = QuantizationArgs(**inputs)
    if args.dynamic:
        batch = x[None]  # it takes a matrix for one token
        scale, zero = compute_dynamic_scales_and_zp(batch, args, torch.nn.Module())
        return {}, fake_quantize(batch, scale, zero, args)[0]
    scale, zero = calculate_qparams(x.min(), x.max() * 0.7, args)
    tensors = {"input_scale": scale} | ({} if args.symmetric else {"input_zero_point": zero})
    return tensors, fake_quantize(x, scale, zero, args)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_forward_of_compressed_tensors(name: str) -> None:
    weights, inputs, scheme = CASES[name]
    make = torch.Generator().manual_seed(1)
    weight = torch.randn(N, K, generator=make)
    x = torch.randn(5, K, generator=make) + 0.4
    x[3] = 0
    config = config_of(weights, inputs, "int-quantized" if name in _BYTES else "pack-quantized")
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    tensors, decoded = stored(weight, args, name in _BYTES)
    beside, rounded = rounded_inputs(x, inputs)
    spec = quantization_config.read(config)
    read = formats.load("compressed-tensors").read(tensors | beside, spec, "linear")
    assert isinstance(read, QWeight) and read.scheme == scheme
    layer = Ops(torch.device("cpu"), torch.float32).linear(read)
    torch.testing.assert_close(layer(x), rounded @ decoded.T, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(rounded, x, atol=1e-3) or inputs is None
    headers = headers_of(tensors | beside)
    found = formats.dimensions(spec, headers, lambda suffix: (tensors | beside)[suffix])
    assert (found.n, found.k, found.groups) == (N, K, read.scales.shape[1])
    if spec.symmetric or name not in _BYTES:
        expected = formats.load("compressed-tensors").packed_shapes(headers, spec, N, K)
        assert all(tuple(headers[suffix].shape) == shape for suffix, shape in expected.items())


def headers_of(tensors: dict[str, torch.Tensor]) -> Any:
    from aiakq.formats.safetensors_file import DTYPE_NAMES, TensorInfo

    return {name: TensorInfo(DTYPE_NAMES[t.dtype], tuple(t.shape), "model.safetensors") for name, t in tensors.items()}


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_codes_that_old_versions_packed_with_gaps(bits: int) -> None:
    make = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 2**bits, (N, K), generator=make)
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -K % per_word)).view(N, -1, per_word)
    words = (padded << torch.arange(0, per_word * bits, bits)).sum(-1).to(torch.int32)
    tensors = {
        "weight_packed": words,
        "weight_scale": torch.ones(N, 3),
        "weight_shape": torch.tensor([N, K]),
    }
    spec = quantization_config.read(config_of({"num_bits": bits, "group_size": 32}, None, "pack-quantized"))
    read = formats.load("compressed-tensors").read(tensors, spec, "linear")
    assert torch.equal(read.codes.long(), codes)


@pytest.mark.parametrize(
    ("sparsity", "said"),
    [
        ({"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}, "save_compressed=False"),
        ({"format": "sparse-bitmask"}, "weights of 0 are left out"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "other"}, "other"),
        ({"format": "dense", "surprise": 1}, "surprise"),
    ],
)
def test_sparse_weights_are_refused(sparsity: dict[str, Any], said: str) -> None:
    config = config_of({"num_bits": 4, "group_size": 32}, None, "pack-quantized") | {"sparsity_config": sparsity}
    with pytest.raises(AiakqError, match=said):
        quantization_config.read(config)
    dense = {"format": "dense", "global_sparsity": 0.5, "sparsity_structure": "2:4", "targets": ["Linear"]}
    assert quantization_config.read(config | {"sparsity_config": dense}).bits == 4


@pytest.mark.parametrize(
    ("weights", "inputs", "said"),
    [
        ({"num_bits": 1}, None, "of 1 bits"),
        ({"num_bits": 8}, FP8, "activations that are floats"),
        ({"num_bits": 4}, INT8 | {"num_bits": 4}, "activations of 4 bits"),
        ({"num_bits": 4}, INT8 | {"strategy": "tensor"}, "strategy 'tensor'"),
        ({"num_bits": 4}, INT8 | {"strategy": "token", "group_size": 128}, "group_size and the strategy 'token'"),
        ({"num_bits": 4, "strategy": "channel", "group_size": 128}, None, "group_size and the strategy 'channel'"),
        ({"num_bits": 4, "actorder": "zzz"}, None, "actorder 'zzz'"),
    ],
)
def test_what_nothing_computes_is_refused(weights: Any, inputs: Any, said: str) -> None:
    with pytest.raises(AiakqError, match=said):
        quantization_config.read(config_of(weights, inputs, "pack-quantized"))


def test_codes_outside_the_bits_of_the_config_are_refused() -> None:
    spec = quantization_config.read(config_of({"num_bits": 4, "group_size": 32}, INT8, "int-quantized"))
    tensors = {"weight": torch.full((N, K), 9, dtype=torch.int8), "weight_scale": torch.ones(N, 3)}
    with pytest.raises(AiakqError, match="9, outside the 4 bits"):
        formats.load("compressed-tensors").read(tensors, spec, "linear")


def test_a_zero_point_of_activations_must_fit() -> None:
    spec = quantization_config.read(config_of({"num_bits": 8}, STATIC | {"symmetric": False}, "int-quantized"))
    tensors = {
        "weight": torch.ones(N, K, dtype=torch.int8),
        "weight_scale": torch.ones(N, 1),
        "input_scale": torch.ones(1),
    }
    for zero, said in ((None, "missing"), (torch.tensor([300], dtype=torch.int32), "outside -128..127")):
        extra = {} if zero is None else {"input_zero_point": zero}
        with pytest.raises(AiakqError, match=said):
            formats.load("compressed-tensors").read(tensors | extra, spec, "linear")
