"""What the emulator notices: each kernel here does one thing wrong."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.kernels import run
from ptx.program import PtxFault, RunOptions

STORE = "st.global.b32 [%rd3], %r5;"
#: %r1 is the thread's own word of shared memory, %r2 one of the other warp; all are written.
WORDS = "shl.b32 %r1, %r0, 2; xor.b32 %r2, %r1, 128; st.shared.b32 [%r1], 0; bar.sync 0;"
#: Of 64 threads: what they do, and what is wrong with it.
WRONG = {
    "a read after the end": ("ld.global.b32 %r5, [%rd2+4];" + STORE, "out of bounds"),
    "a read before the start": ("ld.global.b32 %r5, [%rd2+-4];" + STORE, "out of bounds"),
    "a write after the end": ("st.global.b32 [%rd3+4], %r0;", "out of bounds"),
    "a misaligned read": ("ld.global.v2.b32 {%r5, %r6}, [%rd0+4];" + STORE, "misaligned"),
    "shared memory that is not there": ("shl.b32 %r1, %r0, 7; st.shared.b32 [%r1], %r0;", "out of bounds"),
    "misaligned shared memory": ("st.shared.b32 [2], %r0;", "misaligned"),
    "shared memory that nobody wrote": ("ld.shared.b32 %r5, [8];" + STORE, "uninitialized"),
    "a register that nobody wrote": ("add.s32 %r5, %r6, 1;" + STORE, "undefined"),
    "an address that nobody wrote": ("ld.global.b32 %r5, [%rd7];" + STORE, "undefined"),
    "a condition that nobody wrote": ("setp.eq.s32 %p1, %r6, 1; @%p1 bra $end; $end:", "undefined"),
    "an undefined value by way of shared memory": (
        "shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r6; ld.shared.b32 %r5, [%r1];" + STORE, "undefined",
    ),
    "a part of a vector that nobody wrote": (
        "shl.b32 %r1, %r0, 3; mov.b32 %r5, 1; st.shared.v2.b32 [%r1], {%r5, %r6};"
        "ld.shared.v2.b32 {%r7, %r5}, [%r1];" + STORE, "undefined",
    ),
    "an undefined value by way of another lane": (
        "setp.lt.u32 %p1, %r0, 3; @%p1 mov.b32 %r6, 0; shfl.sync.bfly.b32 %r5, %r6, 1, 31, -1;" + STORE, "undefined",
    ),
    "a read without a barrier": (WORDS + "st.shared.b32 [%r1], %r0; ld.shared.b32 %r5, [%r2];" + STORE, "race"),
    "a write after a read without a barrier": (WORDS + "ld.shared.b32 %r5, [%r2]; st.shared.b32 [%r1], %r5;", "race"),
    "two warps that write different values": ("st.shared.b32 [0], %r0;", "race"),
    "a copy over what others still read": (
        WORDS + "ld.shared.b32 %r5, [0]; setp.ne.u32 %p1, %r0, 63; @%p1 bra $end;"
        "cp.async.ca.shared.global [0], [%rd2], 0x4; $end:", "race|unfinished copy",
    ),
    "a read of a copy that nobody waited for": (
        "shl.b32 %r1, %r0, 2; cp.async.ca.shared.global [%r1], [%rd2], 0x4; cp.async.commit_group;"
        "ld.shared.b32 %r5, [%r1];" + STORE, "unfinished copy",
    ),
    "a wait for too few copies": (
        "shl.b32 %r1, %r0, 2; cp.async.ca.shared.global [%r1], [%rd2], 0x4; cp.async.commit_group;"
        "cp.async.wait_group 1; ld.shared.b32 %r5, [%r1];" + STORE, "unfinished copy",
    ),
    "a copy of another warp, waited for without a barrier": (
        WORDS + "cp.async.ca.shared.global [%r1], [%rd2], 0x4; cp.async.commit_group;"
        "cp.async.wait_group 0; ld.shared.b32 %r5, [%r2];" + STORE, "race|unfinished copy",
    ),
    "a misaligned copy": ("cp.async.cg.shared.global [0], [%rd0+4], 0x10;", "misaligned"),
    "a copy from after the end": ("cp.async.ca.shared.global [0], [%rd2+256], 0x4;", "out of bounds"),
    "a barrier for some lanes": (
        "setp.lt.u32 %p1, %r0, 16; @%p1 bra $end; bar.sync 0; $end:", "divergence",
    ),
    "a barrier for some warps": (
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra $end; bar.sync 0; $end:", "divergence",
    ),
    "different barriers": (
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra $other; bar.sync 0; bra $end; $other: bar.sync 0; $end:", "divergence",
    ),
    "a matrix for some lanes": (
        "setp.lt.u32 %p1, %r0, 16; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [0];", "divergence",
    ),
    "an exchange for some lanes": (
        "setp.lt.u32 %p1, %r0, 16; @%p1 bra $end; shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1; $end:", "divergence",
    ),
    "a trap": ("setp.eq.u32 %p1, %r0, 40; @%p1 trap;", "trap"),
    "no end": ("$again: bra $again;", "endless"),
    "two lanes that write different values": ("st.global.b32 [%rd1], %r0;", "race"),
    "two lanes that write to shared memory": (
        "setp.lt.u32 %p1, %r0, 32; @%p1 st.shared.b32 [0], %r0;", "race",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_fault_is_found(name, seed):
    body, kind = WRONG[name]
    with pytest.raises(PtxFault) as raised:
        run(body, np.zeros((64, 1), np.uint32), threads=64, options=RunOptions(seed=seed, limit=1000))
    assert raised.value.kind in kind.split("|"), raised.value


def test_a_fault_names_its_place():
    with pytest.raises(PtxFault) as raised:
        run("setp.eq.u32 %p1, %r0, 40;\n .loc 1 7 3 // some_kernel.py:7:3\n @%p1 trap;", threads=64)
    assert str(raised.value) == (
        "trap: the program gives up; in small_kernel (some_kernel.py:7), block (0, 0, 0), warp 1: @%p1 trap;"
    )


#: What is like the above, and right.
RIGHT = {
    "a part of a vector that nobody wrote": "shl.b32 %r1, %r0, 3; mov.b32 %r5, 1; st.shared.v2.b32 [%r1], {%r5, %r6};"
    "ld.shared.v2.b32 {%r7, %r8}, [%r1]; st.global.b32 [%rd3], %r7;",
    "an undefined value that decides nothing": "setp.lt.u32 %p1, %r0, 3; @%p1 mov.b32 %r6, 0;"
    "shfl.sync.bfly.b32 %r5, %r6, 1, 31, -1; setp.lt.u32 %p1, %r0, 2; @%p1 st.global.b32 [%rd3], %r5;",
    "an undefined condition that another one decides": "setp.eq.s32 %p1, %r6, 1; setp.lt.u32 %p2, %r0, 0;"
    "and.pred %p3, %p1, %p2; @%p3 trap;",
    "two warps that write the same value": "st.shared.b32 [0], 5; ld.shared.b32 %r5, [0];" + STORE,
    "a barrier between": WORDS + "ld.shared.b32 %r5, [%r2]; bar.sync 0; st.shared.b32 [%r1], %r5;",
    "a copy that is waited for": "shl.b32 %r1, %r0, 2; cp.async.ca.shared.global [%r1], [%rd2], 0x4;"
    "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;"
    "xor.b32 %r1, %r1, 128; ld.shared.b32 %r5, [%r1];" + STORE,
    "lanes that meet before a barrier": "setp.lt.u32 %p1, %r0, 16; @%p1 bra $end; mov.b32 %r5, 1; $end: bar.sync 0;",
    "a copy of nothing from nowhere": "shl.b32 %r1, %r0, 2; cp.async.ca.shared.global [%r1], [%rd0+99999], 0x4, 0;",
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_runs(name):
    run(RIGHT[name], np.zeros((64, 1), np.uint32), threads=64)
