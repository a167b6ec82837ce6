"""The states that a step reads and writes, as tensors on its device, created once per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.recurrent_types import StateContext, StateTables
from aiakq.kernels.transfer import on_device
from aiakq.kernels.types import AttentionContext

#: Tokens per program of the convolution.
TOKENS = 8
#: The fewest tokens of a sequence whose recurrence is computed in chunks.
FEWEST = 32


def state_tables(context: AttentionContext, device: torch.device) -> StateTables:
    """Return the tables of a step, created by the first layer that needs them if the step does not bring them."""
    if isinstance(context.states, StateTables):
        return context.states
    tables: StateTables | None = context.plans.get("triton states")
    if tables is None:
        tables = context.plans["triton states"] = _made(context, device)
    return tables


def _made(context: AttentionContext, device: torch.device) -> StateTables:
    assert isinstance(context.states, StateContext)
    starts, firsts, saves, blocks = context.query_start_list, [0], [], []
    for s, kept in enumerate(context.states.saves):
        saves += [(s, token, row) for token, row in kept]
        firsts.append(len(saves))
        blocks += [(s, first) for first in range(0, starts[s + 1] - starts[s], TOKENS)]
    return StateTables(*_placed([context.states.sources, firsts, saves, blocks], device))


def _placed(tables: list[Any], device: torch.device) -> list[Tensor]:
    """Return int32 tensors of lists on ``device``."""
    parts = [torch.tensor(part, dtype=torch.int32) for part in tables]
    # One copy. Parts are aligned to 16 bytes, because Triton compiles another kernel for unaligned pointers.
    sizes = [part.numel() + -part.numel() % 4 for part in parts]
    whole = torch.zeros(sum(sizes), dtype=torch.int32)
    for part, place in zip(parts, whole.split(sizes), strict=True):
        place[: part.numel()] = part.flatten()
    placed = on_device(whole, device).split(sizes)
    return [place[: part.numel()].view(part.shape) for part, place in zip(parts, placed, strict=True)]


@dataclass(frozen=True)
class ChunkTables:
    """Chunks of tokens of the long sequences, those of at least FEWEST tokens, all int32.

    sequences  [L, 3] number of a long sequence, its first chunk, and the end of its chunks.
    chunks     [N, 3] row of the first token, tokens, and the row that receives the state after them or -1. Chunks end
               where a state is saved; one without tokens saves the state of the one before it again.
    """

    sequences: Tensor
    chunks: Tensor


def chunk_tables(context: AttentionContext, device: torch.device, size: int) -> ChunkTables:
    """Return the tables of a step with long sequences for chunks of at most ``size`` tokens."""
    tables: ChunkTables | None = context.plans.get(("triton chunks", size))
    if tables is None:
        assert isinstance(context.states, StateContext)
        starts, sequences = context.query_start_list, []
        chunks: list[tuple[int, int, int]] = []
        for s, kept in enumerate(context.states.saves):
            count, first = starts[s + 1] - starts[s], len(chunks)
            if count >= FEWEST:
                chunks += _chunks(starts[s], count, kept, size)
                sequences.append((s, first, len(chunks)))
        tables = context.plans["triton chunks", size] = ChunkTables(*_placed([sequences, chunks], device))
    return tables


def _chunks(start: int, count: int, saves: list[tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """Return the chunks of a sequence of ``count`` tokens from row ``start`` on."""
    chunks, begin = [], 0
    for token, row in [*saves, (count - 1, -1)]:
        while begin + size <= token:
            chunks.append((start + begin, size, -1))
            begin += size
        if begin <= token or row >= 0:
            chunks.append((start + begin, token + 1 - begin, row))
        begin = token + 1
    return chunks
