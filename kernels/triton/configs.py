"""Launch configurations: tile sizes, warps, stages, and the number of programs per output (split-K).

They are read from JSON: the user's file for a GPU written by `aiakq bench kernels --tune`, else the file in launch/ for
the GPU or for its compute capability (``sm_90.json``), else ``default.json`` there: kernel -> bits -> maximum rows of
an entry -> [outputs, rows, warps, stages, words...]. A number among the words is the number of programs per
multiprocessor up to which inputs are split, instead of PER_PROCESSOR up to SPLIT_ROWS rows. For attention, bits are
those of keys and values; the rows of a ``decode`` entry are sequences times key-value heads, those of a ``prefill``
entry are tokens, and entries are [positions, stages, warps, programs per multiprocessor or query rows]. Nothing is
tuned while a model runs.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "launch"
#: The name of a GPU without a file of its own.
DEFAULT = "default"
#: A configuration in the tables: tile sizes, warps, stages and switches, or the name of another way to multiply.
Entry = list[int | str] | str
#: Kernel -> bits -> the most rows, as text -> entry.
Tables = dict[str, dict[str, dict[str, Entry]]]
#: Target number of programs per multiprocessor when few outputs are computed, and the maximum rows for which it is one.
PER_PROCESSOR, SPLIT_ROWS = 4, 64
#: Minimum number of inner steps per program; with fewer, split-K does not pay off.
FEWEST_STEPS = 4


@dataclass(frozen=True)
class Config:
    """The configuration of one launch of a linear layer.

    bn, bm        outputs and rows of a tile.
    split         programs that share a tile, each with a part of the inputs (split-K).
    scale_first   whether scales are applied to the weights before the product, not after it (linear_kernel.py).
    joined        whether all weights of a step are one operand, and not one for each plane (linear_kernel.py).
    weights_left  whether weights are the left operand (linear_int8_kernel.py).
    dense         whether the weights are dequantized to memory and multiplied by torch.
    plain         whether to avoid inline assembly.
    """

    bn: int
    bm: int
    warps: int
    stages: int
    split: int
    scale_first: bool = False
    joined: bool = False
    weights_left: bool = False
    dense: bool = False
    plain: bool = False


class Gpu(NamedTuple):
    """The properties of a GPU that launches depend on.

    name        of its configuration file.
    processors  number of multiprocessors.
    capability  compute capability times ten: 80 for an A100, 89 for Ada, 90 for Hopper.
    """

    name: str
    processors: int
    capability: int

    @property
    def generation(self) -> int:
        """The first part of the compute capability: 8 for Ampere and Ada, 9 for Hopper."""
        return self.capability // 10


@dataclass(frozen=True)
class AttentionConfig:
    """The configuration of one launch of attention.

    tile    positions per tile.
    stages  number of tiles prefetched.
    warps   0: the default of the GPU's generation.
    share   decoding: programs per multiprocessor among which sequences are split; prefill: query rows per program.
    """

    tile: int
    stages: int
    warps: int
    share: int


def attention_config(kernel: str, device: torch.device, itemsize: int, width: int, m: int) -> AttentionConfig:
    """Return the configuration of ``decode`` or ``prefill`` for ``itemsize``-byte elements and heads of ``width``."""
    return attention_config_of(entry_for(gpu(device), kernel, 8 if itemsize == 1 else 16, m), width)


def attention_config_of(entry: Entry, width: int) -> AttentionConfig:
    """Convert a table ``entry`` for heads of ``width`` elements; above 128, tiles shrink to use the same memory."""
    tile, stages, warps, share = (int(number) for number in entry)
    return AttentionConfig(max(16, min(tile, tile * 128 // width)), stages, warps, share)


def choose(kernel: str, device: torch.device, bits: int, n: int, steps: int, m: int, dense: bool = True) -> Config:
    """Return the configuration for ``m`` rows of a layer with ``n`` outputs whose inputs are ``steps`` inner steps.

    dense  whether torch may multiply; its sums depend on ``n``.
    """
    known = gpu(device)
    entry = entry_for(known, kernel, bits, m)
    if isinstance(entry, str) and not dense:
        entries = table(known.name, known.capability)[kernel][str(bits)].values()
        entry = [entry for entry in entries if not isinstance(entry, str)][-1]
    return config_of(entry, device, n, steps, m)


def config_of(entry: Entry, device: torch.device, n: int, steps: int, m: int) -> Config:
    """Convert a table ``entry`` for such a product; programs share an output (split-K) if there are too few of them."""
    if isinstance(entry, str):
        return Config(64, 64, 4, 3, 1, dense=True)
    bn, bm, warps, stages = (int(number) for number in entry[:4])
    words = entry[4:]
    per_processor = PER_PROCESSOR if m <= SPLIT_ROWS else 0
    per_processor = next((word for word in words if isinstance(word, int)), per_processor)
    tiles = -(-n // bn) * -(-m // bm)
    split = max(1, min(per_processor * gpu(device).processors // tiles, steps // FEWEST_STEPS))
    return Config(bn, bm, warps, stages, split, **dict.fromkeys((w for w in words if isinstance(w, str)), True))


def entry_for(known: Gpu, kernel: str, bits: int, m: int) -> Entry:
    """Return the entry for ``m`` rows on a GPU: that of the next larger bucket, or the last one."""
    buckets = table(known.name, known.capability)[kernel][str(bits)]
    return next((buckets[most] for most in buckets if m <= int(most)), list(buckets.values())[-1])


def users_folder() -> Path:
    """Return the folder of the user's own files."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "aiakq" / "launch"


@lru_cache
def table(name: str, capability: int = 0) -> Tables:
    """Return the configurations of the GPU ``name``, with the defaults for kernels that it lacks."""
    default: Tables = json.loads((FOLDER / f"{DEFAULT}.json").read_text())
    of_capability = FOLDER / f"sm_{capability}.json"
    if of_capability.is_file():
        default |= json.loads(of_capability.read_text())
    files = [users_folder() / f"{name}.json", FOLDER / f"{name}.json"]
    path = next((file for file in files if file.is_file()), None)
    if path is not None and name != DEFAULT:
        default |= json.loads(path.read_text())
    return default


_other = Gpu(DEFAULT, 1, 90)


@lru_cache
def gpu(device: torch.device) -> Gpu:
    """Return the properties of ``device``; without a GPU, those of a Hopper with one multiprocessor, or as assumed."""
    if device.type != "cuda":
        return _other
    properties = torch.cuda.get_device_properties(device)
    name = re.sub(r"\W+", "-", properties.name.lower()).strip("-")
    return Gpu(name, properties.multi_processor_count, 10 * properties.major + properties.minor)


def assume(other: Gpu) -> None:
    """Use the properties of this GPU for devices that are not GPUs, to compile for one that is not present."""
    global _other
    _other = other
    gpu.cache_clear()


_counters: dict[torch.device, Tensor] = {}
_scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
# Captured CUDA graphs still point to buffers that have been replaced by larger ones.
_outgrown: list[Tensor] = []


def counters(device: torch.device, count: int) -> Tensor:
    """Return [at least ``count``] int32 zeros, shared by all launches on ``device``, which leave them zero."""
    known = _counters.get(device)
    if known is None or known.numel() < count:
        if known is not None:
            _outgrown.append(known)
        known = _counters[device] = torch.zeros(max(4096, count), dtype=torch.int32, device=device)
    return known


def scratch(like: Tensor, count: int) -> Tensor:
    """Return [count] of the dtype and device of ``like``, uninitialized; every call returns the same memory."""
    key = like.device, like.dtype
    known = _scratch.get(key)
    if known is None or known.numel() < count:
        if known is not None:
            _outgrown.append(known)
        known = _scratch[key] = torch.empty(count, dtype=like.dtype, device=like.device)
    return known[:count]
