"""GPTAQ: GPTQ that also compensates for the quantization error in a layer's inputs.

Li et al. 2025 (arXiv:2504.02692), "asymmetric calibration": plain GPTQ makes a layer reproduce, on its changed inputs
x, the outputs of its unrounded weights on x; GPTAQ makes it reproduce their outputs on x', the inputs in the
unquantized model. Besides the second moment of x this requires the mean of ``(x' - x) x^T``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.block.decoder_block import DecoderBlock
from aiakq.quantizers.block.statistics import Statistic
from aiakq.quantizers.model.experts import expert_pattern
from aiakq.quantizers.model.groups import forward_pre_hooks
from aiakq.quantizers.model.replay import Replay
from aiakq.quantizers.numerics.second_moment import add_second_moment, mirror
from aiakq.quantizers.rounders.gptq import Gptq, Hessians

#: The fraction of the drift that is compensated: the value in the authors' code for language models.
ALPHA = 0.25


@dataclass(frozen=True)
class Gptaq(Gptq):
    """GPTQ with the drift of its inputs; the parameters are those of GPTQ."""

    name = "gptaq"
    needs_original = True

    def _hessians(self, block: DecoderBlock) -> Hessians:
        return Drift(block).moments


class _Seen(Exception):
    pass


class Drift:
    """The second moments of a block's inputs, and their cross moments with the inputs of the unquantized model."""

    def __init__(self, block: DecoderBlock) -> None:
        assert block.original is not None
        self.block = block
        self.original = Replay(block.original.module, block.index, block.original.inputs)

    def moments(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the mean of ``x x^T`` over a linear's inputs and ALPHA times that of ``(x' - x) x^T``, [K, K] float32.

        The second is None if the tokens differ between the two models, as for experts. Raises ``not_finite``.
        """
        block = self.block
        warnings = block.result.warnings
        if expert_pattern(name) is not None:
            warning = f"Experts of {block.prefix} were rounded without GPTAQ: other tokens reach them than before."
            if warning not in warnings:
                warnings.append(warning)
            return block.inputs.hessians([name])[name], None
        sums = block.inputs.gather({name: self._statistic(name)}, keep=True)
        rows, (hessian, drift, matched) = sums[name]
        if not matched:
            warnings.append(f"{block.prefix}.{name} was rounded without GPTAQ: its tokens differ.")
        return mirror(hessian.div_(rows)), drift.mul_(ALPHA / int(matched)) if matched else None

    def _statistic(self, name: str) -> Statistic:
        """Return the sums of ``x x^T`` and of ``(x' - x) x^T``, and the number of tokens in the second: [1] int64."""
        inputs = self.block.inputs

        def start() -> list[Tensor]:
            return [inputs.new_hessian(name), inputs.new_hessian(name), torch.zeros(1, dtype=torch.int64)]

        def add(totals: list[Tensor], x: Tensor, batch: int, weights: Tensor | None) -> None:
            hessian, drift, matched = totals
            add_second_moment(hessian, x if weights is None else x * weights.sqrt().unsqueeze(1))
            expected = self._original_input(name, batch)
            if expected is not None and expected.shape == x.shape and bool(torch.isfinite(expected.sum())):
                drift.addmm_((expected - x).T, x if weights is None else x * weights.unsqueeze(1))
                matched += len(x)

        return Statistic(start, add, weighted=True)

    def _original_input(self, name: str, batch: int) -> Tensor | None:
        """Return the linear's input [T, K] in the unquantized model, divided by the scales folded before it."""
        inputs: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.original.keep(name, batch, args[0])
            inputs.append(args[0].reshape(-1, args[0].shape[-1]))
            raise _Seen

        with forward_pre_hooks({self.original.block.get_submodule(name): note}), torch.inference_mode():
            try:
                self.original.run(batch, names=(name,))
            except _Seen:
                pass
        if not inputs:
            return None
        columns = self.block.folder.columns
        return inputs[0] / columns[name] if name in columns else inputs[0]
