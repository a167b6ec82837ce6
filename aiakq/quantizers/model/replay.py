"""Reruns a block without recomputing the parts whose linears are already quantized.

GPTQ calibrates each group of linears on inputs that passed through previously rounded ones, so a block runs once per
group. What precedes a finished group does not change any more: the inputs of its last linear are cached, and if a
module of the block (attention, MLP) returns exactly that linear's output, the linear on its cached input replaces the
module. Results are bit-identical; for a Llama block attention is computed once instead of four times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.activations import Activations, HiddenStates

#: Maximum bytes of cached inputs in memory; beyond it they are spilled like hidden states.
_IN_MEMORY = 2**29
#: Fraction of a GPU's memory that cached inputs leave free; those that do not fit there are cached in memory.
_LEFT_FREE = 0.5


class Replay:
    """One block and its calibration inputs, with cached inputs of finished linears.

    Cached inputs count against the budget of the hidden states, and at most half a gigabyte of them is in memory.
    Those on a GPU stay there while half of it is free.
    """

    def __init__(self, block: nn.Module, index: int, inputs: Activations) -> None:
        self.block = block
        self.index = index
        self.inputs = inputs
        self._cached_inputs: dict[str, HiddenStates] = {}
        self._owners: dict[str, tuple[str, bool] | None] = {}

    def keep(self, name: str, batch: int, x: Tensor) -> None:
        """Cache the input of the linear ``name`` on one batch; nothing before it may change afterwards.

        Inputs of a linear that replaces no module are dropped with the next run.
        """
        if self._owners.get(name, ()) is None:
            return
        if name not in self._cached_inputs:
            hidden = self.inputs.hidden
            cached = sum(states.nbytes for states in list(self._cached_inputs.values()))
            budget = min(_IN_MEMORY, hidden.budget - hidden.nbytes) - cached
            self._cached_inputs[name] = HiddenStates((), max(0.0, budget), hidden.folder)
        if not self._cached_inputs[name].has(batch):
            self._cached_inputs[name].put(batch, _copied(x.detach()))

    def run(
        self,
        batch: int,
        names: tuple[str, ...] = (),
        run_all: bool = False,
        block: nn.Module | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the output of the block, or of a copy on another device, on one batch.

        names    linears whose modules must run; other modules are replaced where possible.
        run_all  run all modules.
        """
        block = self.block if block is None else block
        known = [name for name, owner in self._owners.items() if owner is not None and not run_all]
        for name in list(self._cached_inputs):
            if self._owners.get(name, ()) is None:
                self._cached_inputs.pop(name, None)
        unknown = [name for name in list(self._cached_inputs) if name not in self._owners]
        with self._replaced_modules(block, known, batch, names), self._find_owners(block, unknown):
            return self.inputs.run(block, self.index, batch, device)

    @contextmanager
    def _replaced_modules(
        self, block: nn.Module, names: list[str], batch: int, required: tuple[str, ...]
    ) -> Iterator[None]:
        replaced: list[nn.Module] = []
        for name in names:
            owner = self._owners[name]
            assert owner is not None
            if not self._cached_inputs[name].has(batch) or any(
                f"{other}.".startswith(f"{owner[0]}.") for other in required
            ):
                continue
            module, linear = block.get_submodule(owner[0]), block.get_submodule(name)
            module.forward = self._linear_forward(linear, self._cached_inputs[name], batch, owner[1])
            replaced.append(module)
        try:
            yield
        finally:
            for module in replaced:
                del module.forward

    def _linear_forward(
        self, linear: nn.Module, cached: HiddenStates, batch: int, in_tuple: bool
    ) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            out = linear(cached[batch].to(next(linear.parameters()).device))
            return (out, None) if in_tuple else out

        return forward

    @contextmanager
    def _find_owners(self, block: nn.Module, names: list[str]) -> Iterator[None]:
        """Find, for linears with cached inputs, the outermost module that returns exactly the linear's output."""
        outputs: dict[str, tuple[Tensor, Tensor]] = {}
        handles = []

        def note(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                outputs[name] = output, output.clone()

            return keep

        def compare(owner: str, name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: object, output: Any) -> None:
                in_tuple = isinstance(output, tuple) and len(output) == 2 and output[1] is None
                first = output[0] if in_tuple else output
                self._owners.setdefault(name, None)
                if name in outputs and isinstance(first, Tensor):
                    tensor, bits = outputs[name]
                    # The same tensor, not written to in between.
                    if first.data_ptr() == tensor.data_ptr() and torch.equal(first, bits):
                        self._owners[name] = owner, in_tuple

            return hook

        for name in names:
            handles.append(block.get_submodule(name).register_forward_hook(note(name)))
            parts = name.split(".")
            for depth in range(len(parts) - 1, 0, -1):  # inner ones first, so that the outermost one wins
                owner = ".".join(parts[:depth])
                handles.append(block.get_submodule(owner).register_forward_hook(compare(owner, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _copied(x: Tensor) -> Tensor:
    """Return a copy of x: where it is if that is a GPU with room, else on the CPU."""
    if x.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(x.device)
        if free - x.nbytes >= _LEFT_FREE * total:
            return x.clone()
    return x.to("cpu", copy=True)
