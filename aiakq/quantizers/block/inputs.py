"""BlockInputs: calibration inputs of the linears of a block, collected with forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.quantizers.block.result import BlockResult
from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.experts import ExpertTokens, count_tokens, experts_of, place
from aiakq.quantizers.model.groups import watching
from aiakq.quantizers.model.module_calls import ModuleCall, record_calls
from aiakq.quantizers.model.replay import Replay
from aiakq.quantizers.numerics.magnitudes import largest
from aiakq.quantizers.numerics.second_moment import add_second_moment, mirror

#: Tokens whose outputs are compared to report a layer's error; more would not change the second digit.
ERROR_TOKENS = 4096


class _AllSeen(Exception):
    pass


class BlockInputs:
    """What the linears of one block are given during calibration, seen by running the block as it now is.

    activations  the hidden states before the block.
    groups       the linears that share an input.
    stages       the first linears of the groups of each part of the block; statistics of the experts in one stage are
                 gathered in one pass.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        prefix: str,
        activations: Activations,
        groups: Sequence[tuple[str, ...]],
        stages: Sequence[Sequence[str]],
        result: BlockResult,
    ) -> None:
        self._module = module
        self._index = index
        self._prefix = prefix
        self.activations = activations
        self.replay = Replay(module, index, activations)
        self._groups = groups
        self._stages = stages
        self._result = result
        self._ahead: dict[str, Tensor] = {}

    def record_calls(self, names: Iterable[str]) -> dict[str, list[ModuleCall]]:
        """How the named modules ("" is the block) are called on a sample of tokens, see module_calls.py."""
        return record_calls(self._module, self._index, self.activations, names)

    def observe(
        self, see: Mapping[str, Callable[[Tensor], None]], batches: Iterable[int] | None = None, keep: bool = False
    ) -> None:
        """Run the block over calibration batches and show the inputs of some linears (or routers).

        ``see[name]`` is called per batch with the finite rows of that linear's input, [T, K] float32. The pass ends
        as soon as all of them were seen. ``keep`` says that everything before these linears is finished, so that later
        passes need not compute it again (replay.py). Raises ``not_finite`` if a linear saw nothing finite in the whole
        run.
        """
        kept = dict.fromkeys(see, 0)
        dropped = dict.fromkeys(see, 0)
        sizes: dict[str, float] = {}
        measured = frozenset(self.activations.first_batches(ERROR_TOKENS))

        def take(batch: int, name: str, x: Tensor) -> None:
            if keep:
                self.replay.keep(name, batch, x)
            rows = x.reshape(-1, x.shape[-1])
            # One sum tells whether anything is wrong; only then look row by row.
            if not bool(torch.isfinite(rows.sum())):
                finite = torch.isfinite(rows).all(dim=-1)
                dropped[name] += int((~finite).sum())
                rows = rows[finite]
            kept[name] += len(rows)
            if len(rows):
                if batch in measured:
                    sizes[name] = max(sizes.get(name, 0.0), largest(rows))
                see[name](rows)

        chosen = range(len(self.activations.hidden)) if batches is None else batches
        run = self._observer(list(see), take)
        for batch, found in self.activations.spread(self._module, chosen, run):
            for name, x in found:
                take(batch, name, x.to(self.activations.device))
        self._result.magnitudes.first_look(self._groups, sizes)
        self._result.dropped = max(self._result.dropped, *dropped.values())
        for name, rows in kept.items():
            if not rows:
                raise error(
                    "not_finite",
                    what=f"Every calibration input of {self._prefix}.{name}",
                    hint="Calibrate on other text, and check that the source model computes sensible output.",
                )

    def _observer(
        self, names: list[str], take: Callable[[int, str, Tensor], None]
    ) -> Callable[[nn.Module, int, torch.device], list[tuple[str, Tensor]]]:
        """What runs the block on one batch until all of ``names`` were given their input.

        On one device ``take`` gets each input at once. On several, threads run and return copies of the inputs, so that
        one thread takes them in the order of the batches.
        """

        def run(module: nn.Module, batch: int, device: torch.device) -> list[tuple[str, Tensor]]:
            copies: list[tuple[str, Tensor]] = []
            waiting = set(names)

            def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
                def show(_: nn.Module, args: tuple[Any, ...]) -> None:
                    if self.activations.others:
                        copies.append((name, args[0].clone()))
                    else:
                        take(batch, name, args[0])
                    waiting.discard(name)
                    if not waiting:
                        raise _AllSeen

                return show

            hooks = {module.get_submodule(name): hook(name) for name in names}
            with watching(hooks), suppress(_AllSeen):
                self.replay.run(batch, wanted=tuple(names), block=module, device=device)
            return copies

        return run

    def hessians(self, names: Iterable[str], keep: bool = False) -> dict[str, Tensor]:
        """The mean of ``x x^T`` over the inputs of each named linear, [K, K] float32: half the Hessian of its error.

        An expert's is gathered in one pass with those of other experts (``Experts.chunks``), which are kept until they
        are requested. ``keep`` as in ``observe``.
        """
        requested = list(names)
        missing = [name for name in requested if name not in self._ahead]
        if missing:
            self._ahead |= self._hessians([*missing, *self._neighbours(missing)], keep)
        return {name: self._ahead.pop(name) for name in requested}

    def _neighbours(self, names: list[str]) -> list[str]:
        """The linears in the same place of the other experts of a stage that are not finished."""
        places = {place(name) for name in names if place(name) is not None}
        stage = next((stage for stage in self._stages if names[0] in stage), ())
        if not places:
            return []
        finished = self._result.finished
        return [name for name in stage if name not in finished and name not in names and place(name) in places]

    def _hessians(self, names: list[str], keep: bool) -> dict[str, Tensor]:
        # Made here: what is made during inference cannot be changed in place after it.
        sums = {name: self.new_hessian(name) for name in names}
        rows = dict.fromkeys(names, 0)
        keep = keep and not any(place(name) for name in names)

        def add(name: str) -> Callable[[Tensor], None]:
            def see(x: Tensor) -> None:
                add_second_moment(sums[name], x)
                rows[name] += len(x)

            return see

        self.observe({name: add(name) for name in names}, keep=keep)
        return {name: mirror(total.div_(rows[name])) for name, total in sums.items()}

    def new_hessian(self, name: str) -> Tensor:
        """Zeros [K, K] float32 for the inputs of a linear."""
        weight = self._module.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        return torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)


def count_expert_tokens(module: nn.Module, index: int, prefix: str, activations: Activations) -> list[ExpertTokens]:
    """Count the calibration tokens of every expert of a block; experts with too few then see all tokens, or none."""

    def run() -> None:
        with torch.inference_mode():
            for batch in range(len(activations.hidden)):
                activations.run(module, index, batch)

    counted = []
    for name, mixture in experts_of(module).items():
        seen = count_tokens(f"{prefix}.{name}", mixture, run, activations.tokens)
        mixture.everywhere = frozenset(seen.everywhere)
        counted.append(seen)
    return counted
