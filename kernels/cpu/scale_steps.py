"""Scales in two levels: what is a small integer times a step that several groups share takes a byte per group.

K-quants of GGUF files define their scales and offsets in this way, as products of a 16-bit float and an integer of 4 to
8 bits. Products are exact in float32, so that they can be taken apart again without loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: The integer with the largest magnitude of a step, first those that most files have.
_LARGEST = tuple(dict.fromkeys((63, -128, 31, 32, 15, 127, *range(1, 127))))
#: Number of steps that are searched before all others are.
_SAMPLE = 512


@dataclass(frozen=True)
class Steps:
    """Values [N, groups] float32 as ``integers`` [N, groups] int8 times ``steps`` [N, ceil(groups / count)] float32."""

    integers: Tensor
    steps: Tensor


def in_steps(values: Tensor, count: int) -> Steps | None:
    """Return ``values`` [N, groups] float32 as integers times a step for each ``count`` groups, if that is exact for
    all, bit for bit; else None.
    """
    n, groups = values.shape
    rows = torch.nn.functional.pad(values, (0, -groups % count)).view(-1, count)
    usual = _usual(rows[:: max(1, len(rows) // _SAMPLE)])
    if usual is None:
        return None
    integers, steps = torch.zeros_like(rows, dtype=torch.int8), torch.zeros(len(rows))
    left = rows.abs().amax(1).nonzero().squeeze(1)  # all others are zeros
    for largest in usual:
        if not len(left):
            break
        found, step, fits = _divided(rows[left], largest)
        done = left[fits]
        integers[done], steps[done] = found[fits].to(torch.int8), step[fits]
        left = left[~fits]
    if len(left) or not torch.isfinite(steps).all():
        return None
    return Steps(integers.view(n, -1)[:, :groups].contiguous(), steps.view(n, -1))


def _usual(sample: Tensor) -> list[int] | None:
    """Return the largest integers in the order in which they are found most often; None if some values have none."""
    found: dict[int, int] = {}
    sample = sample[sample.abs().amax(1) > 0]
    for largest in _LARGEST:
        if not len(sample):
            break
        fits = _divided(sample, largest)[2]
        found[largest] = int(fits.sum())
        sample = sample[~fits]
    if len(sample):
        return None
    return sorted(_LARGEST, key=lambda largest: -found.get(largest, 0))


def _divided(rows: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, count] as integers times the step of which each row's largest value is ``largest`` times, and
    whether that is exact [R].
    """
    peaks = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    step = peaks / largest
    integers = (rows / step).round_()
    fits = ((integers * step == rows) & (integers >= -128) & (integers <= 127)).all(1)
    return integers, step.squeeze(1), fits


def narrow(values: Tensor) -> Tensor:
    """Return float32 ``values`` [...] in the 16-bit dtype that holds them all, else as they are."""
    for dtype in (torch.float16, torch.bfloat16) if values.dtype == torch.float32 else ():
        smaller = values.to(dtype)
        if torch.equal(smaller.float(), values):
            return smaller
    return values
