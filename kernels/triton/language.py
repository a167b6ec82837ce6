"""Helpers of all Triton kernels: dot products that also work in the interpreter, and conversion of codes to floats.

Triton's interpreter (TRITON_INTERPRET=1) computes on the raw bits of bfloat16, so bfloat16 is only ever loaded,
stored, reinterpreted and multiplied in ``dot``; everything else is float32. Inline assembly does not run there either,
so each function that uses it also has an equivalent plain version.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: (a & b) | c as the lookup table of lop3.
_AND_OR = "0xea"


def _assembly(bits: int, bf16: bool) -> str:
    """Return PTX for all planes of two int16 words: mask, add the exponent, and shift where the mantissa is short."""
    planes = 16 // bits
    lines = [".reg .b32 t;"]
    shifted = 0
    for plane in range(planes):
        at = plane * bits
        shift = at if bf16 else at // 8 * 8
        if shift != shifted:
            lines.append(f"shr.u32 t, ${planes}, {shift};")
            shifted = shift
        bit = at - shift
        mask = ((1 << bits) - 1) << bit
        exponent = 0x4300 if bf16 else 0x6400 - 0x400 * bit
        source = "t" if shift else f"${planes}"
        lines.append(f"lop3.b32 ${plane}, {source}, 0x{mask:04x}{mask:04x}, 0x{exponent:04x}{exponent:04x}, {_AND_OR};")
    return "{ " + " ".join(lines) + " }"


_ASM_2_FP16 = tl.constexpr(_assembly(2, False))
_ASM_2_BF16 = tl.constexpr(_assembly(2, True))
_ASM_4_FP16 = tl.constexpr(_assembly(4, False))
_ASM_4_BF16 = tl.constexpr(_assembly(4, True))
_ASM_8_FP16 = tl.constexpr(_assembly(8, False))
# bfloat16's mantissa has seven bits: the lower seven are placed on 128, which is subtracted where the eighth bit is 0.
_ASM_8_BF16 = tl.constexpr(
    "{ .reg .b32 t, low, high, less; mov.b32 less, 0xbf80bf80;"
    + "".join(
        f" {shift} lop3.b32 low, {source}, 0x007f007f, 0x43004300, {_AND_OR};"
        f" lop3.b32 high, {source}, 0x00800080, 0x00800080, 0x6a; mul.lo.u32 high, high, 0x86;"
        f" fma.rn.bf16x2 {plane}, high, less, low;"
        for plane, source, shift in (("$0", "$2", ""), ("$1", "t", "shr.u32 t, $2, 8;"))
    )
    + " }"
)

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a b for float16 or bfloat16, accumulated in float32."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def sum_parts(acc, parts_ptr, counts_ptr, at, mask, M, N, SPLIT: tl.constexpr):
    """Sum a tile over the SPLIT programs that share it (split-K); also return whether this is the last program, which
    alone has the sum.

    Tiles are along the first two axes of the grid, splits along the third. Partial sums are added in order.

    acc         this program's partial sum
    parts_ptr   [SPLIT, M, N] buffer for partial sums, accessed at ``at`` where the mask ``there`` is set
    counts_ptr  [tiles] int32, zero before and after
    """
    tl.store(parts_ptr + tl.program_id(2).to(tl.int64) * M * N + at, acc, mask=mask)
    tl.debug_barrier()
    counter = counts_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
    if last:
        tl.debug_barrier()
        acc = tl.zeros_like(acc)
        for other in range(SPLIT):
            theirs = parts_ptr + tl.cast(other, tl.int64) * M * N + at
            acc += tl.load(theirs, mask=mask, other=0, cache_modifier=".cg")
        tl.store(counter, 0)
    return acc, last


@triton.jit
def offset_of(plane: tl.constexpr, BITS: tl.constexpr, BF16: tl.constexpr):
    """Return the offset that ``plane_of`` adds to the codes of a plane."""
    # 8-bit codes are cast to bfloat16; all others are placed in the mantissa of a power of two.
    if BF16:
        return 0.0 if BITS == 8 else 128.0
    return 2.0 ** (10 - (plane * BITS) % 8)


@triton.jit
def plane_of(words, plane: tl.constexpr, BITS: tl.constexpr, BF16: tl.constexpr):
    """Return the codes at bits ``plane * BITS`` of int16 ``words`` plus ``offset_of``, exact in float16 or bfloat16."""
    mask: tl.constexpr = (1 << BITS) - 1
    # In float16 the codes stay at their bit position within the byte, for which the exponent compensates.
    bit: tl.constexpr = (plane * BITS) % 8
    if BF16 and BITS == 8:
        return ((words >> (plane * BITS)) & mask).to(tl.float32).to(tl.bfloat16)
    elif BF16:
        return (((words >> (plane * BITS)) & mask) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        byte = words >> 8 if plane * BITS >= 8 else words
        return ((byte & (mask << bit)) | (0x6400 - 0x400 * bit)).to(tl.float16, bitcast=True)


@triton.jit
def _planes_8(words, BF16: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        FLOAT: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        p0, p1 = tl.inline_asm_elementwise(
            _ASM_8_BF16 if BF16 else _ASM_8_FP16,
            "=r,=r,r",
            [words],
            (tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return (
            p0.to(FLOAT, bitcast=True),
            p1.to(FLOAT, bitcast=True),
        )
    else:
        return (
            plane_of(words, 0, 8, BF16),
            plane_of(words, 1, 8, BF16),
        )


@triton.jit
def _planes_4(words, BF16: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        FLOAT: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _ASM_4_BF16 if BF16 else _ASM_4_FP16,
            "=r,=r,=r,=r,r",
            [words],
            (tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return (
            p0.to(FLOAT, bitcast=True),
            p1.to(FLOAT, bitcast=True),
            p2.to(FLOAT, bitcast=True),
            p3.to(FLOAT, bitcast=True),
        )
    else:
        return (
            plane_of(words, 0, 4, BF16),
            plane_of(words, 1, 4, BF16),
            plane_of(words, 2, 4, BF16),
            plane_of(words, 3, 4, BF16),
        )


@triton.jit
def _planes_2(words, BF16: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        FLOAT: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            _ASM_2_BF16 if BF16 else _ASM_2_FP16,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            (tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return (
            p0.to(FLOAT, bitcast=True),
            p1.to(FLOAT, bitcast=True),
            p2.to(FLOAT, bitcast=True),
            p3.to(FLOAT, bitcast=True),
            p4.to(FLOAT, bitcast=True),
            p5.to(FLOAT, bitcast=True),
            p6.to(FLOAT, bitcast=True),
            p7.to(FLOAT, bitcast=True),
        )
    else:
        return (
            plane_of(words, 0, 2, BF16),
            plane_of(words, 1, 2, BF16),
            plane_of(words, 2, 2, BF16),
            plane_of(words, 3, 2, BF16),
            plane_of(words, 4, 2, BF16),
            plane_of(words, 5, 2, BF16),
            plane_of(words, 6, 2, BF16),
            plane_of(words, 7, 2, BF16),
        )


@triton.jit
def planes_of(words, BITS: tl.constexpr, BF16: tl.constexpr, PLAIN: tl.constexpr):
    """Return all planes of int16 ``words``, lowest bits first; with PLAIN by ``plane_of``."""
    ASM: tl.constexpr = not (PLAIN or INTERPRETED)
    if BITS == 8:
        return _planes_8(words, BF16, ASM)
    elif BITS == 4:
        return _planes_4(words, BF16, ASM)
    else:
        return _planes_2(words, BF16, ASM)
