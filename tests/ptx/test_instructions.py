"""Instructions of the emulator, one at a time, against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx.kernels import run
from ptx.program import RunOptions
from ptx.text import UnknownPtx

EDGES = np.array(
    [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x3F800000, 0xBF800000, 0x7F7FFFFF,
     0x00000001, 0x807FFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678],
    np.uint32,
)  # fmt: skip


def words(count: int, seed: int = 0) -> np.ndarray:
    """Return [256, count] uint32: bits of all kinds, edges among them."""
    random = np.random.default_rng(seed)
    made = random.integers(0, 2**32, (256, count), dtype=np.uint32)
    edges = random.choice(EDGES, (128, count))
    return np.concatenate([made[:128], edges])


def floats(count: int, seed: int = 0) -> np.ndarray:
    """Return [256, count] float32 of very different sizes, zeros among them."""
    random = np.random.default_rng(seed)
    made = (random.standard_normal((256, count)) * 2.0 ** random.integers(-12, 12, (256, count))).astype(np.float32)
    made[::17] = 0
    return made


LOAD = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2]; "
STORE = " st.global.b32 [%rd3], %r5;"


def computed(instruction: str, given: np.ndarray) -> np.ndarray:
    """The word that ``instruction`` leaves in %r5, with the four words of input in %r1 to %r4."""
    return run(LOAD + instruction + STORE, given.view(np.uint32), threads=len(given))[:, 0]


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(np.int32).astype(np.int64)


def unsigned(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint64).astype(object)


INTEGERS = {
    "add.s32 %r5, %r1, %r2;": lambda a, b, c: a + b,
    "sub.s32 %r5, %r1, %r2;": lambda a, b, c: a - b,
    "mul.lo.s32 %r5, %r1, %r2;": lambda a, b, c: a * b,
    "mad.lo.s32 %r5, %r1, %r2, %r3;": lambda a, b, c: a * b + c,
    "mul.hi.u32 %r5, %r1, %r2;": lambda a, b, c: np.array([int(x) * int(y) >> 32 for x, y in zip(a, b, strict=True)]),
    "mov.b64 %rd5, {%r1, %r2}; mul.hi.u64 %rd6, %rd5, -3689348814741910323; cvt.u32.u64 %r5, %rd6;": lambda a, b, c:
        np.array([(int(y) << 32 | int(x)) * 0xCCCCCCCCCCCCCCCD >> 64 for x, y in zip(a, b, strict=True)], object),
    "cvt.u16.u32 %rs1, %r1; mul.hi.u16 %rs2, %rs1, 9363; cvt.u32.u16 %r5, %rs2;":
        lambda a, b, c: (a & np.uint32(0xFFFF)) * np.uint32(9363) >> np.uint32(16),
    "min.u32 %r5, %r1, %r2;": lambda a, b, c: np.minimum(a, b),
    "min.s32 %r5, %r1, %r2;": lambda a, b, c: np.minimum(signed(a), signed(b)),
    "max.s32 %r5, %r1, %r2;": lambda a, b, c: np.maximum(signed(a), signed(b)),
    "shl.b32 %r5, %r1, 5;": lambda a, b, c: a << np.uint32(5),
    "shr.s32 %r5, %r1, 7;": lambda a, b, c: signed(a) >> 7,
    "shr.u32 %r5, %r1, 40;": lambda a, b, c: a & np.uint32(0),
    "shr.s32 %r5, %r1, 40;": lambda a, b, c: signed(a) >> 31,
    "bfe.u32 %r5, %r1, 4, 14;": lambda a, b, c: (a >> np.uint32(4)) & np.uint32(0x3FFF),
    "bfe.s32 %r5, %r1, 3, 1;": lambda a, b, c: -((signed(a) >> 3) & 1),
    "bfe.s32 %r5, %r1, 28, 9;": lambda a, b, c: signed(a) >> 28,
    "lop3.b32 %r5, %r1, %r2, %r3, 0xea;": lambda a, b, c: (a & b) | c,
    "lop3.b32 %r5, %r1, %r2, %r3, 0x6a;": lambda a, b, c: (a & b) ^ c,
    "prmt.b32 %r5, %r1, %r2, 0x5140;": lambda a, b, c: (a & 0xFF) | (b & 0xFF) << np.uint32(8)
    | (a & 0xFF00) << np.uint32(8) | (b & 0xFF00) << np.uint32(16),
    "prmt.b32 %r5, %r1, %r2, 0xbbbb;": lambda a, b, c: np.where(a >> np.uint32(31), 0xFFFFFFFF, 0),
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r5, %r3, 7, %p1;": lambda a, b, c: np.where(signed(a) < signed(b), c, 7),
    "setp.lt.u32 %p1, %r1, %r2; selp.b32 %r5, %r3, 7, %p1;": lambda a, b, c: np.where(a < b, c, 7),
    "setp.ge.u32 %p1, %r1, %r2; setp.ne.s32 %p2, %r1, %r3; and.pred %p3, %p1, %p2; selp.b32 %r5, 1, 0, %p3;":
        lambda a, b, c: (a >= b) & (a != c),
    "mov.b32 %r5, 9; setp.eq.s32 %p1, %r1, %r2; @!%p1 mov.b32 %r5, %r3;": lambda a, b, c: np.where(a == b, 9, c),
    "cvt.s64.s32 %rd5, %r1; shr.s64 %rd6, %rd5, 8; cvt.u32.u64 %r5, %rd6;": lambda a, b, c: signed(a) >> 8,
    "mov.b64 %rd5, {%r1, %r2}; shr.u64 %rd6, %rd5, 16; cvt.u32.u64 %r5, %rd6;":
        lambda a, b, c: (a >> np.uint32(16)) | (b << np.uint32(16)),
    "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r5, {%rs2, %rs1};":
        lambda a, b, c: (a >> np.uint32(16)) | (a << np.uint32(16)),
    "mov.b32 {_, %rs2}, %r1; cvt.s32.s8 %r5, %rs2;": lambda a, b, c: signed(a >> np.uint32(16)).astype(np.int8),
    "{ .reg .b32 t; shr.u32 t, %r1, 4; mov.b32 %r5, t; }": lambda a, b, c: a >> np.uint32(4),
    "mad.wide.s32 %rd5, %r1, 8192, 5; shr.s64 %rd6, %rd5, 13; cvt.u32.u64 %r5, %rd6;": lambda a, b, c: a,
}  # fmt: skip


@pytest.mark.parametrize("instruction", INTEGERS)
def test_integers_and_bits(instruction):
    given = words(4)
    wanted = INTEGERS[instruction](given[:, 0], given[:, 1], given[:, 2])
    found = computed(instruction, given)
    assert [int(x) for x in found] == [int(x) & 0xFFFFFFFF for x in wanted]


def as_tensor(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(x.copy()).to(dtype)


def bits_of(x: torch.Tensor) -> np.ndarray:
    """The bits of floats of 16 bits as words, or of float32."""
    if x.dtype == torch.float32:
        return x.numpy().view(np.uint32)
    return x.view(torch.uint16).to(torch.int32).numpy().view(np.uint32)


def cut_to_half(x: np.ndarray) -> np.ndarray:
    """The nearest float of 16 bits that is not larger in magnitude."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    return np.where(np.abs(half) > np.abs(x), np.nextafter(half, np.float16(0)), half).astype(np.float32)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """To float16, cut off at the largest e4m3, and to that."""
    half = as_tensor(x, torch.float16).clamp(-448, 448)
    return half.to(torch.float8_e4m3fn).float().numpy()


FLOATS = {
    "add.f32 %r5, %r1, %r2;": lambda a, b, c: a + b,
    "sub.f32 %r5, %r1, %r2;": lambda a, b, c: a - b,
    "mul.f32 %r5, %r1, %r2;": lambda a, b, c: a * b,
    "div.rn.f32 %r5, %r1, 0f40400000;": lambda a, b, c: a / np.float32(3),
    "neg.f32 %r5, %r1;": lambda a, b, c: -a,
    "abs.f32 %r5, %r1;": lambda a, b, c: np.abs(a),
    "min.f32 %r5, %r1, %r2;": lambda a, b, c: np.fmin(a, b),
    "max.f32 %r5, %r1, 0f7FC00000;": lambda a, b, c: a,
    "mul.f32 %r5, %r1, 0f00000001; mul.ftz.f32 %r6, %r5, 0f4B000000; add.f32 %r5, %r6, %r2;": lambda a, b, c: b + 0.0,
    "setp.gtu.f32 %p1, %r1, 0f7FC00000; selp.f32 %r5, %r2, 0f00000000, %p1;": lambda a, b, c: b,
    "setp.gt.f32 %p1, %r1, %r2; selp.f32 %r5, %r2, %r3, %p1;": lambda a, b, c: np.where(a > b, b, c),
    "cvt.rzi.s32.f32 %r6, %r1; cvt.rn.f32.s32 %r5, %r6;": lambda a, b, c: np.trunc(a) + 0.0,
    "cvt.rni.s32.f32 %r6, %r1; cvt.rn.f32.s32 %r5, %r6;": lambda a, b, c: np.rint(a) + 0.0,
    "cvt.rzi.s16.f32 %rs1, %r1; cvt.rn.f32.s16 %r5, %rs1;": lambda a, b, c: np.clip(np.trunc(a), -32768, 32767) + 0.0,
    "cvt.rn.bf16.f32 %rs1, %r1; cvt.f32.bf16 %r5, %rs1;": lambda a, b, c: as_tensor(a, torch.bfloat16).float().numpy(),
    "cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r5, %rs1;": lambda a, b, c: as_tensor(a, torch.float16).float().numpy(),
    "cvt.rz.f16.f32 %rs1, %r1; cvt.f32.f16 %r5, %rs1;": lambda a, b, c: cut_to_half(a),
    "cvt.rn.f16x2.f32 %r6, %r1, %r1; cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r6; cvt.rn.f16x2.e4m3x2 %r7, %rs1;"
    "mov.b32 {%rs2, %rs3}, %r7; cvt.f32.f16 %r5, %rs3;": lambda a, b, c: to_e4m3(a),
    "mov.b32 {%b0, %b1, %b2, %b3}, %r1; cvt.rn.f32.s8 %r5, %b3;":
        lambda a, b, c: (a.view(np.int32) >> 24).astype(np.float32),
}  # fmt: skip


@pytest.mark.parametrize("instruction", FLOATS)
def test_floats(instruction):
    given = floats(4)
    wanted = FLOATS[instruction](given[:, 0], given[:, 1], given[:, 2]).astype(np.float32)
    assert np.array_equal(computed(instruction, given), wanted.view(np.uint32))


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_floats_of_16_bits_are_rounded_once(name, dtype):
    given = floats(4)
    a, b, c = (as_tensor(given[:, n], dtype) for n in range(3))
    halves = "".join(f"cvt.rn.{name}.f32 %rs{n}, %r{n}; " for n in (1, 2, 3))
    for operation, wanted in {"add": a.double() + b, "sub": a.double() - b.double(), "mul": a.double() * b}.items():
        found = computed(f"{halves}{operation}.{name} %rs5, %rs1, %rs2; cvt.u32.u16 %r5, %rs5;", given)
        assert np.array_equal(found, bits_of(wanted.float().to(dtype)))
    # Exact as integers of 2 ** -60, but for the final rounding.
    found = computed(f"{halves}fma.rn.{name} %rs5, %rs1, %rs2, %rs3; cvt.u32.u16 %r5, %rs5;", given)
    whole = [[int(x * 2.0**60) for x in half.tolist()] for half in (a, b, c)]
    exact = [x * y + z * 2**60 for x, y, z in zip(*whole, strict=True)]
    assert np.array_equal(found, [nearest_bits(number, dtype) for number in exact])
    pairs = f"cvt.rn.{name}x2.f32 %r6, %r1, %r2; cvt.rn.{name}x2.f32 %r7, %r3, %r4; "
    both = computed(f"{pairs}fma.rn.{name}x2 %r5, %r6, %r7, %r6; shr.u32 %r5, %r5, 16;", given)
    one = computed(f"{halves}fma.rn.{name} %rs5, %rs1, %rs3, %rs1; cvt.u32.u16 %r5, %rs5;", given)
    assert np.array_equal(both, one)


def nearest_bits(number: int, dtype: torch.dtype) -> int:
    """The bits of the float of 16 bits that is nearest to number * 2 ** -120, ties to even."""
    digits, least, largest = (11, -24, 65504.0) if dtype == torch.float16 else (8, -133, 3.39e38)
    size = abs(number)
    # The exponent of the last digit that the float has.
    last = max(size.bit_length() - digits, least + 120)
    steps, rest = divmod(size, 1 << last) if last > 0 else (size << -last, 0)
    half = 1 << last - 1 if last > 0 else 1
    steps += rest > half or (rest == half and steps & 1)
    value = float(steps) * 2.0 ** (last - 120)
    made = torch.tensor(-value if number < 0 else value, dtype=torch.float64).float().to(dtype)
    assert value > largest or float(made) == (-value if number < 0 else value)
    return int(bits_of(made[None])[0])


def test_an_exchange_takes_registers_of_other_lanes():
    given = np.arange(64, dtype=np.uint32)[:, None] + 100
    load = "ld.global.b32 %r1, [%rd2]; "
    lane = np.arange(64)
    for instruction, source in {
        "shfl.sync.bfly.b32 %r5, %r1, 5, 31, -1;": lane ^ 5,
        "shfl.sync.idx.b32 %r5, %r1, 3, 31, -1;": lane // 32 * 32 + 3,
        "shfl.sync.up.b32 %r5, %r1, 2, 0, -1;": np.where(lane % 32 >= 2, lane - 2, lane),
        "shfl.sync.down.b32 %r5, %r1, 30, 31, -1;": np.where(lane % 32 < 2, lane + 30, lane),
        "shfl.sync.down.b32 %r5, %r1, 3, 0x181f, -1;": np.where(lane % 8 < 5, lane + 3, lane),
    }.items():
        assert np.array_equal(run(load + instruction + STORE, given, threads=64)[:, 0], given[source, 0]), instruction


def test_lanes_are_reduced_to_one_number():
    given = np.random.default_rng(4).integers(0, 2**32, (64, 1), dtype=np.uint64).astype(np.uint32)
    load = "ld.global.b32 %r1, [%rd2]; mov.b32 %r2, -1; "
    for kind in (np.int32, np.uint32):
        warps = given.view(kind).reshape(2, 32)
        for name, wanted in (("add", warps.sum(1, dtype=kind)), ("min", warps.min(1)), ("max", warps.max(1))):
            instruction = f"redux.sync.{name}.{'s32' if kind is np.int32 else 'u32'} %r5, %r1, %r2;"
            found = run(load + instruction + STORE, given, threads=64)[:, 0]
            assert np.array_equal(found, np.repeat(wanted, 32).view(np.uint32)), instruction


#: Where lane l has the elements of a fragment of A: row and column of each half or byte, by register.
def fragment_places(rows: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and position along K [32, registers, elements] of A [16, K], or of B transposed [8, K]."""
    lane, elements = np.arange(32), depth // 4 // 2
    down = [0, 8, 0, 8] if rows == 16 else [0, 0]
    along = [0, 0, depth // 2, depth // 2] if rows == 16 else [0, depth // 2]
    row = lane[:, None] // 4 + np.array(down)
    k = (lane % 4)[:, None, None] * elements + np.array(along)[None, :, None] + np.arange(elements)
    return np.broadcast_to(row[:, :, None], k.shape), k


def packed(matrix: np.ndarray) -> np.ndarray:
    """The registers [32, registers] of a matrix of 16 bits or of bytes."""
    row, k = fragment_places(*matrix.shape)
    return np.ascontiguousarray(matrix[row, k]).view(np.uint32)[..., 0]


@pytest.mark.parametrize("kind", ["bf16", "f16", "e4m3", "s8"])
def test_matrices_are_multiplied(kind):
    random = np.random.default_rng(3)
    depth = 32 if kind in ("s8", "e4m3") else 16
    if kind == "s8":
        a, b = (random.integers(-128, 128, (n, depth)).astype(np.int8) for n in (16, 8))
        c = random.integers(-(2**20), 2**20, (16, 8)).astype(np.int32)
        exact = a.astype(np.int64) @ b.astype(np.int64).T + c
        registers = [packed(a), packed(b)]
    else:
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}[kind]
        left, right = (torch.from_numpy(random.standard_normal((n, depth))).to(dtype) for n in (16, 8))
        c = random.standard_normal((16, 8)).astype(np.float32)
        exact = (left.double() @ right.double().T).numpy() + c
        size = np.uint8 if kind == "e4m3" else np.uint16
        registers = [packed(x.view(torch.uint8).numpy().view(size)) for x in (left, right)]
    lane = np.arange(32)
    places = (lane[:, None] // 4 + np.array([0, 0, 8, 8]), (lane[:, None] % 4) * 2 + np.array([0, 1, 0, 1]))
    given = np.concatenate([*registers, c.view(np.uint32)[places]], axis=1)
    name = f"m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    name = "m16n8k32.row.col.satfinite.s32.s8.s8.s32" if kind == "s8" else name
    found = run(
        "ld.global.b32 %r10, [%rd2]; " + "".join(f"ld.global.b32 %r{10 + n}, [%rd2+{4 * n}]; " for n in range(1, 10))
        + f"mma.sync.aligned.{name} {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, "
        "{%r16, %r17, %r18, %r19}; st.global.v4.b32 [%rd3], {%r20, %r21, %r22, %r23};",
        given, outputs=4,
    )  # fmt: skip
    assert np.array_equal(found, exact.astype(c.dtype).view(np.uint32)[places])


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_from_shared_memory(transposed):
    given = np.random.default_rng(0).integers(0, 2**32, (32, 4), dtype=np.uint32)
    matrices = given.view(np.uint16).reshape(4, 8, 8)
    found = run(
        LOAD + "shl.b32 %r6, %r0, 4; st.shared.v4.b32 [%r6], {%r1, %r2, %r3, %r4}; "
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.shared.b16 {{%r11, %r12, %r13, %r14}}, [%r6]; "
        "st.global.v4.b32 [%rd3], {%r11, %r12, %r13, %r14};",
        given, outputs=4,
    )  # fmt: skip
    own = matrices.transpose(0, 2, 1) if transposed else matrices
    assert np.array_equal(found.view(np.uint16).reshape(32, 4, 2), own.reshape(4, 32, 2).transpose(1, 0, 2))


def test_a_copy_fills_with_zeros_what_it_does_not_read():
    given = np.arange(128, dtype=np.uint32).reshape(32, 4) + 1
    found = run(
        "shl.b32 %r6, %r0, 4; setp.lt.u32 %p1, %r0, 8; selp.b32 %r7, 16, 8, %p1; setp.lt.u32 %p2, %r0, 30; "
        "selp.b32 %r7, %r7, 0, %p2; cp.async.cg.shared.global [ %r6 + 0 ], [ %rd2 + 0 ], 0x10, %r7; "
        "cp.async.commit_group; cp.async.wait_group 0; ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6]; "
        "st.global.v4.b32 [%rd3], {%r1, %r2, %r3, %r4};",
        given, outputs=4,
    )  # fmt: skip
    given[8:, 2:] = given[30:] = 0
    assert np.array_equal(found, given)


def test_atomics_return_the_old_value_and_lanes_part_and_meet():
    # Every lane of 3 blocks adds 1; the last one of all stores how many there were.
    body = """
        mov.b32 %r5, 0; setp.lt.u32 %p1, %r0, 10; @%p1 bra $add; add.s32 %r5, %r5, 1;
        $add: atom.global.gpu.acq_rel.add.u32 %r6, [ %rd0 + 0 ], 1; setp.ne.s32 %p2, %r6, 95; @%p2 bra $end;
        shl.b32 %r5, %r5, 8; add.s32 %r5, %r5, %r6; st.global.b32 [%rd1], %r5; $end:
    """
    given = np.zeros((32, 1), np.uint32)
    found = run(body, given, blocks=3)
    assert given[0, 0] == 96 and found[0, 0] == 256 + 95


@pytest.mark.parametrize(
    "statement",
    ["frob.b32 %r1, %r2;", "add.f64 %rd5, %rd6, %rd7;", "add.s32 %r1, %rd2, %r3;", "ld.local.b32 %r1, [%r2];",
     "ld.shared.b32 %rs1, [%r2];",
     "vote.sync.any.pred %p1, %p2, -1;", "mov.u32 %r1, %laneid;"],
)  # fmt: skip
def test_what_is_not_known_is_named(statement):
    with pytest.raises(UnknownPtx, match=statement.split()[0] if "laneid" not in statement else "%laneid"):
        run(statement)


def test_sums_of_tensor_cores_may_be_cut_off():
    # To 1, the product of two float16 is added: 2 ** -12 * 1.5 * 2 ** -12 is more than half of the last place.
    body = (
        "mov.b32 %r1, 0; setp.eq.u32 %p1, %r0, 0; @%p1 mov.b32 %r1, 0x0c00; mov.b32 %r2, 0x0e000e00;"
        "mov.b32 %r3, 0f3f800000; mov.b32 %r4, 0;"
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r5, %r6, %r7, %r8}, {%r1, %r4, %r4, %r4}, {%r2, %r4},"
        "{%r3, %r3, %r3, %r3};" + STORE
    )
    rounded, cut = (run(body, options=RunOptions(truncate=off))[0].view(np.float32)[0] for off in (False, True))
    assert rounded == 1 + 2.0**-23 and cut == 1


def test_sums_of_8_bit_floats_are_cut_off_at_the_13th_bit_after_the_first():
    # e4m3 has 1 as 0x38 and 2 ** -7 as 0x04: to 1, products of 2 ** -14 and of 2 ** -7 are added.
    body = (
        "mov.b32 %r1, 0; setp.eq.u32 %p1, %r0, 0; @%p1 mov.b32 %r1, 0x3804; mov.b32 %r2, 0x0404;"
        "mov.b32 %r3, 0f3f800000; mov.b32 %r4, 0;"
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r5, %r6, %r7, %r8}, {%r1, %r4, %r4, %r4}, {%r2, %r4},"
        "{%r3, %r3, %r3, %r3};" + STORE
    )
    rounded, cut = (run(body, options=RunOptions(truncate=off))[0].view(np.float32)[0] for off in (False, True))
    assert rounded == 1 + 2.0**-7 + 2.0**-14 and cut == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("name", "exact", "bound"),
    [("ex2.approx.ftz.f32", np.exp2, 2.0**-22), ("rcp.approx.ftz.f32", lambda x: 1 / x, 2.0**-23),
     ("rsqrt.approx.f32", lambda x: x**-0.5, 2.0**-22.9), ("sqrt.approx.f32", np.sqrt, 2.0**-23),
     ("tanh.approx.f32", np.tanh, 2.0**-11)],
)  # fmt: skip
def test_approximations_may_be_off_by_their_bound(name, exact, bound):
    given = np.linspace(0.1, 9, 256, dtype=np.float32)[:, None]
    body = f"ld.global.b32 %r1, [%rd2]; {name} %r5, %r1;" + STORE
    errors = []
    for approximate in (False, True):
        options = RunOptions(approximate=approximate)
        found = run(body, given.view(np.uint32), threads=256, options=options)[:, 0].view(np.float32)
        errors.append(np.abs(found / exact(given[:, 0].astype(np.float64)) - 1))
    assert errors[0].max() < 2.0**-23, "as exact as a float is"
    # Floats of which one or two fit into the bound are up to twice as far apart, and the exact result between two.
    assert 0.5 * bound < np.median(errors[1]) and errors[1].max() < 1.5 * bound + 2.0**-23


def test_a_logarithm_is_off_absolutely_where_it_is_small():
    given = np.linspace(0.6, 1.9, 64, dtype=np.float32)[:, None]
    body = "ld.global.b32 %r1, [%rd2]; lg2.approx.f32 %r5, %r1;" + STORE
    found = run(body, given.view(np.uint32), threads=64, options=RunOptions(approximate=True))[:, 0].view(np.float32)
    errors = np.abs(found - np.log2(given[:, 0].astype(np.float64)))
    assert 0.8 * 2.0**-22 < errors.min() and errors.max() < 1.3 * 2.0**-22
