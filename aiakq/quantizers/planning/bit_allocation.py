"""Bit allocation: the cheapest bit widths of all parts within a limit on total bits or KL divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from aiakq.errors import error
from aiakq.quantizers.planning.sensitivity import ModelPart
from aiakq.spec import LayerSpec

#: Number of budgets that ``allocate`` distinguishes.
_STEPS = 1 << 16

#: Bits by part and candidate.
Widths = Sequence[Sequence[float]]


def allocate(
    parts: Sequence[ModelPart], widths: Widths, bits: float | None = None, kl: float | None = None
) -> list[int]:
    """Choose a candidate for every part: the lowest cost within ``bits`` in total, or the fewest bits for cost ``kl``.

    ``widths[p][c]`` are the bits of part p as candidate c. Exact, except that bits are counted in steps of a 65536th of
    the widest choice: one pass of dynamic programming over all budgets. If ``kl`` is out of reach, the widest. Raises
    ``bad_option`` if the narrowest choice exceeds ``bits``.
    """
    assert (bits is None) != (kl is None)
    narrowest, widest = (sum(pick(row) for row in widths) for pick in (min, max))
    if bits is not None:
        refuse_below(parts, widths, bits)
    step = (widest - narrowest) / _STEPS or 1.0
    costs = torch.zeros(_STEPS + 1, dtype=torch.float64)  # minimum cost so far, by bits above the narrowest choice
    taken = []
    for part, row in zip(parts, widths, strict=True):
        shifted = torch.full((len(row), _STEPS + 1), torch.inf, dtype=torch.float64)
        for number, width in enumerate(row):
            above = math.ceil((width - min(row)) / step - 1e-6)
            shifted[number, above:] = costs[: _STEPS + 1 - above] + part.kl[number]
        costs, choice = shifted.min(0)
        taken.append(choice)
    if bits is not None:
        budget = min(int((bits - narrowest) / step), _STEPS)
    else:
        enough = (costs <= (kl or 0.0)).nonzero()
        budget = int(enough[0]) if len(enough) else _STEPS
    result = []
    for row, choice in zip(reversed(widths), reversed(taken), strict=True):
        number = int(choice[budget])
        result.append(number)
        budget -= math.ceil((row[number] - min(row)) / step - 1e-6)
    return result[::-1]


def refuse_below(parts: Sequence[ModelPart], widths: Widths, bits: float) -> None:
    """Raise ``bad_option`` if the narrowest widths of all parts exceed ``bits``."""
    narrowest = sum(map(min, widths))
    if narrowest > bits:
        weights = sum(part.weights for part in parts)
        raise error(
            "bad_option",
            option="--target-bpw",
            value=round(bits / weights, 3),
            expected=f"at least {narrowest / weights:.2f}, what the narrowest layers take",
            hint="Ask for more bits.",
        )


def widths_of(parts: Sequence[ModelPart], candidates: Sequence[LayerSpec], scale_bits: int) -> Widths:
    """Return the bits of every part for every candidate, including scales and zero points."""

    def per_weight(part: ModelPart, layer: LayerSpec) -> float:
        group = part.k if layer.group_size == -1 else layer.group_size
        return layer.bits + (scale_bits + (0 if layer.symmetric else layer.bits)) / group

    # Each linear also stores its shape as two 64-bit integers.
    return [[part.weights * per_weight(part, layer) + 128 * len(part.names) for layer in candidates] for part in parts]
