"""GPTQ on GPUs: the inner loop of columns, the same of a sweep, and the search for ranges; see gptq_kernel.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels import triton

#: Maximum number of columns in a block, and columns of a group that a search holds at a time.
LONGEST = 128
#: Rows of the weight per program: of a loop, which waits for one column after the other, and of a search.
ROUNDED, SEARCHED = 16, 32
#: Significant bits of the dtypes in which scales are stored.
_SIGNIFICANT = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def supports(block: Tensor) -> bool:
    """Whether this implementation supports a block of columns [L, N]."""
    return len(block) <= LONGEST and block.stride(1) == 1 and _available(block)


def searches(groups: Tensor, storage: torch.dtype) -> bool:
    """Whether this implementation searches the ranges of groups [..., G], with scales stored in ``storage``."""
    return groups.dim() in (2, 3) and storage in _SIGNIFICANT and _available(groups)


def _available(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype == torch.float32 and triton.unavailable_reason("GPTQ") is None


def round_columns(
    block: Tensor,
    response: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor,
    codes: Tensor,
    groups: Sequence[int],
    places: Sequence[int],
    *,
    values: Tensor | None = None,
    steps: Sequence[float] = (),
) -> None:
    """Round the first M = len(groups) columns of ``block`` [L, N], L at most LONGEST; see kernels/cpu/gptq.py.

    All tensors are float32 except ``codes`` (uint8), and rows are contiguous. ``block``, ``codes`` and ``values`` are
    written.
    """
    from aiakq.kernels.triton.gptq_kernel import round_kernel

    (length, n), device = block.shape, block.device
    if any(x.stride(-1) != 1 for x in (block, response, scales, zeros, codes) if x.shape[-1] > 1):
        raise ValueError("rows are not contiguous")
    # Copies from memory that is not pinned are staged at once: nothing waits for the GPU.
    rows = torch.tensor([*groups, *places], dtype=torch.int32).to(device, non_blocking=True)
    lengths = torch.tensor(steps, dtype=torch.float32).to(device, non_blocking=True) if steps else block
    old = block if values is None else values
    with torch.cuda.device_of(block):
        round_kernel[(-(-n // ROUNDED),)](
            block, response, old, lengths, scales, zeros, codes, rows, block.stride(0), response.stride(0),
            old.stride(0), scales.stride(0), zeros.stride(0), codes.stride(0), n, length, len(groups),
            TOP=2**bits - 1, SWEEP=values is not None, LENGTH=LONGEST, BLOCK=ROUNDED, num_warps=4,
        )  # fmt: skip


def search(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    storage: torch.dtype,
    cost: Tensor,
    fractions: Sequence[float],
    smallest: float,
    signed: bool,
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [...] float32 of the range of least loss, ``sum cost_j (w_j - q_j)^2``; the first
    one wins ties.

    groups [N, G] or [N, K / G, G] float32, of any strides; cost [G] or [K / G, G]. Tried are ``fractions`` of the full
    range, with ``signed`` also negative scales. Scales are rounded to ``storage``, and at least ``smallest``.
    """
    from aiakq.kernels.triton.gptq_kernel import search_kernel

    whole = groups if groups.dim() == 3 else groups.unsqueeze(1)
    n, count, size = whole.shape
    scales, zeros = torch.empty(2, n, count, device=groups.device)
    of_range = torch.tensor(fractions, dtype=torch.float32).to(groups.device, non_blocking=True)
    with torch.cuda.device_of(groups):
        search_kernel[(-(-n // SEARCHED), count)](
            whole, cost.expand(count, size).contiguous(), of_range, scales, zeros, whole.stride(0), whole.stride(1),
            whole.stride(2), n, size, len(fractions), len(fractions) * (2 if signed else 1), smallest,
            TOP=2**bits - 1, SYMMETRIC=symmetric, SIGNIFICANT=_SIGNIFICANT[storage], LENGTH=LONGEST, BLOCK=SEARCHED,
            num_warps=4,
        )  # fmt: skip
    return scales.view(groups.shape[:-1]), zeros.view(groups.shape[:-1])
