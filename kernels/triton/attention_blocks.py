"""Partitioning of attention among programs: splits of long sequences, and blocks of prompt tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.triton import configs
from aiakq.kernels.types import AttentionContext


def power_of_two(size: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def splits(device: torch.device, programs: int, share: int) -> int:
    """Return the number of splits per sequence that gives about ``share`` programs per multiprocessor."""
    processors = configs.gpu(device).processors
    if processors == 1:  # the interpreter
        return 2
    return max(1, min(64, -(-share * processors // programs)))


def query_blocks(context: AttentionContext, tokens: int, device: torch.device) -> Tensor:
    """Return the sequence and its first token of every program, [blocks, 2] int32; the same for all layers.

    Those that attend to most positions come first: programs start in this order, and a long one that starts last would
    run alone.
    """
    known: Tensor | None = context.plans.get(("triton", tokens))
    if known is None:
        starts, lengths = context.query_start_list, context.kv_len_list
        blocks: list[tuple[int, int, int]] = []
        for sequence in range(context.num_decodes, len(starts) - 1):
            count = starts[sequence + 1] - starts[sequence]
            before = lengths[sequence] - count
            blocks += [(-before - min(first + tokens, count), sequence, first) for first in range(0, count, tokens)]
        pairs = [(sequence, first) for _, sequence, first in sorted(blocks)]
        known = context.plans["triton", tokens] = torch.tensor(pairs, dtype=torch.int32).to(device, non_blocking=True)
    return known
