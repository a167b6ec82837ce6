"""GPTAQ: rounding that also makes up for what earlier roundings did to a layer's inputs.

Li et al. 2025 (arXiv:2504.02692), "asymmetric calibration": plain GPTQ asks of a layer to give on its changed inputs x
what its unrounded weights give on x; here it is to give what they give on x', the inputs in the unquantized model.
Besides the second moment of x that takes the mean of ``(x' - x) x^T``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import AiakqError
from aiakq.quantizers.block import BlockWork
from aiakq.quantizers.model.experts import place
from aiakq.quantizers.model.groups import watching
from aiakq.quantizers.model.replay import Replay, add_second_moment, mirror

#: How much of the drift is made up for: what the authors' code for language models uses.
ALPHA = 0.25


class _Seen(Exception):
    pass


class Drift:
    """The moments of a block's inputs beside those of the unquantized model.

    ``columns``: the linears whose inputs were divided by a folded scale, and that scale [K].
    """

    def __init__(self, work: BlockWork, columns: Mapping[str, Tensor]) -> None:
        assert work.original is not None
        self.work = work
        self.columns = columns
        self.original = Replay(work.original.block, work.index, work.original.inputs)

    def moments(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The mean of ``x x^T`` of a linear's inputs and ALPHA times that of ``(x' - x) x^T``, both [K, K] float32.

        There is no second one where tokens differ between the two models, as those of an expert do. Raises
        ``not_finite``.
        """
        work = self.work
        if place(name) is not None:
            said = f"Experts of {work.prefix} were rounded without GPTAQ: other tokens reach them than before."
            if said not in work.warnings:
                work.warnings.append(said)
            return work.grams([name])[name], None
        gram, drift = work.new_moment(name), work.new_moment(name)
        rows = pairs = 0
        wanted: Tensor | None = None

        def see(x: Tensor) -> None:
            nonlocal rows, pairs
            add_second_moment(gram, x)
            rows += len(x)
            if wanted is not None and wanted.shape == x.shape and bool(torch.isfinite(wanted.sum())):
                drift.addmm_((wanted - x).T, x)
                pairs += len(x)

        problem: AiakqError | None = None
        for batch in range(len(work.inputs.hidden)):
            wanted = self._original_input(name, batch)
            try:
                work.observe({name: see}, [batch], keep=True)
            except AiakqError as caught:  # nothing finite in this batch
                problem = caught
        if problem is not None and not rows:
            raise problem
        if not pairs:
            work.warnings.append(f"{work.prefix}.{name} was rounded without GPTAQ: its tokens differ.")
        return mirror(gram.div_(rows)), drift.mul_(ALPHA / pairs) if pairs else None

    def _original_input(self, name: str, batch: int) -> Tensor | None:
        """The linear's input [T, K] in the unquantized model, as the folded scales would have made it."""
        found: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.original.keep(name, batch, args[0])
            found.append(args[0].reshape(-1, args[0].shape[-1]))
            raise _Seen

        with watching({self.original.block.get_submodule(name): note}), torch.inference_mode():
            try:
                self.original.run(batch, wanted=(name,))
            except _Seen:
                pass
        if not found:
            return None
        return found[0] / self.columns[name] if name in self.columns else found[0]
