"""Quantized copies of tiny models: with scales of both signs, experts in MXFP4, and what codes stand for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from aiakq import formats
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.model_folder import MANIFEST
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import QWeight
from aiakq.rounding.integers import round_weight
from aiakq.spec import QuantSpec


def with_signed_scales(source: Path, to: Path, spec: QuantSpec) -> Path:
    """A copy of an unquantized checkpoint whose linears are stored as ``spec`` says, rounded to nearest, with about
    half of the scales negative, as AutoRound writes them.

    A group that is rounded with a negative scale is rounded as its negative with a positive one.
    """
    checkpoint, make, tensors = Checkpoint.open(source), torch.Generator().manual_seed(0), {}
    dtype = torch.bfloat16 if spec.format == "compressed-tensors" else torch.float16
    storage = formats.load(spec.format).scale_dtype(spec, dtype)
    for name in _linears(checkpoint, spec):
        weight = signed_weight(checkpoint.tensor(f"{name}.weight").float(), spec, storage, make)
        written = formats.load(spec.format).write(weight, spec, dtype)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in written.items()}
    config = {**checkpoint.config, "quantization_config": quantization_config.write(spec)}
    return _copy(checkpoint, to, tensors, config)


def signed_weight(weight: Tensor, spec: QuantSpec, storage: torch.dtype, make: torch.Generator) -> QWeight:
    """``weight`` [N, K] rounded to nearest, every group of it or its negative."""
    n, k = weight.shape
    group = k if spec.group_size == -1 else spec.group_size
    signs = torch.randint(0, 2, (n, k // group), generator=make) * 2 - 1
    turned = weight * signs.repeat_interleave(group, dim=1)
    codes, scales, zeros = round_weight(turned, spec.bits, group, spec.symmetric, storage)
    if spec.symmetric:
        codes[::7, ::5] = 0  # the lowest code, which rounding to nearest does not use
    else:
        zeros.clamp_(min=1)
    return QWeight(
        scheme=spec.scheme,
        codes=codes,
        scales=scales * signs,
        zeros=None if spec.symmetric else zeros.to(torch.uint8),
        group_size=group,
        input_scale=torch.tensor(0.1) if spec.static_input else None,
    )


def packed_mxfp4(count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Random blocks [E, N, K / 32, 16] and scales [E, N, K / 32] uint8, of weights of about the usual size."""
    draw = torch.Generator().manual_seed(count * n * k)
    blocks = torch.randint(0, 256, (count, n, k // 32, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(121, 125, (count, n, k // 32), dtype=torch.uint8, generator=draw)
    return blocks, scales


def with_mxfp4_experts(source: Path, to: Path) -> Path:
    """A copy of GPT-OSS in floats with other experts, random ones in MXFP4."""
    checkpoint = Checkpoint.open(source)
    tensors = {}
    for name, info in checkpoint.inventory.items():
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            count, k, n = info.shape
            tensors |= dict(zip((f"{name}_blocks", f"{name}_scales"), packed_mxfp4(count, n, k), strict=True))
        else:
            tensors[name] = checkpoint.tensor(name)
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("model*.safetensors*"))
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps({**checkpoint.config, "quantization_config": stored}))
    return to


def in_floats(folder: Path, to: Path) -> Path:
    """A copy of a quantized checkpoint with the weights that its codes stand for, whose activations are not rounded."""
    checkpoint, tensors = Checkpoint.open(folder), {}
    for name in checkpoint.quantized_linears():
        stored = checkpoint.read_linear(name)
        tensors[f"{name}.weight"] = dequantize(stored)
        if stored.bias is not None:
            tensors[f"{name}.bias"] = stored.bias.float()
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    return _copy(checkpoint, to, tensors, config)


def _linears(checkpoint: Checkpoint, spec: QuantSpec) -> list[str]:
    names = (
        name.removesuffix(".weight")
        for name in checkpoint.inventory
        if name.endswith(("_proj.weight", "lm_head.weight"))
    )
    return [name for name in names if spec.for_layer(name) is not None]


def _copy(checkpoint: Checkpoint, to: Path, linears: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A copy with the tensors ``linears`` instead of those of the same modules, except for biases."""
    changed = {name.rpartition(".")[0] for name in linears}
    kept = [name for name in checkpoint.inventory if name.rpartition(".")[0] not in changed or name.endswith(".bias")]
    tensors = {name: checkpoint.tensor(name) for name in kept} | linears
    shutil.copytree(checkpoint.path, to, ignore=shutil.ignore_patterns("model*.safetensors*"))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    (to / MANIFEST).parent.mkdir(exist_ok=True)
    (to / MANIFEST).write_text('{"files": {}}')
    return to
