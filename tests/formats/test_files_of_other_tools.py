"""Files of other tools, against a decoder that shares nothing with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from aiakq import formats
from aiakq.formats import quantization_config
from aiakq.kernels.types import QWeight

FIXTURES = Path(__file__).parent / "fixtures"
#: Beginnings of the names of files with integers of GPTQ, AWQ and compressed-tensors.
_TOOLS = ("aaw", "ar-", "gq-", "lc-")
_FLOATS = {"lc-mxfp4", "lc-mxfp8", "lc-nvfp4"}
NAMES = sorted({path.name for path in FIXTURES.iterdir() if path.name[:3] in _TOOLS} - _FLOATS)


def bits_of(words: torch.Tensor, bits: int) -> np.ndarray:
    """int32 [R, W] -> codes [R, W*32/b] through numpy's bit order."""
    stream = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=-1, bitorder="little")
    whole = stream.shape[-1] // bits * bits
    return stream[:, :whole].reshape(len(stream), -1, bits).astype(np.int64) @ (1 << np.arange(bits))


def decode(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> np.ndarray:
    """The float64 weight [N, K], straight from the description of each format."""
    numbers = {name: tensor.to(torch.float64).numpy() for name, tensor in tensors.items()}
    if config["quant_method"] in ("gptq", "auto-round"):
        return decode_gptq(tensors, numbers, config)
    if config["quant_method"] == "awq":
        decoders = {"gemv_fast": decode_awq_gemv_fast, "gemv": decode_awq_gemv, "gemm": decode_awq}
        return decoders[config["version"]](tensors, numbers, np.arange(256) // config["group_size"])
    return decode_compressed_tensors(tensors, numbers, config)


def decode_gptq(tensors: dict[str, torch.Tensor], numbers: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    bits = config["bits"]
    q = bits_of(tensors["qweight"].T, bits)
    z = bits_of(tensors["qzeros"], bits).T
    if config.get("checkpoint_format", "gptq") == "gptq":
        words = tensors["qzeros"].numpy().view(np.uint32)
        if "meta" in config and not config["sym"]:
            z = bits_of(torch.from_numpy((words + np.uint32(0x11111111)).view(np.int32)), bits).T
        else:
            z = (z + 1) % 2**bits
    group = tensors["g_idx"].numpy() if "g_idx" in tensors else np.arange(256) // config["group_size"]
    return (q - z[:, group]) * numbers["scales"].T[:, group]


def decode_awq(tensors: dict[str, torch.Tensor], numbers: dict[str, np.ndarray], group: np.ndarray) -> np.ndarray:
    def natural(words: torch.Tensor) -> np.ndarray:
        fields = bits_of(words, 4).reshape(len(words), -1, 8)
        out = np.zeros_like(fields)
        for field, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out[:, :, output] = fields[:, :, field]
        return out.reshape(len(words), -1).T

    return (natural(tensors["qweight"]) - natural(tensors["qzeros"])[:, group]) * numbers["scales"].T[:, group]


def decode_awq_gemv(tensors: dict[str, torch.Tensor], numbers: dict[str, np.ndarray], group: np.ndarray) -> np.ndarray:
    zeros = bits_of(tensors["qzeros"], 4)
    return (bits_of(tensors["qweight"], 4) - zeros[:, group]) * numbers["scales"][:, group]


def decode_awq_gemv_fast(
    tensors: dict[str, torch.Tensor], numbers: dict[str, np.ndarray], group: np.ndarray
) -> np.ndarray:
    scales = numbers["scales"].T[:, group]
    words = tensors["qweight"].numpy().view(np.uint16)
    fields = (words[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)) & 15
    rows = fields.reshape(32, 4, 4, 64).transpose(0, 2, 1, 3).reshape(128, 8, 32).astype(np.int64)
    q = np.zeros_like(rows)
    # Where each of 32 columns goes, as AutoAWQ's packer moves them: in fours of eight, then even before odd.
    for place in range(32):
        inside, step = divmod(place, 8)
        moved = 2 * inside + 8 * (step % 4) + step // 4
        q[:, :, moved] = rows[:, :, place]
    zeros = np.round(-numbers["qzeros"].T[:, group] / scales)
    return (q.reshape(128, 256) - zeros) * scales


def decode_compressed_tensors(
    tensors: dict[str, torch.Tensor], numbers: dict[str, np.ndarray], config: dict[str, Any]
) -> np.ndarray:
    scales = numbers["weight_scale"]
    group = np.arange(256) // (256 // scales.shape[1])
    if "weight" in tensors:
        return numbers["weight"] * scales
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    half = 2 ** (bits - 1)
    zero = np.zeros_like(scales)
    if "weight_zero_point" in tensors:
        zero = bits_of(tensors["weight_zero_point"].T, bits).T - half
    return (bits_of(tensors["weight_packed"], bits) - half - zero[:, group]) * scales[:, group]


def weight_of(weight: QWeight) -> np.ndarray:
    group = torch.arange(weight.k) // weight.group_size
    zeros = weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 2 ** (weight.bits - 1))
    dense = (weight.codes.double() - zeros.double()[:, group]) * weight.scales.double()[:, group]
    if weight.perm is not None:
        unscrambled = torch.empty_like(dense)
        unscrambled[:, weight.perm] = dense
        dense = unscrambled
    return dense.numpy()


# test_interop.py has the others, by their logits.
@pytest.mark.parametrize("name", NAMES)
def test_reads_what_other_tools_wrote(name: str) -> None:
    config = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    prefix = "model.layers.0.self_attn.k_proj."
    with safe_open(FIXTURES / name / "model.safetensors", framework="pt") as file:
        tensors = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}
    spec = quantization_config.read(config)
    module = formats.load(spec.format)
    weight = module.read(tensors, spec, name)
    assert (weight.n, weight.k) == (128, 256)
    expected = decode(tensors, config)
    np.testing.assert_array_equal(weight_of(weight), expected)
    assert (weight.perm is not None) == (name == "gq-desc")
    if name.startswith("ar-") and "llm" not in name:
        assert bool((weight.scales < 0).any())
    # What we write of it reads back as the same function.
    if name != "gq-asym-v1":  # its zeros of 0 have no agreed spelling in version 1
        again = module.read(module.write(weight, spec, torch.float16), spec, name)
        dense = weight_of(again)
        tolerance = 0 if weight.scales.dtype == torch.float16 or weight.scheme == "w8a8" else 2e-3
        np.testing.assert_allclose(dense, expected, rtol=tolerance)
