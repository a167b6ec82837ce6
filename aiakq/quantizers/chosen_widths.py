"""Mixed precision by target (``--target-bpw``, ``--max-kl``): bits and group sizes chosen from measured sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aiakq.errors import error
from aiakq.evaluation.metrics import Comparison
from aiakq.quantizers.model.calibration_inputs import with_images_alone
from aiakq.quantizers.planning.bit_allocation import Widths, allocate, refuse_below, widths_of
from aiakq.quantizers.planning.layers import settle_format
from aiakq.quantizers.planning.sensitivity import SAMPLE_TOKENS, ModelPart, measure
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, Rejected, StageProgress
from aiakq.quantizers.report.records import QuantizeReport
from aiakq.spec import LayerSpec, QuantSpec

#: Candidate widths, narrow to wide. Every server that reads compressed-tensors supports 4 and 8 bits; 2 and 3 are used
#: only if the target is below what 4 bits need.
_WIDE = (LayerSpec(4, 128), LayerSpec(4, 32), LayerSpec(8, 128))
_NARROW = (LayerSpec(2, 64), LayerSpec(3, 128), LayerSpec(3, 32), *_WIDE)
#: Bits per weight below which 4-bit groups do not fit.
_NEEDS_NARROW = 4.13
#: Maximum number of quantization runs in search of --max-kl.
_ATTEMPTS = 5


Attempt = Callable[[QuantSpec, Callable[[Comparison], bool] | None], QuantizeReport]


def quantize_with_chosen_widths(prepared: Prepared, attempt: Attempt, progress: OnProgress) -> QuantizeReport:
    """Choose the widths, quantize, and for ``--max-kl`` choose again until the measured divergence fits.

    Raises ``max_kl`` if the widest candidates do not reach it, ``bad_option`` for a target below the narrowest.
    """
    options = prepared.options
    target, limit = options.target_bpw, options.max_kl
    offered = _NARROW if 2 in options.preset.bits and (target or 4) < _NEEDS_NARROW else _WIDE
    candidates = list(dict.fromkeys(_fit_group_size(layer, prepared) for layer in offered))
    assert prepared.samples is not None, "gptq and awq have samples"
    if target is not None:  # fail before the long measurement
        kinds = [ModelPart((shape.name,), shape.n * shape.k, shape.k) for shape in prepared.shapes]
        kinds = [part for part in kinds if prepared.spec.for_layer(part.names[0]) is not None]
        sizes = widths_of(kinds, candidates, 8 * prepared.storage.itemsize)
        refuse_below(kinds, sizes, target * sum(part.weights for part in kinds))
    rows = max(1, SAMPLE_TOKENS // max(len(sample) for sample in prepared.samples.samples))
    everything = measure(
        prepared.model,
        with_images_alone(prepared.samples.samples[:rows], prepared.model.features),
        candidates,
        next(index for index, layer in enumerate(candidates) if layer.bits == 4),
        prepared.storage,
        lambda done, total: progress(StageProgress("sensitivity", done, total)),
    )
    # Layers named by --skip stay unquantized.
    parts = [part for part in everything if prepared.spec.for_layer(part.names[0]) is not None]
    widths = widths_of(parts, candidates, 8 * prepared.storage.itemsize)
    if target is not None:
        choice = allocate(parts, widths, bits=target * sum(part.weights for part in parts))
        return attempt(_spec(prepared, candidates, parts, choice), None)
    assert limit is not None
    return _search(limit, prepared, attempt, candidates, parts, widths)


def _search(
    limit: float,
    prepared: Prepared,
    attempt: Attempt,
    candidates: Sequence[LayerSpec],
    parts: Sequence[ModelPart],
    widths: Widths,
) -> QuantizeReport:
    """Find the smallest model whose measured divergence stays within ``limit``.

    Parts are ranked by their cost with RTN. The method is more accurate and the evaluation text is another, so the
    limit on the sum of costs is corrected by each measurement.
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
        measured = _measure_divergence(prepared, attempt, _spec(prepared, candidates, parts, choice))
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
            tried[tuple(choice)] = _measure_divergence(prepared, attempt, _spec(prepared, candidates, parts, choice))
        if tried[tuple(choice)] > limit:
            raise error("max_kl", wanted=f"{limit:g}", reached=f"{tried[tuple(choice)]:.2g}")
        best = choice
    return attempt(_spec(prepared, candidates, parts, best), None)


def _measure_divergence(prepared: Prepared, attempt: Attempt, spec: QuantSpec) -> float:
    """Quantize, measure and discard a model; return its divergence."""
    try:
        attempt(spec, lambda comparison: False)
    except Rejected as found:
        return found.comparison.kl
    raise AssertionError("an attempt that is never accepted ends with Rejected")


def _fit_group_size(layer: LayerSpec, prepared: Prepared) -> LayerSpec:
    """Adapt ``layer`` to the options and shapes: one group per row if its group size does not divide every shard."""
    tp = prepared.cut.parts
    fits = all(shape.k // (tp if shape.row_parallel else 1) % layer.group_size == 0 for shape in prepared.shapes)
    symmetric = prepared.options.symmetric is not False
    return replace(layer, group_size=layer.group_size if fits else -1, symmetric=symmetric)


def _spec(
    prepared: Prepared, candidates: Sequence[LayerSpec], parts: Sequence[ModelPart], choice: Sequence[int]
) -> QuantSpec:
    """Return the choice as a spec: the most common width is the default, the others are overrides."""
    weights: dict[LayerSpec, int] = {}
    layers: dict[str, LayerSpec | None] = dict(prepared.spec.layers)
    for part, index in zip(parts, choice, strict=True):
        weights[candidates[index]] = weights.get(candidates[index], 0) + part.weights
        layers |= dict.fromkeys(part.names, candidates[index])
    common = max(weights, key=lambda layer: weights[layer])
    for name in prepared.spec.ignore:
        layers.pop(name, None)
    base = replace(prepared.spec, layers=(), **vars(common))
    found = settle_format(prepared.options, base, layers)
    return replace(found, format=prepared.cut.format or found.format)
