"""Mutants of kernels: which there are, and which are equivalent."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.equivalence import reason
from ptx.kernels import run_text, text_of
from ptx.mutants import KINDS, Mutant, all_mutants, some_mutants
from ptx.program import PtxFault

TEXT = """
	mov.u32 	%r1, %tid.x;
	setp.lt.u32 	%p1, %r1, 30;
	and.b32  	%r2, %r1, 3;
	sub.s32 	%r4, %r1, %r2;
	@%p1 ld.global.b32 { %r3 }, [ %rd1 + 0 ];
	cp.async.cg.shared.global [ %r4 + 0 ], [ %rd2 + 0 ], 0x10, %r5;
	cp.async.commit_group;
	cp.async.wait_group 0x1;
	bar.sync 	0; // comment
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r6, %r7 }, { %r8, %r9, %r10, %r11 }, { %r12, %r13 }, { %r6 };
	@%p1 atom.global.gpu.acq_rel.add.u32 %r14, [ %rd3 + 0 ], %r15;
	wgmma.fence.sync.aligned;
	@%p1 bra 	$end;
"""


def test_mistakes_of_every_kind_are_made():
    found = {mutant.kind: mutant.new.split() for mutant in all_mutants(TEXT)}
    assert set(found) == set(KINDS)
    assert found["operands swapped"] == ["sub.s32", "%r4,", "%r2,", "%r1;"]
    assert found["mask of a copy dropped"][-1] == "0x10;"
    assert found["operands of a product swapped"][6:8] == ["%r9,", "%r8,"]
    assert found["constant off by one"][-1] == "4;"
    assert found["wait for one group less"] == ["cp.async.wait_group", "0x2;"]
    assert found["barrier removed"] == found["fence removed"] == []
    assert found["atomic relaxed"][1] == "atom.global.gpu.relaxed.add.u32"
    masks = [mutant for mutant in all_mutants(TEXT) if mutant.kind == "mask dropped"]
    assert [mutant.new.split()[0][:4] for mutant in masks] == ["ld.g", "atom"], "a branch has no mask"


def test_a_mutant_changes_one_line():
    for mutant in all_mutants(TEXT):
        pairs = zip(TEXT.split("\n"), mutant.apply(TEXT).split("\n"), strict=True)
        assert [number for number, (old, new) in enumerate(pairs) if old != new] == [mutant.line]
    assert some_mutants(TEXT, 1, 0) == some_mutants(TEXT, 1, 0)
    assert len(some_mutants(TEXT, 1, 0)) == len(KINDS)


def test_what_makes_a_mutant_equivalent():
    constant = next(mutant for mutant in all_mutants(TEXT) if mutant.kind == "constant off by one")
    assert "nothing that is stored" in reason(TEXT, constant, lambda text: True)
    # The kernel needs the instruction, and a comparison of both results never gives up.
    assert "in every thread" in reason(TEXT, constant, lambda text: "trap" in text)
    assert reason(TEXT, constant, lambda text: False) is None
    unknown = Mutant("constant off by one", 0, "add.s32 %r9, %r8, 1;", "add.s32 %r9, %r8, 2;")
    text = "\n".join([unknown.old, "ld.global.b32 %r8, [%rd1];"])
    assert reason(text, unknown, lambda text: "trap" in text) is None, "its operand comes from memory"


#: The mutant's instruction, and what a kernel of 32 threads does: every fourth thread, or the first one, stores.
FOURTH = """
    and.b32 %r6, %r0, 3;
    setp.eq.b32 %p1, %r6, 0;
"""
EXPLAINED = {
    "an address in threads that do not store": (
        "and.b32 %r5, %r0, 28;", FOURTH + "mad.wide.u32 %rd5, %r5, 4, %rd1;\n@%p1 st.global.b32 [%rd5], %r0;",
        "threads that store, or load,",
    ),
    "a lane in threads that do not store": (
        "and.b32 %r5, %r0, 28;", FOURTH + "shfl.sync.idx.b32 %r7, %r0, %r5, 31, -1;\n@%p1 st.global.b32 [%rd3], %r7;",
        "threads that store, or load,",
    ),
    "a value in threads that do store": (
        "and.b32 %r5, %r0, 27;", FOURTH + "@%p1 st.global.b32 [%rd3], %r5;", "",
    ),
    "another thread stores the same": (
        "setp.eq.b32 %p1, %r0, 3;", "@%p1 st.global.b32 [%rd1], 5;", "all threads that it could let store",
    ),
    "another thread stores something else": ("setp.eq.b32 %p1, %r0, 3;", "@%p1 st.global.b32 [%rd1], %r0;", ""),
    "what another thread loads": (
        "setp.eq.b32 %p1, %r0, 3;", "mov.b32 %r5, 0;\n@%p1 ld.global.b32 %r5, [%rd2];\nst.global.b32 [%rd3], %r5;", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_threads_do_with_a_result_explains_a_mutant(name):
    old, body, words = EXPLAINED[name]
    text = text_of(f"\n{old}\n{body}")
    given = np.arange(7, 39, dtype=np.uint32)[:, None]
    expected = run_text(text, given)

    def unchanged(other: str) -> bool:
        try:
            return np.array_equal(run_text(other, given), expected)
        except PtxFault:
            return False

    mutant = next(m for m in all_mutants(text) if m.kind == "constant off by one" and m.old == old)
    if unchanged(mutant.apply(text)):
        assert words and words in (reason(text, mutant, unchanged) or "")
    else:
        assert not words
