"""Conversion of codes that are floats of 8 or 4 bits to float16 and bfloat16, in registers.

A code has a sign, an exponent and MANTISSA bits. Moved to the top of a wider float's exponent and mantissa it is the
same number times a power of two, ``2 ** -shift_of``, subnormal numbers too, without a table or a condition. In float16
codes enter products so, and ``inverse_of`` is multiplied in afterwards. In bfloat16 sums of such products would be too
small for float32: codes are multiplied with the inverse first, exactly.

From sm_89 on GPUs convert e4m3 and e5m2 to float16 themselves (HARDWARE), with the same results. There is no such
instruction for bfloat16: by way of float16, two codes would take three conversions, which are slower than shifts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import INTERPRETED

#: Bits of the mantissa of a wider float, and the bias of its exponent: float16 and bfloat16.
_WIDE = {False: (10, 15), True: (7, 127)}


def shift_of(bits: int, mantissa: int, bf16: bool) -> int:
    """Return how many powers of two a moved code is too small."""
    return int(_WIDE[bf16][1] - 2 ** (bits - mantissa - 2) + 1)


def _moved(to: str, source: str, up: int) -> str:
    if up == 0:
        return f"mov.b32 {to}, {source};"
    return f"shl.b32 {to}, {source}, {up};" if up > 0 else f"shr.u32 {to}, {source}, {-up};"


def _assembly(bits: int, mantissa: int, bf16: bool) -> str:
    """Return PTX for all planes of two int16 words: move sign and rest, join them, and multiply for bfloat16."""
    planes = 16 // bits
    lines = [".reg .b32 s, t, f, z;"]
    if bf16:
        factor = (shift_of(bits, mantissa, True) + 127) << 7
        lines += [f"mov.b32 f, 0x{factor:04x}{factor:04x};", "mov.b32 z, 0x80008000;"]
    for plane in range(planes):
        up = _WIDE[bf16][0] - mantissa
        mask, sign, rest = ((1 << bits - 1) - 1) << up, 16 - bits * (plane + 1), up - bits * plane
        lines += [_moved("t", f"${planes}", rest)]
        if sign == rest:
            lines.append(f"and.b32 t, t, 0x{0x8000 | mask:04x}{0x8000 | mask:04x};")
        else:
            lines += [_moved("s", f"${planes}", sign), "and.b32 s, s, 0x80008000;"]
            lines.append(f"lop3.b32 t, t, 0x{mask:04x}{mask:04x}, s, 0xea;")  # (t & mask) | s
        lines.append(f"fma.rn.bf16x2 ${plane}, t, f, z;" if bf16 else f"mov.b32 ${plane}, t;")
    return "{ " + " ".join(lines) + " }"


def _conversion(name: str) -> str:
    """Return PTX that converts both planes of two int16 words by the GPU's own instruction."""
    lines = [".reg .b16 l, h;", ".reg .b32 u, v;", "mov.b32 {l, h}, $2;"]
    lines += [f"cvt.rn.f16x2.{name} u, l;", f"cvt.rn.f16x2.{name} v, h;"]
    return "{ " + " ".join([*lines, "prmt.b32 $0, u, v, 0x5410;", "prmt.b32 $1, u, v, 0x7632;"]) + " }"


_ASM_E4M3_FP16 = tl.constexpr(_assembly(8, 3, False))
_ASM_E4M3_BF16 = tl.constexpr(_assembly(8, 3, True))
_ASM_E5M2_FP16 = tl.constexpr(_assembly(8, 2, False))
_ASM_E5M2_BF16 = tl.constexpr(_assembly(8, 2, True))
_ASM_E2M1_FP16 = tl.constexpr(_assembly(4, 1, False))
_ASM_E2M1_BF16 = tl.constexpr(_assembly(4, 1, True))
_ASM_E4M3_CONVERTED = tl.constexpr(_conversion("e4m3x2"))
_ASM_E5M2_CONVERTED = tl.constexpr(_conversion("e5m2x2"))


@triton.jit
def inverse_of(BITS: tl.constexpr, MANTISSA: tl.constexpr, BF16: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the factor by which results of ``float_planes`` are too small."""
    if BF16 or (HARDWARE and not INTERPRETED):
        return 1.0
    return 2.0 ** (16 - 2 ** (BITS - MANTISSA - 2))


@triton.jit
def _plane(words, plane: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BF16: tl.constexpr):
    """The codes at bits ``plane * BITS`` without assembly."""
    UP: tl.constexpr = (7 if BF16 else 10) - MANTISSA
    MASK: tl.constexpr = ((1 << (BITS - 1)) - 1) << UP
    SIGN: tl.constexpr = 16 - BITS * (plane + 1)
    REST: tl.constexpr = UP - BITS * plane
    moved = words << REST if REST >= 0 else words >> (0 - REST)
    bits = ((words << SIGN) & -0x8000) | (moved & MASK)
    if BF16:
        INVERSE: tl.constexpr = 2.0 ** (128 - 2 ** (BITS - MANTISSA - 2))
        return ((bits.to(tl.int32) << 16).to(tl.float32, bitcast=True) * INVERSE).to(tl.bfloat16)
    else:
        return bits.to(tl.float16, bitcast=True)


@triton.jit
def _planes_8(words, MANTISSA: tl.constexpr, BF16: tl.constexpr, HARDWARE: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        FLOAT: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        MOVED: tl.constexpr = (
            (_ASM_E4M3_BF16 if BF16 else _ASM_E4M3_FP16)
            if MANTISSA == 3
            else (_ASM_E5M2_BF16 if BF16 else _ASM_E5M2_FP16)
        )
        CONVERTED: tl.constexpr = _ASM_E4M3_CONVERTED if MANTISSA == 3 else _ASM_E5M2_CONVERTED
        p0, p1 = tl.inline_asm_elementwise(
            CONVERTED if HARDWARE else MOVED, "=r,=r,r", [words], (tl.int16, tl.int16), is_pure=True, pack=2
        )
        return p0.to(FLOAT, bitcast=True), p1.to(FLOAT, bitcast=True)
    else:
        return _plane(words, 0, 8, MANTISSA, BF16), _plane(words, 1, 8, MANTISSA, BF16)


@triton.jit
def _planes_4(words, BF16: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        FLOAT: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _ASM_E2M1_BF16 if BF16 else _ASM_E2M1_FP16, "=r,=r,=r,=r,r", [words],
            (tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        return (
            p0.to(FLOAT, bitcast=True),
            p1.to(FLOAT, bitcast=True),
            p2.to(FLOAT, bitcast=True),
            p3.to(FLOAT, bitcast=True),
        )
    else:
        return (
            _plane(words, 0, 4, 1, BF16),
            _plane(words, 1, 4, 1, BF16),
            _plane(words, 2, 4, 1, BF16),
            _plane(words, 3, 4, 1, BF16),
        )


@triton.jit
def float_planes(
    words, BITS: tl.constexpr, MANTISSA: tl.constexpr, BF16: tl.constexpr, HARDWARE: tl.constexpr, PLAIN: tl.constexpr
):  # fmt: skip
    """Return all planes of int16 ``words`` as floats times 1 / ``inverse_of``, lowest bits first.

    HARDWARE: whether the GPU is to convert 8 bits to float16 itself, which PLAIN, without inline assembly, excludes.
    """
    ASM: tl.constexpr = not (PLAIN or INTERPRETED)
    if BITS == 8:
        return _planes_8(words, MANTISSA, BF16, HARDWARE, ASM)
    else:
        return _planes_4(words, BF16, ASM)
