"""A cost model: what a compiled kernel can be expected to reach on an H100, from its object code, without measuring.

A launch is described by its grid, by what a block does per turn of its main loop (instructions of a warp, operations of
tensor cores, bytes copied to shared memory), and by the registers and the shared memory of a block, as ptxas made them.
The expected time is the largest of

- issue: instructions of the busiest multiprocessor, four schedulers with one each per cycle, of which ISSUE is reached,
  or those of its busiest slot, if that is ALONE in the end;
- tensor: operations of the busiest multiprocessor at the peak, of which TENSOR is reached;
- L2: bytes that blocks copy, at L2's bandwidth;
- memory: bytes that miss a cache of CACHE bytes with least recently used replacement, where blocks run in waves in the
  order of the grid, at MEMORY of the bandwidth;
- latency: the turns of the busiest slot, of which those arrive per LATENCY that are loaded ahead;

and a fixed part for the launch, filling and draining. A block goes to the first slot of a multiprocessor that is free,
in the order of the grid.

The constants below are public figures of the card and shares that are usual for good kernels. They are not fitted, and
they stay as they are: the model compares two versions of a kernel, and says about where one stands.

``python tests/kernels/triton/compile_all.py --arch 90 > made.json; python tests/ptx/roofline.py made.json`` prints the
table of docs/gpu.md.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: An H100 SXM: multiprocessors, cycles per second; bytes per second of memory and of L2; operations per second of
#: tensor cores; registers, bytes of shared memory, warps and blocks of a multiprocessor.
PROCESSORS, CLOCK = 132, 1.83e9
BANDWIDTH, L2_BANDWIDTH = 3.35e12, 5.5e12
PEAK = {"bf16": 989e12, "int8": 1979e12}
REGISTERS, SHARED, WARPS, BLOCKS = 65536, 233472, 64, 32
#: What the driver keeps of a block's shared memory, and registers that a warp's are rounded up to.
RESERVED, REGISTER_UNIT = 1024, 256
#: Shares that good kernels reach.
ISSUE, ALONE, TENSOR, MEMORY = 0.85, 0.35, 0.85, 0.92
#: Bytes of L2 that hold what will be read again, of 50 MB in two halves; seconds until a byte arrives, and of a launch.
CACHE, LATENCY, LAUNCH = 40e6, 0.8e-6, 2e-6


@dataclass(frozen=True)
class Object:
    """What ptxas says: registers of a thread, bytes of shared memory and warps of a block, and instructions of a warp
    per turn of the main loop.
    """

    registers: int
    shared: int
    warps: int
    instructions: float

    @property
    def occupancy(self) -> int:
        """Blocks that a multiprocessor holds at once."""
        of_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        return min(REGISTERS // (of_warp * self.warps), SHARED // (self.shared + RESERVED), WARPS // self.warps, BLOCKS)


@dataclass(frozen=True)
class Turn:
    """What a block does in one turn of its main loop.

    operations  of tensor cores, two per multiply and add; kind: a key of PEAK.
    copied      bytes to shared memory; ahead: turns whose bytes are in flight.
    """

    operations: float
    kind: str
    copied: float
    ahead: int


@dataclass(frozen=True)
class Launch:
    """A launch.

    turns    of each block, in the order of the grid.
    touched  parts of tensors that a block reads or writes, each a name and its bytes; None: ``stream`` bytes, once.
    """

    object: Object
    turn: Turn
    turns: Sequence[float]
    touched: Sequence[Sequence[tuple[Hashable, float]]] | None = None
    stream: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Expected seconds, by cause, and bytes of memory."""

    seconds: float
    causes: dict[str, float] = field(default_factory=dict)
    bytes: float = 0.0
    waves: float = 0.0

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.causes, key=lambda cause: self.causes[cause])


def estimate(launch: Launch) -> Estimate:
    """Return what to expect of ``launch``."""
    made, turn = launch.object, launch.turn
    slots = PROCESSORS * made.occupancy
    busiest, longest = _schedule(launch.turns, slots)
    missed = launch.stream if launch.touched is None else missed_bytes(launch.touched, slots)
    issue = made.warps * made.instructions / (4 * CLOCK)
    causes = {
        "issue": issue * max(busiest / ISSUE, longest / ALONE),
        "tensor": busiest * turn.operations * PROCESSORS / (PEAK[turn.kind] * TENSOR),
        "L2": float(sum(launch.turns)) * turn.copied / L2_BANDWIDTH,
        "memory": missed / (BANDWIDTH * MEMORY),
        "latency": longest * LATENCY / turn.ahead,
    }
    return Estimate(max(causes.values()) + LAUNCH, causes, missed, len(launch.turns) / slots)


def _schedule(turns: Sequence[float], slots: int) -> tuple[float, float]:
    """The turns of the busiest multiprocessor and of the busiest slot: a block goes to the first slot that is free."""
    free = [(0.0, slot) for slot in range(min(slots, len(turns)))]
    of_processor = [0.0] * PROCESSORS
    for count in turns:
        busy, slot = free[0]
        heapq.heapreplace(free, (busy + count, slot))
        of_processor[slot % PROCESSORS] += count
    return max(of_processor), max(busy for busy, _ in free)


def missed_bytes(touched: Iterable[Sequence[tuple[Hashable, float]]], slots: int) -> float:
    """Bytes that a cache of CACHE bytes misses, of blocks that run ``slots`` at a time."""
    known: OrderedDict[Hashable, float] = OrderedDict()
    held = missed = 0.0
    blocks = list(touched)
    for first in range(0, len(blocks), slots):
        wave = {name: size for block in blocks[first : first + slots] for name, size in block}
        for name, size in wave.items():
            if name in known:
                known.move_to_end(name)
                continue
            missed += size
            held += size
            known[name] = size
        # If the wave alone is too much, its first parts are gone when the next one begins.
        while held > CACHE:
            held -= known.popitem(last=False)[1]
    return missed


def product(made: Object, kind: str, bits: int, sizes: tuple[int, int, int], tile: tuple[int, int, int, int, int],
            tiles: Iterable[tuple[int, int]] | None = None) -> Launch:  # fmt: skip
    """A product of x [M, K] and weights [N, K] of ``bits``; kind: of its operations, whose x has one byte if integers.

    sizes  M, N, K.
    tile   rows, outputs, inputs of a turn, stages and programs per tile (split-K).
    tiles  of rows and outputs in the order of the grid; None: rows fastest.
    """
    (m, n, k), (bm, bn, bk, stages, split) = sizes, tile
    width = 1 if kind == "int8" else 2
    copied = bm * bk * width + bn * bk * bits / 8
    order = list(tiles) if tiles is not None else [(a, b) for b in range(-(-n // bn)) for a in range(-(-m // bm))]
    touched = [
        [(("x", a, part), bm * k * width / split), (("w", b, part), bn * k * bits / 8 / split),
         (("y", a, b), min(bm, m) * bn * 2)]
        for part in range(split) for a, b in order
    ]  # fmt: skip
    turn = Turn(2.0 * bm * bn * bk, "int8" if kind == "int8" else "bf16", copied, stages - 1)
    return Launch(made, turn, [k / bk / split] * (len(order) * split), touched)


def decoding(made: Object, lengths: Sequence[int], kv_heads: int, dim: int, tile: int, stages: int, rows: int,
             splits: Sequence[int]) -> Launch:  # fmt: skip
    """Decoding attention of sequences of ``lengths``, each in ``splits`` parts, over a cache of 16 bits."""
    turns = [
        length / tile / split
        for length, split in zip(lengths, splits, strict=True)
        for _ in range(kv_heads * split)
    ]  # fmt: skip
    copied = 2 * tile * dim * 2
    turn = Turn(4.0 * rows * dim * tile, "bf16", copied, stages - 1)
    return Launch(made, turn, turns, stream=sum(lengths) * kv_heads * dim * 4)


def latents(made: Object, lengths: Sequence[int], splits: Sequence[int], sizes: tuple[int, int, int], tile: int,
            rows: int, apart: bool = False) -> Launch:  # fmt: skip
    """Decoding attention over 16-bit latents of sequences of ``lengths``, each in ``splits`` parts.

    sizes  heads, elements of a key, and those of them that are the value.
    rows   heads of a program; apart: whether all parts come before those of other heads, not heads beside each other.
    """
    heads, key, value = sizes
    blocks = -(-heads // rows)
    parts = [
        (sequence, part, length / split)
        for sequence, (length, split) in enumerate(zip(lengths, splits, strict=True))
        for part in range(split)
    ]  # fmt: skip
    order = parts * blocks if apart else [part for part in parts for _ in range(blocks)]
    touched = [[((sequence, part), length * key * 2)] for sequence, part, length in order]
    turn = Turn(2.0 * rows * (key + value) * tile, "bf16", tile * key * 2, 1)
    return Launch(made, turn, [length / tile for _, _, length in order], touched)


def prompt(made: Object, tokens: Sequence[int], heads: tuple[int, int], dim: int, tile: int, stages: int,
           rows: int) -> Launch:  # fmt: skip
    """Attention of a prompt, whose blocks end with these ``tokens`` in the order of the grid."""
    query_heads, kv_heads = heads
    turns = [-(-end // tile) for _ in range(kv_heads) for end in tokens]
    turn = Turn(4.0 * rows * dim * tile, "bf16", 2 * tile * dim * 2, stages - 1)
    longest = max(tokens)
    return Launch(made, turn, turns, stream=longest * (4 * query_heads + 4 * kv_heads) * dim)


# --- the table --------------------------------------------------------------------------------------------------------

#: Outputs and inputs of Llama 3 8B's linear layers.
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = "| case | kernel | waves | bytes, MB | limited by | time, µs | of the roofline |\n|---|---|---|---|---|---|---|"


def row(case: str, name: str, launch: Launch, ideal: float) -> str:
    """A row of the table; ``ideal`` is the time of the card's peak or bandwidth."""
    found = estimate(launch)
    cells = [
        case, name, f"{found.waves:.1f}", f"{found.bytes / 1e6:.0f}", found.limit, f"{found.seconds * 1e6:.1f}",
        f"{100 * ideal / found.seconds:.0f} %",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


class Table:
    """The cases of docs/gpu.md for kernels as compile_all.py describes them."""

    def __init__(self, made: Iterable[dict[str, Any]]) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from aiakq.kernels.triton import configs

        self._configs = configs
        configs.assume(configs.Gpu(configs.DEFAULT, PROCESSORS, 90))
        self._made = {kernel["name"]: kernel for kernel in made}

    def _object(self, name: str, warps: int) -> Object:
        kernel = self._made[f"{name} sm90"]
        return Object(kernel["registers"], kernel["shared"], warps, sum(kernel["loop"].values()))

    def _bucket(self, table: str, bits: int, m: int) -> str:
        buckets = self._configs.table(self._configs.DEFAULT, 90)[table][str(bits)]
        return next((most for most in buckets if m <= int(most)), list(buckets)[-1])

    def weight_only(self, m: int, layer: str) -> tuple[str, Launch]:
        """A product with 4-bit weights in groups of 128, bfloat16."""
        import torch

        n, k = LAYERS[layer]
        config = self._configs.choose("grouped", torch.device("cpu"), 4, n, k // 128, m)
        name = f"w4a16 g128 bf16 m{self._bucket('grouped', 4, m)}"
        tile = config.bm, config.bn, 128, config.stages, config.split
        return name, product(self._object(name, config.warps), "bf16", 4, (m, n, k), tile)

    def integers(self, m: int, layer: str) -> tuple[str, Launch]:
        """A product of 8-bit weights and activations."""
        import torch

        n, k = LAYERS[layer]
        config = self._configs.choose("integers", torch.device("cpu"), 8, n, k // 128, m)
        name = f"w8a8 m{self._bucket('integers', 8, m)}"
        tile = config.bm, config.bn, 128, config.stages, config.split
        return name, product(self._object(name, config.warps), "int8", 8, (m, n, k), tile)

    def decode(self, lengths: Sequence[int]) -> tuple[str, Launch]:
        """Attention of Llama 3 8B over a cache of bfloat16, one new token each."""
        import torch

        from aiakq.kernels.triton.attention_blocks import MAX_SPLITS, num_splits

        device = torch.device("cpu")
        config = self._configs.attention_config("decode", device, 2, 128, 8 * len(lengths))
        target = num_splits(device, len(lengths), 8, config.share)
        made = self._object("decode bf16", config.warps)
        tiles = [-(-length // config.tile) for length in lengths]
        # As split_kernel does.
        size = max(-(-sum(tiles) // target), -(-max(tiles) // MAX_SPLITS))
        counts = [-(-count // size) for count in tiles]
        return "decode bf16", decoding(made, lengths, 8, 128, config.tile, config.stages, 16, counts)

    def prefill(self, tokens: int) -> tuple[str, Launch]:
        """Attention of Llama 3 8B over a prompt."""
        import torch

        from aiakq.kernels.triton import attention_blocks
        from aiakq.kernels.types import AttentionContext

        device = torch.device("cpu")
        config = self._configs.attention_config("prefill", device, 2, 128, tokens)
        starts = torch.tensor([0, tokens], dtype=torch.int32)
        context = AttentionContext(
            query_start=starts, kv_len=starts[1:], slots=starts, page_table=starts[None], num_decodes=0,
            query_start_list=[0, tokens], kv_len_list=[tokens],
        )  # fmt: skip
        blocks = attention_blocks.query_blocks(context, config.share // 4, device)
        ends = [min(tokens, first + config.share // 4) for _, first in blocks.tolist()]
        made = self._object("prefill bf16", config.warps or 4)
        return "prefill bf16", prompt(made, ends, (32, 8), 128, config.tile, config.stages, config.share)

    def latent(self, lengths: Sequence[int], apart: bool = False) -> tuple[str, Launch]:
        """Attention of DeepSeek V3 over a cache of bfloat16, one new token each."""
        import torch

        from aiakq.kernels.triton.attention_blocks import MAX_SPLITS, num_splits
        from aiakq.kernels.triton.latent_attention import SHARE, config_of

        config = config_of(9, 128, True, 16)
        target = num_splits(torch.device("cpu"), len(lengths), 128 // config.heads, SHARE)
        tiles = [-(-length // config.tile) for length in lengths]
        size = max(-(-sum(tiles) // target), -(-max(tiles) // MAX_SPLITS))
        name, splits = "latent decode 128 heads bf16", [-(-count // size) for count in tiles]
        made = self._object(name, config.warps)
        return name, latents(made, lengths, splits, (128, 576, 512), config.tile, config.heads, apart)

    def rows(self) -> Iterator[str]:
        """All rows."""
        for m in (1, 16, 64, 256):
            for layer in ("gate_up", "o") if m == 1 else ("gate_up",):
                n, k = LAYERS[layer]
                ideal = max((n * k * 0.516 + 2 * m * (n + k)) / BANDWIDTH, 2.0 * m * n * k / PEAK["bf16"])
                yield row(f"W4A16 {layer}, {m} rows", *self.weight_only(m, layer), ideal)
        for m in (64, 2048, 8192, 16384):
            n, k = LAYERS["gate_up"]
            ideal = max((n * k + m * (k + 2 * n)) / BANDWIDTH, 2.0 * m * n * k / PEAK["int8"])
            yield row(f"W8A8 gate_up, {m} rows", *self.integers(m, "gate_up"), ideal)
        mixed = [32768] + [1024] * 63
        for case, lengths in (("8k", [8192]), ("64 of 8k", [8192] * 64), ("one of 32k, 63 of 1k", mixed)):
            yield row(f"decoding, {case}", *self.decode(lengths), sum(lengths) * 8 * 128 * 4 / BANDWIDTH)
        for case, lengths in (("16 of 8k", [8192] * 16), ("64 of 2k", [2048] * 64)):
            ideal = max(sum(lengths) * 1152 / BANDWIDTH, 2.0 * sum(lengths) * 128 * 1088 / PEAK["bf16"])
            for apart in (True, False):
                yield row(f"latents, {case}{', heads apart' * apart}", *self.latent(lengths, apart), ideal)
        for tokens in (2048, 8192):
            ideal = 2.0 * tokens * tokens * 32 * 128 / PEAK["bf16"]
            yield row(f"prompt of {tokens}", *self.prefill(tokens), ideal)


def main() -> None:
    made = json.loads(Path(sys.argv[1]).read_text())
    print(HEAD)
    for line in Table(made).rows():
        print(line)


if __name__ == "__main__":
    main()
