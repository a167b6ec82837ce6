"""The states that a step reads and writes, as tensors on its device, created once per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.types import AttentionContext

#: Tokens per program of the convolution.
TOKENS = 8


@dataclass(frozen=True)
class StateTables:
    """The states of S sequences, all int32.

    sources  [S] as in StateContext.
    firsts   [S + 1] first save of each sequence.
    saves    [N, 3] sequence, token, row.
    blocks   [B, 2] sequence, first token of a block of TOKENS.
    """

    sources: Tensor
    firsts: Tensor
    saves: Tensor
    blocks: Tensor


def state_tables(context: AttentionContext, device: torch.device) -> StateTables:
    """Return the tables of a step, created by the first layer that needs them."""
    tables: StateTables | None = context.plans.get("triton states")
    if tables is None:
        tables = context.plans["triton states"] = _made(context, device)
    return tables


def _made(context: AttentionContext, device: torch.device) -> StateTables:
    assert context.states is not None
    starts, firsts, saves, blocks = context.query_start_list, [0], [], []
    for s, kept in enumerate(context.states.saves):
        saves += [(s, token, row) for token, row in kept]
        firsts.append(len(saves))
        blocks += [(s, first) for first in range(0, starts[s + 1] - starts[s], TOKENS)]
    parts = [torch.tensor(part, dtype=torch.int32) for part in (context.states.sources, firsts, saves, blocks)]
    # One copy. Parts are aligned to 16 bytes, because Triton compiles another kernel for unaligned pointers.
    sizes = [part.numel() + -part.numel() % 4 for part in parts]
    whole = torch.zeros(sum(sizes), dtype=torch.int32)
    for part, place in zip(parts, whole.split(sizes), strict=True):
        place[: part.numel()] = part.flatten()
    placed = whole.to(device, non_blocking=True).split(sizes)
    return StateTables(*(place[: part.numel()].view(part.shape) for part, place in zip(parts, placed, strict=True)))
