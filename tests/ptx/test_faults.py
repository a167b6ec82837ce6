"""What the emulator notices: each kernel here does one thing wrong."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import library
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
    "a read of another warp's output": ("st.global.b32 [%rd3], %r0; ld.global.b32 %r5, [%rd1+128];", "race"),
    "a write over what another warp reads": ("ld.global.b32 %r5, [%rd0+128]; st.global.b32 [%rd2], 1;", "race"),
    "two warps that write to global memory": ("st.global.b32 [%rd1], 1;", "race"),
    "two lanes that write different values": ("st.global.b32 [%rd1], %r0;", "race"),
    "two lanes that write to shared memory": (
        "setp.lt.u32 %p1, %r0, 32; @%p1 st.shared.b32 [0], %r0;", "race",
    ),
    "a flag that orders nothing": (
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra $other; st.global.b32 [%rd3], 1; atom.global.gpu.relaxed.add.u32 %r5, [%rd0], 1;"
        "bra $end; $other: atom.global.gpu.relaxed.add.u32 %r5, [%rd0], 1; ld.global.b32 %r6, [%rd1+128]; $end:", "race",
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


#: In each of several blocks, both warps write a word, a barrier follows, lane 0 counts blocks, and the last block reads all.
SPLIT = """
    mov.u32 %r9, %ctaid.x; mad.wide.u32 %rd3, %r0, 4, %rd1; mad.wide.u32 %rd4, %r9, 256, %rd3;
    st.global.b32 [%rd4], %r0;
    {barrier}
    setp.eq.u32 %p1, %r0, 0; {atomic} st.shared.b32 [0], %r5; $read:
    {after} bar.sync 0; ld.shared.b32 %r6, [0]; setp.ne.u32 %p2, %r6, 3; @%p2 bra $end;
    ld.global.b32 %r1, [%rd3]; ld.global.b32 %r2, [%rd3+256]; ld.global.b32 %r3, [%rd3+512]; ld.global.b32 %r4, [%rd3+768];
    @%p1 st.global.b32 [%rd0], 0; $end:
"""
ACQ_REL = "atom.global.gpu.acq_rel.add.u32 %r5, [%rd0], 1;"
RELAXED = "atom.global.gpu.relaxed.add.u32 %r5, [%rd0], 1;"
FENCED = f"fence.acq_rel.gpu; {RELAXED} fence.acq_rel.gpu;"


def run_split(atomic: str, seed: int, barrier: str = "bar.sync 0;", after: str = "") -> None:
    """Let four blocks write, and one of them read what all wrote."""
    body = SPLIT.format(barrier=barrier, after=after, atomic=f"@!%p1 bra $read; {atomic}")
    run(body, np.zeros((64, 1), np.uint32), threads=64, outputs=4, blocks=4, options=RunOptions(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("atomic", [ACQ_REL, FENCED, "membar.gl;" + RELAXED + "membar.gl;"])
def test_the_last_block_may_read_what_all_have_released(atomic, seed):
    run_split(atomic, seed)


BROKEN_SPLIT = {
    "without a barrier before the atomic": {"barrier": ""},
    "relaxed": {"atomic": RELAXED},
    "release only": {"atomic": ACQ_REL.replace("acq_rel", "release")},
    "acquire only": {"atomic": ACQ_REL.replace("acq_rel", "acquire")},
    "within a block only": {"atomic": ACQ_REL.replace("gpu", "cta")},
    "without a fence after": {"atomic": "fence.acq_rel.gpu;" + RELAXED},
    "without a fence before": {"atomic": RELAXED + "fence.acq_rel.gpu;"},
    "with fences for the block": {"atomic": FENCED.replace("fence.acq_rel.gpu", "fence.acq_rel.cta")},
}


@pytest.mark.parametrize("name", BROKEN_SPLIT)
@pytest.mark.parametrize("seed", range(2))
def test_what_no_release_and_acquire_orders_is_a_race(name, seed):
    with pytest.raises(PtxFault) as raised:
        run_split(**({"atomic": ACQ_REL} | BROKEN_SPLIT[name]), seed=seed)
    assert raised.value.kind == "race" and "block" in str(raised.value), raised.value


@pytest.mark.parametrize("order", [("release", "acquire"), ("relaxed", "relaxed")])
def test_a_release_and_an_acquire_order_warps(order):
    stores, loads = order
    body = (
        f"setp.lt.u32 %p1, %r0, 32; @%p1 bra $other; ld.{loads}.gpu.global.b32 %r5, [%rd0]; ld.global.b32 %r6, [%rd1];"
        f"bra $end; $other: setp.ne.u32 %p2, %r0, 0; @%p2 bra $end; st.global.b32 [%rd1], 1;"
        f"st.{stores}.gpu.global.b32 [%rd0], 1; $end:"
    )
    if stores == "release":
        run(body, np.zeros((64, 1), np.uint32), threads=64)
    else:
        with pytest.raises(PtxFault, match="race"):
            run(body, np.zeros((64, 1), np.uint32), threads=64)


def never_written(count: int) -> np.ndarray:
    """Return words that nobody wrote."""
    made = np.empty(count, np.uint64)
    library.library().ptx_fill(made.ctypes.data, made.ctypes.data + made.nbytes)
    return made.view(np.uint32).reshape(-1, 2)


UNWRITTEN = {
    "a value that is stored": ("ld.global.b32 %r5, [%rd2];" + STORE, "undefined"),
    "a value that a product takes": ("ld.global.b32 %r5, [%rd2]; mul.lo.s32 %r5, %r5, 0;" + STORE, "undefined"),
    "by way of a copy": (
        "shl.b32 %r1, %r0, 2; cp.async.ca.shared.global [%r1], [%rd2], 0x4; cp.async.wait_all; bar.sync 0;"
        "ld.shared.b32 %r5, [%r1];" + STORE, "undefined",
    ),
    "a counter": ("atom.global.gpu.acq_rel.add.u32 %r5, [%rd2], 1;", "uninitialized"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNWRITTEN)
def test_global_memory_that_nobody_wrote_is_not_used(name):
    body, kind = UNWRITTEN[name]
    with pytest.raises(PtxFault) as raised:
        run(body, never_written(32))
    assert raised.value.kind == kind, raised.value


def test_global_memory_may_be_read_once_it_is_written_or_if_nothing_depends_on_it():
    run("ld.global.b32 %r5, [%rd2]; setp.lt.u32 %p1, %r0, 99; selp.b32 %r5, 1, %r5, %p1;" + STORE, never_written(32))
    run("st.global.v2.b32 [%rd2], {1, 2}; ld.global.b32 %r5, [%rd2];" + STORE, never_written(32))
