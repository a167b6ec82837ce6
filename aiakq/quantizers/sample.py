"""A few calibration tokens on which parts of a block are run again and again while something is searched.

A module's call is recorded where the block makes it, cut to a few sequences, and repeated with trial weights; what it
answers is compared with what it answered before anything was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.block import BlockWork

#: Tokens in a sample: this many for narrow models, fewer for wide ones, whose every trial costs more.
MOST_TOKENS, FEWEST_TOKENS, TOKENS_TIMES_WIDTH = 4096, 512, 2**21


@dataclass
class ModuleCall:
    """One call of a module and the tensor it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def again(self, module: nn.Module) -> Tensor:
        return first(module(*self.args, **self.kwargs))


def first(output: Any) -> Tensor:
    """The hidden states a module gives, alone or first in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def collect(work: BlockWork, names: Iterable[str]) -> dict[str, list[ModuleCall]]:
    """How the named modules ("" is the block) are called on a sample of tokens; none where an answer is not finite."""
    calls: dict[str, list[ModuleCall]] = {name: [] for name in names}
    if not calls or not len(work.inputs.hidden):
        return calls
    shape = work.inputs.hidden.shapes[0]
    wanted = min(MOST_TOKENS, max(FEWEST_TOKENS, TOKENS_TIMES_WIDTH // shape[-1]))

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen[name].append(ModuleCall(args, kwargs, first(output)))

        return note

    modules = {name: work.block.get_submodule(name) for name in calls}
    for batch in work.some_batches(wanted):
        seen: dict[str, list[ModuleCall]] = {name: [] for name in calls}
        handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
        try:
            with torch.inference_mode():
                work.inputs.run(work.block, work.index, batch)
        finally:
            for handle in handles:
                handle.remove()
        size, tokens = work.inputs.hidden.shapes[batch][:2]
        rows = min(size, -(-wanted // tokens))
        for name, found in seen.items():
            cut = [_cut(call, modules[name], size, rows) if rows < size else call for call in found]
            calls[name] += [call for call in cut if bool(torch.isfinite(call.output).all())]
        wanted -= rows * tokens
    return calls


def _cut(call: ModuleCall, module: nn.Module, size: int, rows: int) -> ModuleCall:
    """The call with the first ``rows`` of ``size`` sequences, if the module then answers as it did for those."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:rows].clone() if value.dim() > 1 and value.shape[0] == size else value
        if isinstance(value, tuple):
            return tuple(part(item) for item in value)
        return value

    if call.output.dim() < 2 or call.output.shape[0] != size:
        return call
    kwargs = {name: part(value) for name, value in call.kwargs.items()}
    smaller = ModuleCall(part(call.args), kwargs, call.output[:rows].clone())
    try:
        with torch.inference_mode():
            output = smaller.again(module)
    except (RuntimeError, ValueError, IndexError):
        return call
    if output.shape != smaller.output.shape or not torch.allclose(output, smaller.output, rtol=1e-3, atol=1e-4):
        return call
    return ModuleCall(smaller.args, smaller.kwargs, output)


def output_error(module: nn.Module, calls: Iterable[ModuleCall]) -> float:
    """The squared distance of what the module answers now from what it answered."""
    total = 0.0
    with torch.inference_mode():
        for call in calls:
            total += float((call.again(module) - call.output).double().square().sum())
    return total


@contextmanager
def trial_weights(work: BlockWork, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The block with other weights in some of its linears, while the context is open."""
    kept = {name: work.linears[name].weight for name in weights}
    try:
        for name, weight in weights.items():
            work.linears[name].weight = nn.Parameter(weight, requires_grad=False)
        yield
    finally:
        for name, parameter in kept.items():
            work.linears[name].weight = parameter
