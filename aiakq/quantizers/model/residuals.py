"""Finds the linears whose outputs are added to the residual stream, by comparing tensors of one forward pass.

The output y of such a linear (the attention output or down projection of a Llama) turns a tensor r of the block into
``s = r + m y``. Here r is the block's input or the input of a norm or linear that ran before, s is the block's output
or such an input that follows, and m is constant (1, or the residual multiplier of Granite). Where a norm comes between,
as in Gemma 2, nothing is found. Two outputs that are added to the same r (attention and MLP in parallel, as in GPT-NeoX
and Phi) are found together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.experts import all_experts, expert
from aiakq.quantizers.model.groups import block_linears, structure

#: Number of tokens on which a block is tested, if their outputs do not depend on the rest.
_TOKENS = 64
#: Maximum relative difference of equal tensors; unequal ones differ by far more.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Residual:
    """A linear whose output is added to a stream.

    stream      the module whose input is the stream before the addition; "" is the block.
    multiplier  the constant m, by which the output is multiplied.
    share       1 over the number of linears whose outputs are added to the same stream at once.
    """

    stream: str
    multiplier: float
    share: float


@dataclass
class ResidualTrace:
    """The residual additions of blocks, found once for all blocks of equal structure."""

    _known: dict[tuple[object, ...], dict[str, Residual]] = field(default_factory=dict)

    def trace(self, block: nn.Module, index: int, inputs: Activations) -> dict[str, Residual]:
        """Return the additions by the name of their linear, found on one calibration sequence."""
        kind = structure(block)
        if kind not in self._known:
            run = inputs.sample_forward(block, index, _TOKENS) if len(inputs.hidden) else None
            with all_experts(block):
                self._known[kind] = {} if run is None else find_residuals(block, run)
        return self._known[kind]


@dataclass
class _Seen:
    """A tensor [T, hidden] of the residual stream or of a linear's output, and its position among the calls."""

    name: str
    rows: Tensor
    position: int


def find_residuals(block: nn.Module, run: Callable[[], Tensor]) -> dict[str, Residual]:
    """Return the additions in a block, by the name of their linear; ``run`` runs the block once and returns its output.

    Experts are left out, because other tokens reach each of them.
    """
    streams, outputs = _observed(block, run)
    found: dict[str, Residual] = {}
    for count in (1, 2):
        for added in itertools.combinations(outputs, count):
            if any(output.name in found for output in added):
                continue
            match = _match(streams, added)
            if match is not None:
                stream, multiplier = match
                found |= {output.name: Residual(stream, multiplier, 1 / count) for output in added}
    return found


def _observed(block: nn.Module, run: Callable[[], Tensor]) -> tuple[list[_Seen], list[_Seen]]:
    """Return the possible streams, and the outputs of linears that may be added to them, in execution order."""
    streams: list[_Seen] = []
    outputs: list[_Seen] = []
    position = itertools.count()

    def keep(into: list[_Seen], name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any = None) -> None:
            x = output if into is outputs else args[0] if args else None
            if isinstance(x, Tensor):
                into.append(_Seen(name, x.reshape(-1, x.shape[-1]).clone(), next(position)))

        return hook

    linears = {name: module for name, module in block_linears(block).items() if expert(name) is None}
    norms = {name: module for name, module in block.named_modules() if _is_norm(module)}
    handles = [module.register_forward_pre_hook(keep(streams, name)) for name, module in {**norms, **linears}.items()]
    handles += [module.register_forward_hook(keep(outputs, name)) for name, module in linears.items()]
    first: list[Tensor] = []
    handles.append(block.register_forward_pre_hook(lambda _, args: first.append(args[0].clone())))
    try:
        with torch.inference_mode():
            last = run()
    finally:
        for handle in handles:
            handle.remove()
    width = last.shape[-1]
    start = [_Seen("", first[0].reshape(-1, width), -1)] if first and first[0].shape[-1] == width else []
    end = _Seen("", last.reshape(-1, width), next(position))
    rows = len(end.rows)

    def alike(seen: list[_Seen]) -> list[_Seen]:
        return [each for each in seen if each.rows.shape == (rows, width)]

    return [*start, *alike(streams), end], alike(outputs)


def _match(streams: list[_Seen], added: tuple[_Seen, ...]) -> tuple[str, float] | None:
    """Return the module whose input is the stream to which the outputs are added, and the multiplier; else None."""
    first, last = added[0].position, added[-1].position
    output = torch.stack([each.rows for each in added]).sum(0).double()
    size = float(output.square().sum())
    if not size > 0:
        return None
    for after in (stream for stream in streams if stream.position > last):
        for before in (stream for stream in streams if stream.position < first):
            gap = after.rows.double() - before.rows.double()
            multiplier = float((gap * output).sum()) / size
            rest = float((gap - multiplier * output).square().sum())
            # A stream that is large beside the output limits the precision of the gap.
            precision = 1e-6**2 * float(before.rows.double().square().sum())
            if abs(multiplier) > 1e-6 and rest <= _TOLERANCE**2 * float(gap.square().sum()) + precision:
                return before.name, round(multiplier, 4)
    return None


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 1 and not next(module.children(), None)
