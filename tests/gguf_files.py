"""GGUF files that llama.cpp's converter wrote, one for each family, and what the models were that they come from."""

from __future__ import annotations

import functools
import json
import lzma
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.formats.gguf.file import GGUFFile

FIXTURES = Path(__file__).parent / "formats" / "gguf_fixtures"
FAMILIES = sorted(path.name.removesuffix(".gguf.xz") for path in FIXTURES.glob("*.gguf.xz"))
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@functools.cache
def originals() -> dict[str, Any]:
    """Return family -> ``config``, the config.json that was converted, and ``shapes`` of its tensors."""
    return json.loads(lzma.decompress((FIXTURES / "originals.json.xz").read_bytes()))


def unpacked(family: str, folder: Path) -> Path:
    """Write the file of a family into a folder."""
    path = folder / f"{family}.gguf"
    path.write_bytes(lzma.decompress((FIXTURES / f"{family}.gguf.xz").read_bytes()))
    return path


def original(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of this name in the models that were converted: values that float16 holds exactly."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    values = ((index * 40503 + zlib.crc32(name.encode())) % 2048 - 1024).float() / 4096
    is_norm = len(shape) == 1 and name.endswith("norm.weight")
    return (values + 1 if is_norm else values).reshape(shape)


def read_as(family: str) -> dict[str, Tensor]:
    """Return the tensors of the model of a family that was converted, as its file is read."""
    wanted = {name: original(name, tuple(shape)) for name, shape in originals()[family]["shapes"].items()}
    return apart(wanted) if family == "llama4" else wanted


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of Llama 4 in tensors of their own, as they are read, instead of all as [E, K, 2F] and [E, F, K]."""
    found = {}
    for name, value in tensors.items():
        prefix, inside, last = name.rpartition(".experts.")
        if not inside:
            found[name] = value
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        for number, expert in enumerate(value.mT):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{prefix}.experts.{number}.{part}.weight"] = rows
    return found


def floats(file: GGUFFile, name: str) -> Tensor:
    """Return a tensor of floats of a file, in float32."""
    tensor = file.tensors[name]
    return file.read(name).view(_DTYPES[tensor.kind.name]).float().reshape(tensor.shape)
