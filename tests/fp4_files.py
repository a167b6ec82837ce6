"""Weights and activations in MXFP4, MXFP8 and NVFP4 as compressed-tensors and ModelOpt make them (tests/fp8_files.py).

Nothing here is shared with the code under test: scales and roundings follow the publishers' own code, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fp8_files import E4M3, to_e4m3

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_e2m1(x: Tensor) -> Tensor:
    """Indices [.., K] uint8 of the nearest values; in the middle the one whose index is even."""
    distance = (x.double().abs().unsqueeze(-1) - VALUES).abs() + torch.tensor([0, 1e-9] * 4)
    return distance.argmin(-1).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def of_e2m1(codes: Tensor) -> Tensor:
    return torch.where(codes > 7, -1.0, 1.0) * VALUES[(codes & 7).long()]


def packed(codes: Tensor) -> Tensor:
    return codes[:, ::2] + 16 * codes[:, 1::2]


def grouped(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size))


def mx_exponents(x: Tensor, bits: int, up: bool = False) -> Tensor:
    """Biased exponents [.., groups] of groups of 32: floor, from 1.75 upwards the next, or ModelOpt's ceil."""
    highest = grouped(x, 32).abs().amax(-1).double()
    if up:
        return torch.ceil(torch.log2(highest / (448 if bits == 8 else 6))).clamp(-127, 127) + 127
    exponent = torch.floor(torch.log2(highest))
    exponent += highest >= 1.75 * 2**exponent
    return (exponent - (8 if bits == 8 else 2) + 127).clamp(0, 254)


def mx_rounded(x: Tensor, bits: int, up: bool = False) -> Tensor:
    scale = 2 ** (mx_exponents(x, bits, up).float() - 127).unsqueeze(-1)
    parts = grouped(x, 32) / scale
    found = of_e2m1(to_e2m1(parts)) if bits == 4 else to_e4m3(parts).float()
    return (found * scale).flatten(-2)


def mxfp4(weight: Tensor, name: str = "weight_packed", **others: Tensor) -> Any:
    exponents = mx_exponents(weight, 4)
    scale = 2 ** (exponents.float() - 127).unsqueeze(-1)
    codes = to_e2m1(grouped(weight, 32) / scale)
    stored = {name: packed(codes.flatten(-2)), "weight_scale": exponents.to(torch.uint8), **others}
    return stored, (of_e2m1(codes) * scale).flatten(-2)


def mxfp8(weight: Tensor, up: bool = False) -> Any:
    exponents = mx_exponents(weight, 8, up)
    scale = 2 ** (exponents.float() - 127).unsqueeze(-1)
    codes = to_e4m3(grouped(weight, 32) / scale)
    stored = {"weight": codes.flatten(-2), "weight_scale": exponents.to(torch.uint8)}
    return stored, (codes.float() * scale).flatten(-2)


def nvfp4(weight: Tensor, unit: float | None = None) -> Any:
    """compressed-tensors: scales are divided by what is stored for the whole weight and for its inputs."""
    total = (448 * 6 / weight.abs().max()).reshape(1)
    numbers = (total * (grouped(weight, 16).abs().amax(-1) / 6)).to(E4M3)
    scale = (numbers.float() / total).unsqueeze(-1)
    codes = to_e2m1((grouped(weight, 16) / scale).clamp(-6, 6))
    stored = {"weight_packed": packed(codes.flatten(-2)), "weight_scale": numbers, "weight_global_scale": total}
    if unit is not None:
        stored["input_global_scale"] = torch.tensor([unit])
    return stored, (of_e2m1(codes) * scale).flatten(-2)


def nvfp4_rounded(x: Tensor, unit: float) -> Tensor:
    total = torch.tensor([unit])
    numbers = (total * (grouped(x, 16).abs().amax(-1) / 6)).clamp(max=448).to(E4M3).float()
    scale = (torch.where(numbers == 0, 0.125, numbers) / total).unsqueeze(-1)
    return (of_e2m1(to_e2m1((grouped(x, 16) / scale).clamp(-6, 6))) * scale).flatten(-2)


def modelopt_nvfp4(weight: Tensor, unit: float | None = None) -> Any:
    """ModelOpt: scales are multiplied by what is stored."""
    total = weight.abs().max() / (6 * 448)
    numbers = (grouped(weight, 16).abs().amax(-1) / (6 * total)).clamp(2**-9, 448).to(E4M3)
    scale = (numbers.float() * total).unsqueeze(-1)
    codes = to_e2m1((grouped(weight, 16) / scale).clamp(-6, 6))
    stored = {"weight": packed(codes.flatten(-2)), "weight_scale": numbers, "weight_scale_2": total}
    if unit is not None:
        stored["input_scale"] = torch.tensor(unit)
    return stored, (of_e2m1(codes) * scale).flatten(-2)


def modelopt_nvfp4_rounded(x: Tensor, unit: float) -> Tensor:
    total = torch.tensor(unit)
    numbers = (grouped(x, 16).abs().amax(-1) / (6 * total)).clamp(2**-9, 448).to(E4M3).float()
    scale = (numbers * total).unsqueeze(-1)
    return (of_e2m1(to_e2m1((grouped(x, 16) / scale).clamp(-6, 6))) * scale).flatten(-2)


def of_modelopt(algorithm: str, size: int, **others: Any) -> dict[str, Any]:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": size, "ignore": ["lm_head"]}
    return config | {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} | others
