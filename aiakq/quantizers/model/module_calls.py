"""Recorded calls of a block's modules, replayed with candidate weights during a scale search.

Calls are recorded on a few sequences and repeated with candidate weights; the outputs are compared with the recorded
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.activations import SAMPLE_TOKENS, Activations, Output, first
from aiakq.quantizers.numerics.sums import total

#: Tokens in a sample: SAMPLE_TOKENS for narrow models, fewer for wide ones, for which each replay costs more.
FEWEST_TOKENS, TOKENS_TIMES_WIDTH = 512, 2**21


@dataclass
class ModuleCall:
    """One call of a module and its output tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, object]
    output: Tensor

    def repeat(self, module: nn.Module) -> Tensor:
        return first(module(*self.args, **self.kwargs))


def record_calls(
    block: nn.Module, index: int, inputs: Activations, names: Iterable[str]
) -> dict[str, list[ModuleCall]]:
    """Record calls of the named modules ("" is the block) on a sample of tokens; only calls with finite outputs.

    ``block`` has the index ``index`` in its model.
    """
    calls: dict[str, list[ModuleCall]] = {name: [] for name in names}
    if not calls or not len(inputs.hidden):
        return calls
    shape = inputs.hidden.shapes[0]
    tokens_left = min(SAMPLE_TOKENS, max(FEWEST_TOKENS, TOKENS_TIMES_WIDTH // shape[-1]))

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: Output) -> None:
            seen[name].append(ModuleCall(args, kwargs, first(output)))

        return note

    modules = {name: block.get_submodule(name) for name in calls}
    for batch in inputs.first_batches(tokens_left):
        seen: dict[str, list[ModuleCall]] = {name: [] for name in calls}
        handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
        try:
            with torch.inference_mode():
                inputs.run(block, index, batch)
        finally:
            for handle in handles:
                handle.remove()
        size, tokens = inputs.hidden.shapes[batch][:2]
        rows = min(size, -(-tokens_left // tokens))
        for name, new_calls in seen.items():
            cut = [_cut(call, modules[name], size, rows) if rows < size else call for call in new_calls]
            calls[name] += [call for call in cut if bool(torch.isfinite(call.output).all())]
        tokens_left -= rows * tokens
    return calls


def _cut(call: ModuleCall, module: nn.Module, size: int, rows: int) -> ModuleCall:
    """Cut the call to the first ``rows`` of ``size`` sequences, if the module then gives the same output for them."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:rows].clone() if value.dim() > 1 and value.shape[0] == size else value
        if isinstance(value, tuple):
            return tuple(part(item) for item in value)
        if isinstance(value, dict):
            return {key: part(item) for key, item in value.items()}
        return value

    if call.output.dim() < 2 or call.output.shape[0] != size:
        return call
    kwargs = {name: part(value) for name, value in call.kwargs.items()}
    smaller = ModuleCall(part(call.args), kwargs, call.output[:rows].clone())
    try:
        with torch.inference_mode():
            output = smaller.repeat(module)
    except (RuntimeError, ValueError, IndexError):
        return call
    if output.shape != smaller.output.shape or not torch.allclose(output, smaller.output, rtol=1e-3, atol=1e-4):
        return call
    return ModuleCall(smaller.args, smaller.kwargs, output)


def output_error(module: nn.Module, calls: Iterable[ModuleCall]) -> float:
    """Return the squared distance between the module's outputs and the recorded ones."""
    with torch.inference_mode():
        return sum((total((call.repeat(module) - call.output).double().square()) for call in calls), 0.0)


@contextmanager
def replaced_weights(linears: Mapping[str, nn.Linear], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the weights [N, K] of the named linears while the context is open."""
    kept = {name: linears[name].weight for name in weights}
    try:
        for name, weight in weights.items():
            linears[name].weight = nn.Parameter(weight, requires_grad=False)
        yield
    finally:
        for name, parameter in kept.items():
            linears[name].weight = parameter
