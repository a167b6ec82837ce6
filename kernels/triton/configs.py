"""Launch configurations: tile sizes, warps, stages, and the number of programs per output (split-K).

They come from JSON, one file per GPU: what `aiakq bench kernels --tune` wrote for the user, else what launch/ has, else
``default.json`` there: kernel -> bits -> the most rows an entry is for -> [outputs, rows, warps, stages, words...]. Of
attention, bits are those of keys and values; an entry of ``decode`` is for so many sequences times key-value heads, one
of ``prefill`` for so many tokens, and is [positions, stages, warps, programs per processor or query rows]. Nothing is
tuned while a model runs.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "launch"
#: Programs that should be in flight for each processor while few outputs are computed.
PER_PROCESSOR = 4
#: Inner steps a program should have at least, or a share is not worth adding up.
FEWEST_STEPS = 4


@dataclass(frozen=True)
class Config:
    """The configuration of one launch of a linear layer.

    bn, bm        outputs and rows of a tile.
    split         programs that share a tile, each with a part of the inputs.
    scale_first   scales are applied to the weights before the product, not after it (linear_kernel.py).
    weights_left  weights are the left operand (linear_int8_kernel.py).
    dense         the weights are dequantized to memory, and torch multiplies.
    plain         no inline assembly.
    """

    bn: int
    bm: int
    warps: int
    stages: int
    split: int
    scale_first: bool = False
    weights_left: bool = False
    dense: bool = False
    plain: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """The configuration of one launch of attention.

    tile    positions at a time.
    stages  tiles that are loaded ahead.
    warps   0: what the GPU's generation takes.
    share   decoding: programs for each processor, among which sequences are split; prompts: query rows of a program.
    """

    tile: int
    stages: int
    warps: int
    share: int


def attention_config(kernel: str, device: torch.device, itemsize: int, width: int, m: int) -> AttentionConfig:
    """How ``decode`` or ``prefill`` goes over keys and values of ``itemsize`` bytes a number and ``width`` a head."""
    name, _ = gpu(device)
    return attention_config_of(entry_for(name, kernel, 8 if itemsize == 1 else 16, m), width)


def attention_config_of(entry: list | str, width: int) -> AttentionConfig:
    """What ``entry`` of a table means for heads of ``width`` numbers: with more than 128, tiles take as much memory."""
    tile, stages, warps, share = (int(number) for number in entry)
    return AttentionConfig(max(16, min(tile, tile * 128 // width)), stages, warps, share)


def choose(kernel: str, device: torch.device, bits: int, n: int, steps: int, m: int, dense: bool = True) -> Config:
    """The configuration for ``m`` rows of a layer of ``n`` outputs whose inputs are ``steps`` inner steps.

    dense  whether torch may multiply, whose sums depend on ``n``.
    """
    name, _ = gpu(device)
    entry = entry_for(name, kernel, bits, m)
    if isinstance(entry, str) and not dense:
        entry = [entry for entry in table(name)[kernel][str(bits)].values() if not isinstance(entry, str)][-1]
    return config_of(entry, device, n, steps, m)


def config_of(entry: list | str, device: torch.device, n: int, steps: int, m: int) -> Config:
    """What ``entry`` of a table means for such a product: programs share an output where there are too few of them."""
    _, processors = gpu(device)
    if isinstance(entry, str):
        return Config(64, 64, 4, 3, 1, dense=True)
    bn, bm, warps, stages, *words = entry
    tiles = -(-n // bn) * -(-m // bm)
    split = max(1, min(PER_PROCESSOR * processors // tiles, steps // FEWEST_STEPS)) if m <= 64 else 1
    return Config(bn, bm, warps, stages, split, **dict.fromkeys(words, True))


def entry_for(name: str, kernel: str, bits: int, m: int) -> list | str:
    """The entry for so many rows on the GPU ``name``: that of the next bucket, or the last."""
    buckets = table(name)[kernel][str(bits)]
    return next((buckets[most] for most in buckets if m <= int(most)), list(buckets.values())[-1])


def users_folder() -> Path:
    """Where the user's own files are."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "aiakq" / "launch"


@lru_cache
def table(name: str) -> dict:
    """The configurations of the GPU ``name``, and for kernels it has none for those of all."""
    default = FOLDER / "default.json"
    files = [users_folder() / f"{name}.json", FOLDER / f"{name}.json"]
    own = next((file for file in files if file.is_file()), default)
    return json.loads(default.read_text()) | json.loads(own.read_text())


@lru_cache
def gpu(device: torch.device) -> tuple[str, int]:
    """The name of its file, and its processors."""
    if device.type != "cuda":
        return "default", 1
    properties = torch.cuda.get_device_properties(device)
    return re.sub(r"\W+", "-", properties.name.lower()).strip("-"), properties.multi_processor_count


_counters: dict[torch.device, Tensor] = {}
_scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
# Captured graphs still point to memory that has become too small.
_outgrown: list[Tensor] = []


def counters(device: torch.device, count: int) -> Tensor:
    """-> [at least ``count``] int32 zeros, shared by all launches on ``device``, each of which leaves them zero."""
    known = _counters.get(device)
    if known is None or known.numel() < count:
        if known is not None:
            _outgrown.append(known)
        known = _counters[device] = torch.zeros(max(4096, count), dtype=torch.int32, device=device)
    return known


def scratch(like: Tensor, count: int) -> Tensor:
    """-> [count] of the dtype and on the device of ``like``, uninitialized; every call returns the same memory."""
    key = like.device, like.dtype
    known = _scratch.get(key)
    if known is None or known.numel() < count:
        if known is not None:
            _outgrown.append(known)
        known = _scratch[key] = torch.empty(count, dtype=like.dtype, device=like.device)
    return known[:count]
