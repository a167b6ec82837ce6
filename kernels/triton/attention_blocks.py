"""Partitioning of attention among programs: splits of decoding sequences, and blocks of prompt tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aiakq.kernels.transfer import on_device
from aiakq.kernels.triton import configs
from aiakq.kernels.types import AttentionContext

#: Maximum splits of a sequence, a power of two.
MAX_SPLITS = 64


def power_of_two(size: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


class Splits(NamedTuple):
    """The splits of the decoding sequences of a step.

    items   [W, 3] int32: sequence, first position, and the position after the last. Only the first ``starts[S]`` are
            used; W depends on the number of sequences only, so that a CUDA graph can launch W programs for any lengths.
    starts  [S + 1] int32: index of each sequence's first item.
    """

    items: Tensor
    starts: Tensor


def num_splits(device: torch.device, sequences: int, heads: int, share: int) -> int:
    """Return the number of splits of all ``sequences`` that gives about ``share`` programs per multiprocessor, if a
    split is computed by ``heads`` programs.
    """
    processors = configs.gpu(device).processors
    if processors == 1:  # the interpreter
        return 2 * sequences
    return -(-share * processors // heads)


def decode_splits(
    context: AttentionContext, device: torch.device, tile: int, target: int, window: int = 0, chunk_size: int = 0
) -> Splits:
    """Split the decoding sequences into about ``target`` items of nearly equal length; the same for all layers.

    An item has as many tiles as give ``target`` items in total, or ``MAX_SPLITS`` of the longest sequence. Since every
    sequence ends with an item that may be shorter, there are up to ``target + S - 1``. The list is made on the device,
    where a CUDA graph finds the lengths of its step; it depends on nothing but the lengths.
    """
    from aiakq.kernels.triton.attention_kernel import split_kernel

    key = ("triton splits", tile, target, window, chunk_size)
    known: Splits | None = context.plans.get(key)
    if known is None:
        S = context.num_decodes
        count = min(target + S - 1, MAX_SPLITS * S)
        items = torch.empty(count, 3, dtype=torch.int32, device=device)
        known = Splits(items, torch.empty(S + 1, dtype=torch.int32, device=device))
        split_kernel[(S + 1,)](
            context.kv_len, *known, S, target,
            TILE=tile, WINDOW=window, CHUNK=chunk_size, SPLITS=MAX_SPLITS, BLOCK=256, num_warps=2,
        )  # fmt: skip
        context.plans[key] = known
    return known


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
        known = context.plans["triton", tokens] = on_device(pairs, device, torch.int32)
    return known
