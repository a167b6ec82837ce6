"""y = x W^T for weights of 2, 4 or 8 bits in groups, activations in float16 or bfloat16 (w2a16, w4a16, w8a16; 3 as 4).

Layout, packed once at load. A step of the inner loop takes ``16 * BKP / BITS`` inputs. An int16 word holds codes of one
output, one per plane: plane p of word i is input ``p * BKP + i`` of the step. Each plane is thus a dense tile that is
multiplied with a contiguous slice of x, and nothing is ever shuffled. Words are stored as [N / 64, steps, 64, BKP]: a
program reads one contiguous block of memory per step. Scale and zero point of a group share an int32 [groups, N], which
can be copied asynchronously, unlike 16 bits alone.

The product is computed as W x^T, because a tensor core takes its left operand from registers, where the codes are
unpacked, and because few activations then waste no rows. Codes enter it with an offset (language.py), which is
subtracted at the end by means of sums of the activations: ``sum (q + o - z - o) x = sum (q + o) x - (z + o) sum x``.
With more activations, dequantizing the weights first is cheaper (SCALE_FIRST).

Planes can also be put side by side in registers, for one product per step (JOINED). Triton waits for each product whose
left operand is in registers, except for the last of an iteration: if it is the only one, tensor cores work on a step
while the codes of the next are unpacked.

Several programs may share an output, each with a part of the inputs (split-K). The last to finish adds up the partial
sums in a fixed order, so results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import INTERPRETED, dot, offset_of, planes_of, sum_parts


@triton.jit
def write_sums(
    x,  # [BLOCK] float32, whole steps, zeros beyond K
    first,  # position of the first element
    row,
    sums_ptr,  # [steps, PLANES or 2, sums_stride] float32
    sums_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BKP: tl.constexpr,
    PER_PLANE: tl.constexpr,
    BF16: tl.constexpr,
):
    """Store the sums of activations that the product needs, in the order of the weights.

    PER_PLANE: one sum per plane. Otherwise two: the sum of all activations times the offset of their plane, and
    without.
    """
    PLANES: tl.constexpr = 16 // BITS
    COUNT: tl.constexpr = BLOCK // BKP
    plane = tl.arange(0, COUNT)
    sums = tl.sum(tl.reshape(x, (COUNT, BKP)), 1)
    if PER_PLANE:
        at = first // BKP + plane
        tl.store(sums_ptr + at * sums_stride + row, sums, mask=at * BKP < K)
    else:
        # offset_of each plane: powers of two that decrease with the position in the byte, or one constant. They are
        # made of their exponents, because GPUs only approximate exp2.
        offsets = ((127 + 10 - (plane * BITS) % 8) << 23).to(tl.float32, bitcast=True)
        if BF16:
            offsets = tl.full((COUNT,), 0.0 if BITS == 8 else 128.0, tl.float32)
        at = first // (BKP * PLANES) + tl.arange(0, COUNT // PLANES)
        mask = at * (BKP * PLANES) < K
        times = tl.sum(tl.reshape(sums * offsets, (COUNT // PLANES, PLANES)), 1)
        tl.store(sums_ptr + (2 * at) * sums_stride + row, times, mask=mask)
        alone = tl.sum(tl.reshape(sums, (COUNT // PLANES, PLANES)), 1)
        tl.store(sums_ptr + (2 * at + 1) * sums_stride + row, alone, mask=mask)


@triton.jit
def arrange_kernel(
    x_ptr,  # [M, K]
    perm_ptr,  # [K] int32
    out_ptr,  # [M, K] in the order of the weights
    sums_ptr,  # of write_sums
    x_stride,
    sums_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    BKP: tl.constexpr,
    PERM: tl.constexpr,
    SUMS: tl.constexpr,
    PER_PLANE: tl.constexpr,
):
    """Reorder BLOCK activations of one row to the order of the weights, and compute their sums."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    mask = at < K
    source = tl.load(perm_ptr + at, mask=mask, other=0) if PERM else at
    x = tl.load(x_ptr + row * x_stride + source, mask=mask, other=0.0)
    if PERM:
        tl.store(out_ptr + row * K + at, x, mask=mask)
    if SUMS:
        BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
        write_sums(
            tl.where(mask, x.to(tl.float32), 0.0), first, row, sums_ptr, sums_stride,
            K, BLOCK, BITS, BKP, PER_PLANE, BF16,
        )  # fmt: skip


@triton.jit
def _scale_and_zero(packed):
    """Unpack scale and zero point, both float32, from the halves of an int32."""
    scale = (packed & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (packed >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero


@triton.jit
def _weights(plane, offset, scale, zero):
    """Dequantize weights to the plane's dtype, rounded once.

    A fractional zero point does not fit into that dtype together with the offset: the remainder is subtracted
    afterwards in a fused multiply-add. The difference of two small integers is exact.
    """
    FLOAT: tl.constexpr = plane.dtype
    base = (zero + offset).to(FLOAT)
    left_over = ((zero + offset - base.to(tl.float32)) * scale).to(FLOAT)
    if INTERPRETED:
        difference = plane.to(tl.float32) - base.to(tl.float32)[:, None]
        weights = difference * scale.to(FLOAT).to(tl.float32)[:, None] - left_over.to(tl.float32)[:, None]
        return weights.to(FLOAT)
    else:
        return (plane - base[:, None]) * scale.to(FLOAT)[:, None] - left_over[:, None]


@triton.jit
def beside(a, b):
    """Return [BN, 2 K] of a, b [BN, K], the columns of ``a`` first; each thread keeps its elements."""
    BN: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (BN, 2 * K))


@triton.jit
def codes_beside(planes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT planes from FIRST on side by side, [BN, COUNT BKP]."""
    if COUNT == 1:
        return planes[FIRST]
    else:
        HALF: tl.constexpr = COUNT // 2
        return beside(codes_beside(planes, FIRST, HALF), codes_beside(planes, FIRST + HALF, HALF))


@triton.jit
def _weights_beside(
    planes, grid_at, step, FIRST: tl.constexpr, COUNT: tl.constexpr,
    N_PADDED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BKP: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Return the weights of COUNT planes from FIRST on side by side, [BN, COUNT BKP]."""
    if COUNT == 1:
        BK: tl.constexpr = 16 // BITS * BKP
        group = step * BK // GROUP if GROUP >= BK else (step * BK + FIRST * BKP) // GROUP
        scale, zero = _scale_and_zero(tl.load(grid_at + group * N_PADDED))
        return _weights(planes[FIRST], offset_of(FIRST, BITS, BF16), scale, zero)
    else:
        HALF: tl.constexpr = COUNT // 2
        return beside(
            _weights_beside(planes, grid_at, step, FIRST, HALF, N_PADDED, GROUP, BITS, BKP, BF16),
            _weights_beside(planes, grid_at, step, FIRST + HALF, HALF, N_PADDED, GROUP, BITS, BKP, BF16),
        )


@triton.jit
def _scales_per_plane(
    acc, planes, x_at, sums_ptr, sums_stride, grid_ptr, step, n, m,
    N_PADDED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BKP: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, SCALE_FIRST: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Accumulate the product of one step that contains group boundaries into ``acc``."""
    PLANES: tl.constexpr = 16 // BITS
    # Number of planes that share a scale.
    TOGETHER: tl.constexpr = GROUP // BKP
    for plane in tl.static_range(PLANES):
        x = tl.load(x_at + plane * BKP, eviction_policy="evict_last")
        offset = offset_of(plane, BITS, BF16)
        if plane % TOGETHER == 0:
            group = (step * (PLANES * BKP) + plane * BKP) // GROUP
            scale, zero = _scale_and_zero(tl.load(grid_ptr + group * N_PADDED + n))
            whole = tl.zeros((BN, BM), tl.float32)
            taken = tl.zeros((BM,), tl.float32)
            total = tl.zeros((BM,), tl.float32)
        if SCALE_FIRST:
            acc = dot(_weights(planes[plane], offset, scale, zero), x, acc)
        else:
            whole = dot(planes[plane], x, whole)
            sums = tl.load(sums_ptr + (step * PLANES + plane) * sums_stride + m)
            taken += offset * sums
            total += sums
            if plane % TOGETHER == TOGETHER - 1:
                acc += scale[:, None] * (whole - taken[None, :] - zero[:, None] * total[None, :])
    return acc


@triton.jit
def products(acc, planes, x_at, BITS: tl.constexpr, BKP: tl.constexpr, JOINED: tl.constexpr):
    """Accumulate the product of one step's planes as they are, including offsets of codes, into ``acc``."""
    if JOINED:
        codes = codes_beside(planes, 0, 16 // BITS)
        acc = dot(codes, tl.load(x_at, eviction_policy="evict_last"), acc)
    else:
        for plane in tl.static_range(16 // BITS):
            acc = dot(planes[plane], tl.load(x_at + plane * BKP, eviction_policy="evict_last"), acc)
    return acc


@triton.jit
def _products_of_weights(
    acc, planes, x_at, scale, zero, BITS: tl.constexpr, BKP: tl.constexpr, BF16: tl.constexpr
):  # fmt: skip
    """Accumulate the product of one step's weights, dequantized first, into ``acc``."""
    for plane in tl.static_range(16 // BITS):
        x = tl.load(x_at + plane * BKP, eviction_policy="evict_last")
        acc = dot(_weights(planes[plane], offset_of(plane, BITS, BF16), scale, zero), x, acc)
    return acc


@triton.jit
def grouped_loop(
    x_at,  # [BKP, BM] of the first plane; with JOINED [step, BM]
    sums_ptr,
    words_at,  # [BN, BKP] of the first step
    grid_ptr,
    sums_stride,
    n,
    m,
    begin,
    end,
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BKP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    JOINED: tl.constexpr,
    PLAIN: tl.constexpr,
    BF16: tl.constexpr,
):
    """W x^T over steps ``begin`` to ``end``, float32 [BN, BM]; arguments as in grouped_kernel."""
    BK: tl.constexpr = 16 // BITS * BKP
    # A single group over all inputs: its scale is applied at the end.
    WHOLE: tl.constexpr = GROUP == STEPS * BK and not SCALE_FIRST
    acc = tl.zeros((BN, BM), tl.float32)
    if WHOLE:
        taken = tl.zeros((BM,), tl.float32)
        total = tl.zeros((BM,), tl.float32)
    # With explicit stages, Triton also prefetches data that is not an operand of a product.
    for step in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + step * (64 * BKP), eviction_policy="evict_first")
        planes = planes_of(words, BITS, BF16, PLAIN)
        if JOINED and SCALE_FIRST:
            weights = _weights_beside(planes, grid_ptr + n, step, 0, 16 // BITS, N_PADDED, GROUP, BITS, BKP, BF16)
            acc = dot(weights, tl.load(x_at + step * BK, eviction_policy="evict_last"), acc)
        elif GROUP < BK:
            acc = _scales_per_plane(
                acc, planes, x_at + step * BK, sums_ptr, sums_stride, grid_ptr, step, n, m,
                N_PADDED, GROUP, BITS, BKP, BN, BM, SCALE_FIRST, BF16,
            )  # fmt: skip
        elif WHOLE:
            acc = products(acc, planes, x_at + step * BK, BITS, BKP, JOINED)
            taken += tl.load(sums_ptr + (2 * step) * sums_stride + m)
            total += tl.load(sums_ptr + (2 * step + 1) * sums_stride + m)
        else:
            scale, zero = _scale_and_zero(tl.load(grid_ptr + (step * BK // GROUP) * N_PADDED + n))
            if SCALE_FIRST:
                acc = _products_of_weights(acc, planes, x_at + step * BK, scale, zero, BITS, BKP, BF16)
            else:
                whole = products(tl.zeros((BN, BM), tl.float32), planes, x_at + step * BK, BITS, BKP, JOINED)
                taken = tl.load(sums_ptr + (2 * step) * sums_stride + m)
                total = tl.load(sums_ptr + (2 * step + 1) * sums_stride + m)
                acc += scale[:, None] * (whole - taken[None, :] - zero[:, None] * total[None, :])
    if WHOLE:
        scale, zero = _scale_and_zero(tl.load(grid_ptr + n))
        acc = scale[:, None] * (acc - taken[None, :] - zero[:, None] * total[None, :])
    return acc


# Do not recompile for every number of rows.
@triton.jit(do_not_specialize=["M"])
def grouped_kernel(
    x_ptr,  # [M, K] in the order of the weights
    sums_ptr,  # of write_sums; not with SCALE_FIRST
    words_ptr,  # [N / 64, STEPS, 64, BKP] int16
    grid_ptr,  # [groups, N] int32: scale below, zero above, both as float16
    factors_ptr,  # [N] float32: factor of all scales of an output
    bias_ptr,
    y_ptr,  # [M, N]
    parts_ptr,  # [SPLIT, M, N] float32
    counts_ptr,  # one per tile, 0 before and after
    x_stride,
    sums_stride,
    y_stride,
    M,
    N,
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs
    BITS: tl.constexpr,
    BKP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    JOINED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """W x^T for a tile of BN outputs and BM rows, over one of SPLIT parts of the inputs."""
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    # Programs that read the same weights follow each other: the weights are read from memory once.
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    part = tl.program_id(2)
    n = tile_n * BN + tl.arange(0, BN)
    m = tile_m * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0).to(tl.int64)
    begin = part * STEPS // SPLIT
    end = (part + 1) * STEPS // SPLIT
    # If the loop could be empty, ptxas would let every product of tensor cores wait for the one before it.
    tl.assume(begin < end)
    words_at = words_ptr + ((n // 64).to(tl.int64) * STEPS * 64 + n % 64)[:, None] * BKP + tl.arange(0, BKP)[None, :]
    TOGETHER: tl.constexpr = BKP * (16 // BITS) if JOINED else BKP
    x_at = x_ptr + row[None, :] * x_stride + tl.arange(0, TOGETHER)[:, None]
    acc = grouped_loop(
        x_at, sums_ptr, words_at, grid_ptr, sums_stride, n, m, begin, end,
        N_PADDED, STEPS, GROUP, BITS, BKP, BN, BM, STAGES, SCALE_FIRST, JOINED, PLAIN, FLOAT == tl.bfloat16,
    )  # fmt: skip
    acc *= tl.load(factors_ptr + n)[:, None]
    mask = (m < M)[None, :] & (n < N)[:, None]
    last = True
    if SPLIT > 1:
        at = row[None, :] * N + n[:, None]
        acc, last = sum_parts(acc, parts_ptr, counts_ptr, at, mask, M, N, SPLIT)
    if last:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        out = y_ptr + row[None, :] * y_stride + n[:, None]
        tl.store(out, acc.to(FLOAT), mask=mask)


@triton.jit
def dequantize_kernel(
    words_ptr,
    grid_ptr,
    factors_ptr,
    out_ptr,  # [N, K] in the order of the layout
    N,
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BKP: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Dequantize 64 outputs and one step of weights, for numbers of activations where a dense product is faster."""
    PLANES: tl.constexpr = 16 // BITS
    BK: tl.constexpr = PLANES * BKP
    K: tl.constexpr = STEPS * BK
    BF16: tl.constexpr = out_ptr.dtype.element_ty == tl.bfloat16
    tile = tl.program_id(0)
    step = tl.program_id(1)
    n = tile * 64 + tl.arange(0, 64)
    inside = tl.arange(0, BKP)
    at = (tile.to(tl.int64) * STEPS + step) * (64 * BKP) + tl.arange(0, 64)[:, None] * BKP + inside[None, :]
    planes = planes_of(tl.load(words_ptr + at), BITS, BF16, PLAIN)
    factors = tl.load(factors_ptr + n)
    for plane in tl.static_range(PLANES):
        group = (step * BK + plane * BKP) // GROUP
        scale, zero = _scale_and_zero(tl.load(grid_ptr + group * N_PADDED + n))
        weights = _weights(planes[plane], offset_of(plane, BITS, BF16), scale, zero).to(tl.float32)
        weights = (weights * factors[:, None]).to(out_ptr.dtype.element_ty)
        out = n.to(tl.int64)[:, None] * K + step * BK + plane * BKP + inside[None, :]
        tl.store(out_ptr + out, weights, mask=(n < N)[:, None])
