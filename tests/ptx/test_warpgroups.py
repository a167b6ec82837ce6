"""Instructions of sm_90: products of warpgroups by descriptor and swizzle, stores of matrices, and their fences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx.kernels import run
from ptx.program import PtxFault

#: Bytes of the rows of a swizzled atom, by the code of the swizzle in a descriptor; 0: not swizzled.
ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}


def swizzled(at: np.ndarray, code: int) -> np.ndarray:
    """Where a byte of a pattern of 8 rows is: chunks of 16 bytes change places within a row."""
    return at ^ ((at // 128) % (ROW_BYTES[code] // 16)) * 16


def layout(lines: int, depth: int, size: int, code: int, k_major: bool, leading: int, stride: int) -> np.ndarray:
    """Return the offsets in bytes [lines, depth] of the elements of a matrix, by the tables of the PTX ISA.

    K-major: atoms are 8 lines of ROW_BYTES; without a swizzle, chunks along K are ``leading`` apart. Otherwise atoms
    are 8 positions along K of ROW_BYTES of lines, and ``leading`` is from one atom to the next along the lines.
    """
    row, line, k = ROW_BYTES[code], np.arange(lines)[:, None], np.arange(depth)[None, :] * size
    if k_major:
        along = k // 16 * leading + k % 16 if code == 0 else k
        return swizzled(line % 8 * row + line // 8 * stride + along, code)
    k, line = k // size, line * size
    if code == 0:
        return line // 16 * stride + line % 16 + k % 8 * 16 + k // 8 * leading
    return swizzled(line % row + line // row * leading + k % 8 * row + k // 8 * stride, code)


def descriptor(start: int, leading: int, stride: int, code: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | code << 62


def as_bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int8).numpy()


#: Code of the swizzle, whether A and B are K-major, offsets of leading dimension and stride, for 16 bits.
LAYOUTS = [
    (0, True, 2048, 128), (1, True, 16, 1024), (2, True, 16, 512), (3, True, 16, 256),
    (0, False, 2048, 128), (1, False, 2048, 1024), (2, False, 1024, 512), (3, False, 512, 256),
]  # fmt: skip

COPY = """
    mov.u32 %r1, 0; mov.u64 %rd4, %rd0; $copy: ld.global.b32 %r2, [%rd4]; st.shared.b32 [%r1], %r2;
    add.s32 %r1, %r1, 4; add.s64 %rd4, %rd4, 4; setp.lt.s32 %p1, %r1, 32768; @%p1 bra $copy;
"""
#: One warp copies the input to shared memory.
FILL = "setp.lt.u32 %p2, %r0, 32; @!%p2 bra $filled;" + COPY + "$filled: bar.sync 0; fence.proxy.async.shared::cta;"


def product(name: str, columns: int, a: str, constants: str) -> str:
    """A product with zeros before it, that is waited for; its sums go to the output."""
    sums = ", ".join(f"%r{10 + n}" for n in range(columns // 2))
    zeros = "".join(f"mov.b32 %r{10 + n}, 0;" for n in range(columns // 2))
    stores = "".join(f"st.global.b32 [%rd3+{4 * n}], %r{10 + n};" for n in range(columns // 2))
    return (
        f"{zeros} wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n{columns}k{name} {{{sums}}}, {a}, %rd6, "
        f"{constants}; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {stores}"
    )


def sums_of(found: np.ndarray, columns: int, dtype: np.dtype) -> np.ndarray:
    """The matrix [64, columns] of the registers [128, columns / 2] of a warpgroup."""
    made, thread = np.empty((64, columns), dtype), np.arange(128)
    for r in range(columns // 2):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (r // 2 % 2)
        made[row, r // 4 * 8 + thread % 4 * 2 + r % 2] = found[:, r].view(dtype)
    return made


def matrices(kind: str, columns: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """A [64, K], B [columns, K] and their exact product."""
    random = np.random.default_rng(1)
    if kind == "s8":
        a, b = (torch.from_numpy(random.integers(-128, 128, (n, 32)).astype(np.int8)) for n in (64, columns))
        return a, b, (a.long() @ b.long().T).numpy().astype(np.int32)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[kind]
    a, b = (torch.from_numpy(random.standard_normal((n, 32 // dtype.itemsize))).to(dtype) for n in (64, columns))
    return a, b, (a.double() @ b.double().T).numpy().astype(np.float32)


def run_product(kind: str, columns: int, code: int, k_major: bool, leading: int, stride: int) -> None:
    a, b, wanted = matrices(kind, columns)
    memory = np.zeros(32768, np.uint8)
    size, halves = a.element_size(), (0, 16384)
    for start, matrix in zip(halves, (a, b), strict=True):
        places = start + layout(*matrix.shape, size, code, k_major, leading, stride)
        for byte in range(size):
            memory[places + byte] = as_bits(matrix).view(np.uint8).reshape(*matrix.shape, size)[..., byte]
    descriptors = [descriptor(start, leading, stride, code) for start in halves]
    setup = f"mov.b64 %rd5, {descriptors[0]}; mov.b64 %rd6, {descriptors[1]}; setp.ne.b32 %p3, 0, 0;"
    major = 0 if k_major else 1
    name = "32.s32.s8.s8" if kind == "s8" else f"{32 // size}.f32.{kind}.{kind}"
    # Products of bytes are K-major always; those of integers have no signs either.
    constants = {"s8": "%p3", "e4m3": "%p3, 1, 1"}.get(kind, f"%p3, 1, 1, {major}, {major}")
    found = run(
        FILL + setup + product(name, columns, "%rd5", constants), memory.view(np.uint32).reshape(128, 64),
        outputs=columns // 2, threads=128, shared=32768,
    )  # fmt: skip
    assert np.array_equal(sums_of(found, columns, wanted.dtype), wanted)


@pytest.mark.parametrize("chosen", LAYOUTS, ids=str)
def test_a_product_reads_every_layout(chosen):
    run_product("f16", 64, *chosen)


@pytest.mark.parametrize(
    ("kind", "columns"), [("bf16", 8), ("s8", 16), ("s8", 64), ("e4m3", 16), ("e4m3", 64), ("f16", 128)]
)
def test_a_product_of_every_kind(kind, columns):
    run_product(kind, columns, 1, True, 16, 1024)


@pytest.mark.parametrize("kind", ["f16", "e4m3"])
def test_the_left_matrix_may_be_in_registers_and_sums_are_added_to(kind):
    a, b, wanted = matrices(kind, 8)
    thread = np.arange(128)
    row = thread // 32 * 16 + thread % 32 // 4
    size, per_register = a.element_size(), 4 // a.element_size()
    words = as_bits(a).view(f"u{size}").astype(np.uint32)
    registers = [
        sum(
            words[row + 8 * (r % 2), thread % 4 * per_register + r // 2 * 16 // size + part]
            << np.uint32(8 * size * part)
            for part in range(per_register)
        )
        for r in range(4)
    ]
    memory = np.zeros((128, 64), np.uint8)
    memory.reshape(-1)[: b.numel() * size] = 0
    places = layout(8, 32 // size, size, 3, True, 16, 256)
    for byte in range(size):
        memory.reshape(-1)[places + byte] = as_bits(b).view(np.uint8).reshape(8, 32 // size, size)[..., byte]
    given = np.zeros((128, 8), np.uint32)
    given[:, :4] = np.stack(registers, 1)
    given[:, 4:] = memory.view(np.uint32).reshape(-1)[:512].reshape(128, 4)
    body = (
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2]; ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd2+16];"
        "shl.b32 %r9, %r0, 4; st.shared.v4.b32 [%r9], {%r5, %r6, %r7, %r8}; bar.sync 0; fence.proxy.async;"
        f"mov.b64 %rd6, {descriptor(0, 16, 256, 3)}; wgmma.fence.sync.aligned;"
    )
    sums = "{%r10, %r11, %r12, %r13}"
    name = f"m64n8k{32 // size}.f32.{kind}.{kind}"
    one = f"wgmma.mma_async.sync.aligned.{name} {sums}, {{%r1, %r2, %r3, %r4}}, %rd6,"
    signs = "1, 1" if kind == "e4m3" else "1, 1, 0"
    found = run(
        body + f"{one} 0, {signs}; {one} 1, {signs}; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        f"st.global.v4.b32 [%rd3], {sums};",
        given, outputs=4, threads=128,
    )  # fmt: skip
    assert np.allclose(sums_of(found, 8, np.dtype(np.float32)), 2 * wanted, rtol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_stored_to_shared_memory(transposed):
    given = np.random.default_rng(0).integers(0, 2**32, (32, 4), dtype=np.uint32)
    load = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2]; shl.b32 %r6, %r0, 4; "
    suffix = ".trans" * transposed
    found = run(
        load + f"stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%r6], {{%r1, %r2, %r3, %r4}};"
        "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6]; st.global.v4.b32 [%rd3], {%r1, %r2, %r3, %r4};",
        given, outputs=4,
    )  # fmt: skip
    own = given.view(np.uint16).reshape(32, 4, 2).transpose(1, 0, 2).reshape(4, 8, 8)
    wanted = own.transpose(0, 2, 1) if transposed else own
    assert np.array_equal(found.view(np.uint16).reshape(4, 8, 8), wanted)


READY = (
    "shl.b32 %r9, %r0, 4; st.shared.v4.b32 [%r9], {0, 0, 0, 0}; bar.sync 0; {fence}"
    f"mov.b64 %rd6, {descriptor(0, 16, 256, 3)}; mov.b64 %rd5, {descriptor(0, 16, 256, 3)};"
)
ONE = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10, %r11, %r12, %r13}, %rd5, %rd6, 0, 1, 1, 0, 0;"
END = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; st.global.b32 [%rd3], %r10;"
FENCE, BEGIN = "fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;"
WRONG = {
    "memory that no fence shows to it": ("", BEGIN + ONE + END, "race"),
    "registers that no fence shows to it": (FENCE, ONE + END, "race"),
    "sums that nobody waits for": (FENCE, BEGIN + ONE + "st.global.b32 [%rd3], %r10;", "undefined"),
    "a wait for one group less": (FENCE, BEGIN + ONE + END.replace("aligned 0", "aligned 1"), "undefined"),
    "a write over what it reads": (
        FENCE, BEGIN + ONE + "wgmma.commit_group.sync.aligned; bar.sync 0; st.shared.b32 [%r9], 0;",
        "unfinished product",
    ),
    "a descriptor beyond the memory": (
        FENCE, f"mov.b64 %rd6, {descriptor(65536, 16, 256, 3)};" + BEGIN + ONE + END, "out of bounds",
    ),
}  # fmt: skip


def test_a_product_that_is_waited_for_is_right():
    run(READY.replace("{fence}", FENCE) + BEGIN + ONE + END, threads=128)


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_of_a_product_is_found(name):
    fence, body, kind = WRONG[name]
    with pytest.raises(PtxFault) as raised:
        run(READY.replace("{fence}", fence) + body, threads=128)
    assert raised.value.kind == kind, raised.value
