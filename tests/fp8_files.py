"""Writes models whose linears are 8-bit floats as their publishers lay them out, and computes what these files mean.

Nothing here is shared with the code under test: scales and roundings follow the publishers' own code, in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass
class Published:
    """One file format: how a weight [N, K] is stored, and how activations are rounded; None: they are not.

    store  weight -> (suffix -> tensor, dequantized weight)
    """

    config: Mapping[str, Any]
    store: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    rounded: Callable[[Tensor], Tensor] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def per_token(x: Tensor, bound: float = float("inf"), smallest: float = 0.0) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True).clamp(max=bound) / 448).clamp(min=smallest)
    return to_e4m3(x / scale).float() * scale


def static(x: Tensor, scale: float) -> Tensor:
    number = torch.tensor(scale)
    return to_e4m3(x / number).float() * number


def per_group(x: Tensor, size: int, powers: bool = False) -> Tensor:
    """DeepSeek's act_quant, group by group."""
    parts = []
    for part in x.split(size, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / 448
        if powers:
            scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
        parts.append(to_e4m3(part / scale).float() * scale)
    return torch.cat(parts, -1)


def in_blocks(weight: Tensor, rows: int, size: int, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A weight in blocks, one after the other, as weight_dequant of DeepSeek reads them."""
    n, k = weight.shape
    scales = torch.empty(-(-n // rows), -(-k // size))
    codes, dense = torch.empty(n, k, dtype=E4M3), torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * size, (j + 1) * size)
            scale = (weight[block].abs().max() / 448).to(dtype).float()
            scales[i, j] = scale
            codes[block] = to_e4m3(weight[block] / scale)
            dense[block] = codes[block].float() * scale
    return {"weight": codes, name: scales.to(dtype)}, dense


def per_row(weight: Tensor, name: str = "weight_scale", shape: tuple[int, ...] = (-1, 1)) -> Any:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = to_e4m3(weight / scale)
    return {"weight": codes, name: scale.reshape(shape)}, codes.float() * scale


def per_tensor(weight: Tensor, name: str = "weight_scale", **others: float) -> Any:
    scale = weight.abs().max() / 448
    codes = to_e4m3(weight / scale)
    return {"weight": codes, name: scale, **{key: torch.tensor(each) for key, each in others.items()}}, (
        codes.float() * scale
    )


def is_linear(name: str, tensor: Tensor) -> bool:
    named = "proj" in name.rpartition(".")[0].rpartition(".")[2]
    return name.endswith(".weight") and tensor.dim() == 2 and named


def publish(model: Path, folder: Path, published: Published) -> dict[str, Tensor]:
    """Write ``model`` in another format to ``folder``; returns its dequantized tensors."""
    shutil.copytree(model, folder)
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if is_linear(name, tensor):
            parts, dense[name] = published.store(tensor.float())
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": each for suffix, each in parts.items()}
        else:
            stored[name] = dense[name] = tensor
    save_file(
        {name: each.contiguous() for name, each in {**stored, **published.extra}.items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": published.config}))
    return dense


def expected_logits(model: Path, dense: Mapping[str, Tensor], published: Published, ids: Tensor) -> Tensor:
    """The logits [B, T, V] of transformers' model with the dequantized weights, in float32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    reference.load_state_dict(dict(dense), strict=False)
    rounded = published.rounded
    if rounded is not None:
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear) and name.endswith("proj"):
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
    with torch.no_grad():
        return reference(ids).logits
