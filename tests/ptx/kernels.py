"""Small kernels in PTX for the tests of the emulator: each thread has words of input and of output."""

from __future__ import annotations

import struct

import numpy as np
from ptx.program import Program, RunOptions, Span

_TEXT = """
.version 8.7
.target sm_80
.visible .entry small_kernel(
    .param .u64 .ptr .global .align 1 small_kernel_param_0,
    .param .u64 .ptr .global .align 1 small_kernel_param_1
)
.reqntid {threads}
{{
    .reg .pred %p<10>; .reg .b16 %rs<50>; .reg .b32 %r<100>; .reg .b64 %rd<50>; .reg .b8 %b<9>;
    ld.param.b64 %rd0, [small_kernel_param_0];
    ld.param.b64 %rd1, [small_kernel_param_1];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %rd2, %r0, {inputs}, %rd0; // where the thread's input is
    mad.wide.u32 %rd3, %r0, {outputs}, %rd1; // where its output is
    {body}
    ret;
}}
"""


def run(
    body: str,
    given: np.ndarray | None = None,
    *,
    outputs: int = 1,
    threads: int = 32,
    shared: int = 4096,
    options: RunOptions = RunOptions(),  # noqa: B008 (it is frozen)
    blocks: int = 1,
) -> np.ndarray:
    """Run ``body``, whose input [threads, words] uint32 is at %rd2; return what is at %rd3, [threads, outputs] uint32.

    %rd0 and %rd1 are where all input and output begin, %r0 is the thread.
    """
    given = np.zeros((threads, 1), np.uint32) if given is None else given
    text = text_of(body, threads, given.shape[1], outputs)
    return run_text(text, given, outputs=outputs, shared=shared, options=options, blocks=blocks)


def text_of(body: str, threads: int = 32, inputs: int = 1, outputs: int = 1) -> str:
    """A kernel whose threads have so many words of input and of output."""
    return _TEXT.format(threads=threads, inputs=4 * inputs, outputs=4 * outputs, body=body)


def run_text(
    text: str,
    given: np.ndarray,
    *,
    outputs: int = 1,
    shared: int = 4096,
    options: RunOptions = RunOptions(),  # noqa: B008 (it is frozen)
    blocks: int = 1,
) -> np.ndarray:
    """Run a kernel of ``text_of`` with input [threads, words] uint32."""
    given = np.ascontiguousarray(given)
    result = np.full((len(given), outputs), 0xDEADBEEF, np.uint32)
    arrays = [given, result]
    spans = [Span(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    Program(text, shared).run(
        (blocks, 1, 1), [struct.pack("<Q", array.ctypes.data) for array in arrays], spans, options
    )
    return result
