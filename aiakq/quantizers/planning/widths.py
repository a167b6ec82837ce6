"""``--target-bpw`` and ``--max-kl``: bits and groups for every part of the model, from its measured sensitivity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from aiakq.errors import error
from aiakq.evaluation.metrics import Comparison
from aiakq.quantizers.model.activations import batched
from aiakq.quantizers.planning.layers import settle_format
from aiakq.quantizers.planning.sensitivity import SAMPLE_TOKENS, Part, measure
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, Rejected, StageProgress
from aiakq.quantizers.report.records import QuantizeReport
from aiakq.spec import LayerSpec, QuantSpec

#: Widths offered, narrow to wide. Every server that reads compressed-tensors runs 4 and 8 bits; 2 and 3 are only taken
#: where the target is below what 4 bits need.
_WIDE = (LayerSpec(4, 128), LayerSpec(4, 32), LayerSpec(8, 128))
_NARROW = (LayerSpec(2, 64), LayerSpec(3, 128), LayerSpec(3, 32), *_WIDE)
#: Below this many bits per weight 4-bit groups do not fit.
_NEEDS_NARROW = 4.13
#: Budgets that ``allocate`` tells apart.
_STEPS = 1 << 16
#: Times a model is quantized in search of --max-kl.
_ATTEMPTS = 5

#: Bits by part and candidate.
Widths = Sequence[Sequence[float]]
Attempt = Callable[[QuantSpec, Callable[[Comparison], bool] | None], QuantizeReport]


def quantize_with_chosen_widths(prepared: Prepared, attempt: Attempt, progress: OnProgress) -> QuantizeReport:
    """Choose the widths, quantize, and for ``--max-kl`` choose again until the measured divergence fits.

    Raises ``max_kl`` if the widest candidates do not reach it, ``bad_option`` for a target below the narrowest.
    """
    options = prepared.options
    target, limit = options.target_bpw, options.max_kl
    offered = _NARROW if 2 in options.preset.bits and (target or 4) < _NEEDS_NARROW else _WIDE
    candidates = list(dict.fromkeys(_fitting(layer, prepared) for layer in offered))
    assert prepared.samples is not None, "gptq and awq have samples"
    if target is not None:  # refused before the long measurement, if it must be
        kinds = [Part((shape.name,), shape.n * shape.k, shape.k) for shape in prepared.shapes]
        kinds = [part for part in kinds if prepared.spec.for_layer(part.names[0]) is not None]
        sizes = widths_of(kinds, candidates, 8 * prepared.storage.itemsize)
        _refuse_below(kinds, sizes, target * sum(part.weights for part in kinds))
    rows = max(1, SAMPLE_TOKENS // max(len(sample) for sample in prepared.samples.samples))
    everything = measure(
        prepared.model,
        batched(prepared.samples.samples[:rows]),
        candidates,
        next(index for index, layer in enumerate(candidates) if layer.bits == 4),
        prepared.storage,
        lambda done, total: progress(StageProgress("sensitivity", done, total)),
    )
    # What --skip names stays as it is.
    parts = [part for part in everything if prepared.spec.for_layer(part.names[0]) is not None]
    widths = widths_of(parts, candidates, 8 * prepared.storage.itemsize)
    if target is not None:
        choice = allocate(parts, widths, bits=target * sum(part.weights for part in parts))
        return attempt(_spec(prepared, candidates, parts, choice), None)
    assert limit is not None
    return _within(limit, prepared, attempt, candidates, parts, widths)


def _within(
    limit: float,
    prepared: Prepared,
    attempt: Attempt,
    candidates: Sequence[LayerSpec],
    parts: Sequence[Part],
    widths: Widths,
) -> QuantizeReport:
    """The smallest model whose measured divergence stays within ``limit``.

    Parts are ranked by what plain rounding costs; the method does better and the text for measuring is another, so what
    the sum of the costs may be is corrected by what was measured.
    """

    def size(choice: Sequence[int]) -> float:
        return sum(row[index] for row, index in zip(widths, choice, strict=True))

    allowed = limit
    best: list[int] | None = None
    tried: dict[tuple[int, ...], float] = {}
    for _ in range(_ATTEMPTS):
        choice = allocate(parts, widths, kl=allowed)
        if tuple(choice) in tried:
            break
        measured = _measured(prepared, attempt, _spec(prepared, candidates, parts, choice))
        tried[tuple(choice)] = measured
        if measured <= limit and (best is None or size(choice) < size(best)):
            best = choice
        predicted = sum(part.kl[index] for part, index in zip(parts, choice, strict=True))
        if 0.8 * limit <= measured <= limit:
            break
        allowed = predicted * 0.93 * limit / measured
    if best is None:
        choice = [len(candidates) - 1] * len(parts)
        if tuple(choice) not in tried:
            tried[tuple(choice)] = _measured(prepared, attempt, _spec(prepared, candidates, parts, choice))
        if tried[tuple(choice)] > limit:
            raise error("max_kl", wanted=f"{limit:g}", reached=f"{tried[tuple(choice)]:.2g}")
        best = choice
    return attempt(_spec(prepared, candidates, parts, best), None)


def _measured(prepared: Prepared, attempt: Attempt, spec: QuantSpec) -> float:
    """The divergence of a model that is made, measured and thrown away."""
    try:
        attempt(spec, lambda comparison: False)
    except Rejected as found:
        return found.comparison.kl
    raise AssertionError("an attempt that is never accepted ends with Rejected")


def allocate(parts: Sequence[Part], widths: Widths, bits: float | None = None, kl: float | None = None) -> list[int]:
    """A candidate for every part: the least cost within ``bits`` in all, or the fewest bits for a cost of ``kl``.

    ``widths[p][c]`` are the bits of part p as candidate c. Exact, but for bits being counted in steps of a 65536th of
    the widest: one pass of dynamic programming over all budgets. With ``kl`` out of reach, the widest. Raises
    ``bad_option`` if the narrowest takes more than ``bits``.
    """
    assert (bits is None) != (kl is None)
    narrowest, widest = (sum(pick(row) for row in widths) for pick in (min, max))
    if bits is not None:
        _refuse_below(parts, widths, bits)
    step = (widest - narrowest) / _STEPS or 1.0
    least = torch.zeros(_STEPS + 1, dtype=torch.float64)  # the cost of the parts so far, by what they take too much
    taken = []
    for part, row in zip(parts, widths, strict=True):
        shifted = torch.full((len(row), _STEPS + 1), torch.inf, dtype=torch.float64)
        for number, width in enumerate(row):
            above = math.ceil((width - min(row)) / step - 1e-6)
            shifted[number, above:] = least[: _STEPS + 1 - above] + part.kl[number]
        least, choice = shifted.min(0)
        taken.append(choice)
    if bits is not None:
        budget = min(int((bits - narrowest) / step), _STEPS)
    else:
        enough = (least <= (kl or 0.0)).nonzero()
        budget = int(enough[0]) if len(enough) else _STEPS
    result = []
    for row, choice in zip(reversed(widths), reversed(taken), strict=True):
        number = int(choice[budget])
        result.append(number)
        budget -= math.ceil((row[number] - min(row)) / step - 1e-6)
    return result[::-1]


def _refuse_below(parts: Sequence[Part], widths: Widths, bits: float) -> None:
    """Raise ``bad_option`` where the narrowest widths of all parts take more than ``bits``."""
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


def _fitting(layer: LayerSpec, prepared: Prepared) -> LayerSpec:
    """``layer`` as the options and the shapes allow: whole rows where its groups do not divide every cut row."""
    tp = prepared.options.tp
    fits = all(shape.k // (tp if shape.row_parallel else 1) % layer.group_size == 0 for shape in prepared.shapes)
    symmetric = prepared.options.symmetric is not False
    return replace(layer, group_size=layer.group_size if fits else -1, symmetric=symmetric)


def widths_of(parts: Sequence[Part], candidates: Sequence[LayerSpec], scale_bits: int) -> Widths:
    """The bits of every part as every candidate, scales and zero points included."""

    def per_weight(part: Part, layer: LayerSpec) -> float:
        group = part.k if layer.group_size == -1 else layer.group_size
        return layer.bits + (scale_bits + (0 if layer.symmetric else layer.bits)) / group

    # Each linear also stores its shape in two 64-bit numbers.
    return [[part.weights * per_weight(part, layer) + 128 * len(part.names) for layer in candidates] for part in parts]


def _spec(
    prepared: Prepared, candidates: Sequence[LayerSpec], parts: Sequence[Part], choice: Sequence[int]
) -> QuantSpec:
    """The choice as a spec; the commonest width is everybody's, the rest are exceptions."""
    weights: dict[LayerSpec, int] = {}
    layers: dict[str, LayerSpec | None] = dict(prepared.spec.layers)
    for part, index in zip(parts, choice, strict=True):
        weights[candidates[index]] = weights.get(candidates[index], 0) + part.weights
        layers |= dict.fromkeys(part.names, candidates[index])
    common = max(weights, key=lambda layer: weights[layer])
    for name in prepared.spec.ignore:
        layers.pop(name, None)
    base = replace(prepared.spec, layers=(), **vars(common))
    return settle_format(prepared.options, base, layers)
