"""Global memory: what is ordered between warps and blocks, and what was never written."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import library
from ptx.kernels import run
from ptx.program import PtxFault, RunOptions

STORE = "st.global.b32 [%rd3], %r5;"
#: What two warps do that nothing orders.
RACES = {
    "a read of another warp's output": "st.global.b32 [%rd3], %r0; ld.global.b32 %r5, [%rd1+128];",
    "a write over what another warp reads": "ld.global.b32 %r5, [%rd0+128]; st.global.b32 [%rd2], 1;",
    "two warps that write to global memory": "st.global.b32 [%rd1], 1;",
    "a flag that orders nothing": "setp.lt.u32 %p1, %r0, 32; @%p1 bra $other; st.global.b32 [%rd3], 1;"
    "atom.global.gpu.relaxed.add.u32 %r5, [%rd0], 1; bra $end;"
    "$other: atom.global.gpu.relaxed.add.u32 %r5, [%rd0], 1; ld.global.b32 %r6, [%rd1+128]; $end:",
}


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("seed", range(2))
def test_warps_need_a_barrier(name, seed):
    with pytest.raises(PtxFault, match="race: .* in another warp"):
        run(RACES[name], np.zeros((64, 1), np.uint32), threads=64, options=RunOptions(seed))


#: In each of several blocks, both warps write a word, a barrier follows, lane 0 counts blocks, and the last block reads
#: all.
SPLIT = """
    mov.u32 %r9, %ctaid.x; mad.wide.u32 %rd3, %r0, 4, %rd1; mad.wide.u32 %rd4, %r9, 256, %rd3;
    st.global.b32 [%rd4], %r0;
    {barrier}
    setp.eq.u32 %p1, %r0, 0; {atomic} st.shared.b32 [0], %r5; $read:
    {after} bar.sync 0; ld.shared.b32 %r6, [0]; setp.ne.u32 %p2, %r6, 3; @%p2 bra $end;
    ld.global.b32 %r1, [%rd3]; ld.global.b32 %r2, [%rd3+256]; ld.global.b32 %r3, [%rd3+512];
    ld.global.b32 %r4, [%rd3+768];
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
