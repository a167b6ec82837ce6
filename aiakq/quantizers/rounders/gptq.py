"""gptq: round one input column after the other, and let the columns not yet rounded make up for the error.

Frantar et al. 2022 (arXiv:2210.17323), algorithm 1, with lazy updates in blocks. Inside a decoder block it is truly
sequential: query, key and value first, then the attention output, then gate and up, then down, each from inputs that
already passed through what was rounded before. The loop itself is in feedback.py. Two refinements are options: scales
of AWQ folded first (``awq_scaling``), and GPTAQ, which also makes up for what earlier roundings did to the inputs
(gptaq.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from aiakq.quantizers.block import BlockWork
from aiakq.quantizers.numerics.gptq import Settings, round_with_feedback
from aiakq.quantizers.rounders.gptaq import Drift

#: How often columns are gone over again if not told otherwise; four times gain little more than two.
SWEEPS = 2


def quantize_block(work: BlockWork) -> None:
    """Round the linears of the block, group by group in the order they run."""
    columns: dict[str, Tensor] = {}
    if work.plan.options.awq_scaling:
        from aiakq.quantizers.transforms import awq

        columns = awq.fold_scales(work)
    drift = Drift(work, columns) if work.plan.options.gptaq else None
    round_groups(work, drift)


def round_groups(
    work: BlockWork, drift: Drift | None = None, input_scales: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Round the linears of the block as it now is, from the second moments of their inputs.

    ``input_scales``: the activation scale of each linear that stores one.
    """
    for group in work.groups:
        first = group[0]
        if drift is None:
            gram, shift = work.grams([first], keep=True)[first], None
        else:
            gram, shift = drift.moments(first)
        for alike in work.alike(group):
            _round_together(work, alike, gram, shift, input_scales)
        del gram, shift
    for name in work.linears:
        if name not in work.finished:
            work.finish(name, *work.round_plainly(name), input_scale=input_scales.get(name))


def _round_together(
    work: BlockWork, names: tuple[str, ...], gram: Tensor, drift: Tensor | None, input_scales: Mapping[str, Tensor]
) -> None:
    """Round linears that share an input and are stored alike as one matrix."""
    options, spec = work.plan.options, work.spec(names[0])
    settings = Settings(
        spec.bits,
        spec.group_size,
        spec.symmetric,
        work.plan.scales,
        options.act_order or "group",
        options.damp,
        search=options.scale_search != "minmax",
        sweeps=SWEEPS if options.sweeps is None else options.sweeps,
    )
    rounded = round_with_feedback([work.weight(name) for name in names], gram, settings, drift)
    where = f"{work.prefix}.{names[0]}"
    if rounded.damp is None:
        work.warnings.append(f"The Hessian of {where} could not be factored; the layer was rounded plainly.")
    elif rounded.damp > options.damp:
        work.warnings.append(f"The Hessian of {where} needed a damping of {rounded.damp:g}.")
    for name in names:
        work.remark(name, damp="none: rounded plainly" if rounded.damp is None else rounded.damp)
    sizes = [work.linears[name].out_features for name in names]
    parts = [tensor.split(sizes) for tensor in (rounded.codes, rounded.scales, rounded.zeros)]
    del rounded
    for name, codes, scales, zeros in zip(names, *parts, strict=True):
        work.finish(name, codes.clone(), scales.clone(), zeros.clone(), input_scale=input_scales.get(name))
