"""Products of LoRA adapters for some rows of a linear layer: y += scale * B (A x), each row with an adapter of its own.

The rows of an adapter come in tiles of ROWS at most. ``shrink_kernel`` multiplies by A, several programs with a part of
the inputs each, and ``expand_kernel`` adds these parts up in their order and multiplies by B. All of it is float32 in
one order, and tiles have one size, so that a row's result does not depend on other rows. Adapters are found through a
table of addresses in the GPU's memory, and tiles through another: a CUDA graph of these kernels stays right when both
change, and tiles without rows end at once.

The table, int64, has a line per adapter: A, scales, kind of its numbers (0 float32, 1 float16, 2 bfloat16), number of
parts, rank of all parts; then for each part its first output, outputs, first rank, rank, B, bias and factors (0: none).
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of a line of the table before the first part, and of a part.
HEAD = tl.constexpr(5)
PART = tl.constexpr(7)


@triton.jit
def _numbers(address, at, there, kind):
    """Numbers of an adapter as float32, zero where they are not ``there``."""
    if kind == 0:
        values = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + at, mask=there, other=0.0)
    elif kind == 1:
        halves = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16) + at, mask=there, other=0.0)
        values = halves.to(tl.float32)
    else:
        brains = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + at, mask=there, other=0.0)
        values = brains.to(tl.float32)
    return values


@triton.jit
def shrink_kernel(
    x_ptr,  # [M, K]
    table_ptr,  # [adapters, LINE] int64
    tiles_ptr,  # [tiles, 3] int32: adapter, first of its rows, number of them
    rows_ptr,  # int32
    inner_ptr,  # [SPLIT, M, rank of all parts] float32
    x_stride,
    inner_stride,
    split_stride,
    K: tl.constexpr,
    LINE: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of inputs of a program
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A x for a tile of rows, RANKS ranks and a part of the inputs."""
    tile = tl.program_id(0)
    first_rank = tl.program_id(1) * RANKS
    split = tl.program_id(2)
    count = tl.load(tiles_ptr + 3 * tile + 2)
    if count > 0:
        line = table_ptr + tl.load(tiles_ptr + 3 * tile).to(tl.int64) * LINE
        rank = tl.load(line + 4)
        if first_rank < rank:
            address, kind = tl.load(line), tl.load(line + 2)
            own = tl.arange(0, ROWS)
            rows = tl.load(rows_ptr + tl.load(tiles_ptr + 3 * tile + 1) + own, mask=own < count, other=0).to(tl.int64)
            ranks = first_rank + tl.arange(0, RANKS)
            # Rows of A begin at multiples of 16 numbers.
            STRIDE: tl.constexpr = (K + 15) // 16 * 16
            sums = tl.zeros((ROWS, RANKS), tl.float32)
            for step in range(STEPS):
                k = (split * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
                there = (own < count)[:, None] & (k < K)[None, :]
                x = tl.load(x_ptr + rows[:, None] * x_stride + k[None, :], mask=there, other=0.0).to(tl.float32)
                at = ranks[None, :] * STRIDE + k[:, None]
                a = _numbers(address, at, (ranks < rank)[None, :] & (k < K)[:, None], kind)
                sums = tl.dot(x, a, sums, input_precision="ieee")
            at = split * split_stride + rows[:, None] * inner_stride + ranks[None, :]
            tl.store(inner_ptr + at, sums, mask=(own < count)[:, None] & (ranks < rank)[None, :])


@triton.jit
def expand_kernel(
    inner_ptr,  # of shrink_kernel
    table_ptr,
    tiles_ptr,
    rows_ptr,
    y_ptr,  # [M, N], in place
    base_bias_ptr,  # [N] float32
    inner_stride,
    split_stride,
    y_stride,
    LINE: tl.constexpr,
    SPLIT: tl.constexpr,
    BASE_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What an adapter adds to BLOCK outputs of a tile of rows; LoraPart in ops/lora.py says what that is."""
    tile = tl.program_id(0)
    begin = tl.program_id(1) * BLOCK
    count = tl.load(tiles_ptr + 3 * tile + 2)
    if count > 0:
        line = table_ptr + tl.load(tiles_ptr + 3 * tile).to(tl.int64) * LINE
        scales_address, kind = tl.load(line + 1), tl.load(line + 2)
        own = tl.arange(0, ROWS)
        rows = tl.load(rows_ptr + tl.load(tiles_ptr + 3 * tile + 1) + own, mask=own < count, other=0).to(tl.int64)
        column = begin + tl.arange(0, BLOCK)
        for number in range(tl.load(line + 3).to(tl.int32)):
            part = line + HEAD + number * PART
            first, outputs = tl.load(part), tl.load(part + 1)
            if (first < begin + BLOCK) & (first + outputs > begin):
                first_rank, rank = tl.load(part + 2), tl.load(part + 3)
                output = column - first
                inside = (output >= 0) & (output < outputs)
                stride = (outputs + 15) // 16 * 16
                sums = tl.zeros((ROWS, BLOCK), tl.float32)
                for before in range(0, rank.to(tl.int32), RANKS):
                    ranks = before + tl.arange(0, RANKS)
                    at = rows[:, None] * inner_stride + (first_rank + ranks)[None, :]
                    there = (own < count)[:, None] & (ranks < rank)[None, :]
                    inner = tl.zeros((ROWS, RANKS), tl.float32)
                    for split in range(SPLIT):
                        inner += tl.load(inner_ptr + split * split_stride + at, mask=there, other=0.0)
                    scale = _numbers(scales_address, first_rank + ranks, ranks < rank, 0)
                    at = ranks[:, None] * stride + output[None, :]
                    b = _numbers(tl.load(part + 4), at, (ranks < rank)[:, None] & inside[None, :], kind)
                    sums = tl.dot(inner * scale[None, :], b, sums, input_precision="ieee")
                if tl.load(part + 5) != 0:
                    sums += _numbers(tl.load(part + 5), output, inside, 0)[None, :]
                y_at = y_ptr + rows[:, None] * y_stride + column[None, :]
                there = (own < count)[:, None] & inside[None, :]
                y = tl.load(y_at, mask=there, other=0.0).to(tl.float32)
                if tl.load(part + 6) != 0:
                    factor = _numbers(tl.load(part + 6), output, inside, 0)[None, :]
                    product = y
                    if BASE_BIAS:
                        product = y - tl.load(base_bias_ptr + column, mask=inside, other=0.0)[None, :]
                    sums = factor * product + (1.0 + factor) * sums
                tl.store(y_at, (y + sums).to(y_ptr.dtype.element_ty), mask=there)
