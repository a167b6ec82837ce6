"""BlockInputs: calibration inputs of the linears of a block, collected with forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.block.result import BlockResult
from aiakq.quantizers.block.statistics import Seen, Statistic, merge_parts
from aiakq.quantizers.importance.routing import routed_tokens
from aiakq.quantizers.importance.row_factors import RowFactors
from aiakq.quantizers.importance.token_weights import RoutedTokens, TokenWeights
from aiakq.quantizers.model.activations import SAMPLE_TOKENS, Activations
from aiakq.quantizers.model.experts import ExpertTokens, count_tokens, expert_pattern, experts_of
from aiakq.quantizers.model.groups import forward_pre_hooks
from aiakq.quantizers.model.module_calls import ModuleCall, record_calls
from aiakq.quantizers.model.replay import Replay
from aiakq.quantizers.numerics.second_moment import add_second_moment, mirror
from aiakq.quantizers.workers.protocol import Value, Workers, shards
from aiakq.quantizers.workers.worker_group import FirstWorker

#: Callback for the input of a linear on one batch: (batch, name, input [..., K], the tokens if it is an expert's).
_Take = Callable[[int, str, Tensor, RoutedTokens | None], None]
#: What an observed pass returns of a batch: name, input and tokens of each linear.
_Seen = list[tuple[str, Tensor, RoutedTokens | None]]


class _AllSeen(Exception):
    pass


class BlockInputs:
    """The calibration inputs of one block's linears, observed by running the block in its current state.

    activations  hidden states before the block.
    groups       groups of linears that share an input.
    stages       first linears of the groups of each part of the block; the Hessians of experts in one stage are
                 accumulated in one pass.
    workers      the workers that share the batches.
    weights      weights of the calibration tokens, of the batches of this worker; None: all are 1.
    rows         factors of the linears' rows; None unless the recipe weighs them.
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
        workers: Workers | None = None,
    ) -> None:
        self._module = module
        self._index = index
        self._prefix = prefix
        self.activations = activations
        self.replay = Replay(module, index, activations)
        self._groups = groups
        self._stages = stages
        self._result = result
        self._workers = workers or FirstWorker()
        self._shards = shards(len(activations.hidden))
        self._ahead: dict[str, Tensor] = {}
        self.weights: TokenWeights | None = None
        self.rows: RowFactors | None = None

    def record_calls(self, names: Iterable[str]) -> dict[str, list[ModuleCall]]:
        """Record calls of the named modules ("" is the block) on a sample of tokens; see module_calls.py."""
        return record_calls(self._module, self._index, self.activations, names)

    def gather(
        self,
        statistics: Mapping[str, Statistic],
        keep: bool = False,
        beside: Mapping[str, Callable[[int, Tensor], None]] | None = None,
    ) -> dict[str, tuple[int, list[Tensor]]]:
        """Run the block over all calibration batches and accumulate statistics of the inputs of linears (or routers).

        Returns for each name the number of finite rows and the statistic's totals over them. Batches are distributed
        over the workers and totals are summed shard by shard, so that the bits do not depend on the number of workers
        or devices. ``keep`` declares that everything before these linears is finished, so that later passes need not
        recompute it (replay.py). ``beside``: modules whose inputs in the same run are passed to a callback, with the
        batch, for use by a statistic of a later linear. Raises ``not_finite`` if a linear has no finite input in the
        whole run.
        """
        names = list(statistics)
        if not self._shards:
            raise Seen.nothing(names[0], self._prefix)
        own = self._parts(statistics, keep, beside or {})
        merged = self._workers.combine(len(self._shards), own, merge_parts(statistics))
        seen = Seen(names)
        totals = seen.unpack(merged)
        self._record(seen)
        return {name: (seen.rows[name], totals[name]) for name in names}

    def _parts(
        self, statistics: Mapping[str, Statistic], keep: bool, beside: Mapping[str, Callable[[int, Tensor], None]]
    ) -> Iterator[list[Value]]:
        """Return the statistics of each of this worker's shards."""
        mine = self._shards[self._workers.rank :: self._workers.size]
        last = {shard[-1] for shard in mine}
        seen: Seen
        totals: dict[str, list[Tensor]]

        def start() -> None:
            nonlocal seen, totals
            seen = Seen(list(statistics))
            # Tensors created in inference mode could not be modified in place afterwards.
            with torch.inference_mode(False):
                totals = {name: statistic.start() for name, statistic in statistics.items()}

        def take(batch: int, name: str, x: Tensor, routing: RoutedTokens | None) -> None:
            if name in beside:
                beside[name](batch, x)
                return
            if keep:
                self.replay.keep(name, batch, x)
            weighted = statistics[name].weighted
            weights = self._weights(name, batch, x, routing) if weighted else None
            rows, weights = seen.finite_rows(name, x, batch in self._measured, weights)
            if len(rows):
                statistics[name].add(totals[name], rows, batch, *([weights] if weighted else []))

        start()
        run = self._observer([*statistics, *beside], take, copies=bool(self.activations.others))
        batches = [batch for shard in mine for batch in shard]
        for batch, partial in self.activations.spread(self._module, batches, run):
            for name, x, routing in partial:
                take(batch, name, x.to(self.activations.device), routing)
            if batch in last:
                yield seen.pack(totals)
                start()

    def _weights(self, name: str, batch: int, x: Tensor, routing: RoutedTokens | None) -> Tensor | None:
        """Return the weights [T] of the tokens in x [..., K], the input of a linear; None: all are 1."""
        if self.weights is None:
            return None
        group = next((group for group in self._groups if name in group), (name,))
        weights = self.weights.of(group, batch, routing)
        if weights is not None and weights.numel() == x.numel() // x.shape[-1]:
            return weights.to(x.device)
        warning = f"The calibration tokens of {self._prefix}.{name} have no weights: their gradients are not known."
        if warning not in self._result.warnings:
            self._result.warnings.append(warning)
        return None

    def observe(
        self, see: Mapping[str, Callable[[Tensor], None]], batches: Iterable[int] | None = None, keep: bool = False
    ) -> None:
        """Run the block over calibration batches and pass the inputs of some linears (or routers) to callbacks.

        ``see[name]`` is called per batch, in order, with the finite rows of that linear's input, [T, K] float32. A pass
        ends as soon as all of them have been seen. Every worker sees all batches and receives the inputs of those it
        does not hold from others: ``gather`` is faster. ``keep`` and errors as in ``gather``.
        """
        seen = Seen(list(see))

        def take(batch: int, name: str, x: Tensor, routing: RoutedTokens | None = None) -> None:
            if keep and self.activations.hidden.has(batch):
                self.replay.keep(name, batch, x)
            rows, _ = seen.finite_rows(name, x, batch in self._measured)
            if len(rows):
                see[name](rows)

        chosen = list(range(len(self.activations.hidden)) if batches is None else batches)
        if self._workers.size > 1 and not self._measured.issuperset(chosen):
            self._broadcast_inputs(list(see), chosen, take)
        else:
            run = self._observer(list(see), take, copies=bool(self.activations.others))
            for batch, results in self.activations.spread(self._module, chosen, run):
                for name, x, _ in results:
                    take(batch, name, x.to(self.activations.device))
        self._record(seen)

    def _broadcast_inputs(
        self, names: list[str], batches: Iterable[int], take: Callable[[int, str, Tensor], None]
    ) -> None:
        """Let every worker ``take`` the inputs of ``names`` on all ``batches``, sent by the worker that has it."""
        owner = {batch: number % self._workers.size for number, shard in enumerate(self._shards) for batch in shard}
        run = self._observer(names, lambda *_: None, copies=True)
        for batch in batches:

            def inputs(batch: int = batch) -> list[Value]:
                ((_, results),) = self.activations.spread(self._module, [batch], run)
                return [value for name, x, _ in results for value in (name, x)]

            values = self._workers.broadcast(owner[batch], inputs)
            for name, x in zip(values[::2], values[1::2], strict=True):
                assert isinstance(name, str) and isinstance(x, Tensor)
                with torch.inference_mode():
                    take(batch, name, x)

    def _record(self, seen: Seen) -> None:
        """Record the observations of a pass for the report. Raises ``not_finite``."""
        self._result.magnitudes.first_look(self._groups, seen.sizes)
        self._result.dropped = max(self._result.dropped, *seen.dropped.values())
        for name, rows in seen.rows.items():
            if not rows:
                raise Seen.nothing(name, self._prefix)

    @cached_property
    def _measured(self) -> frozenset[int]:
        """The sample batches, which every worker has."""
        return frozenset(self.activations.first_batches(SAMPLE_TOKENS))

    def _observer(self, names: list[str], take: _Take, copies: bool) -> Callable[[nn.Module, int, torch.device], _Seen]:
        """Return a function that runs the block on one batch until all of ``names`` have received their input.

        ``take`` is called with each input immediately; with ``copies``, the inputs are returned instead.
        """

        def run(module: nn.Module, batch: int, device: torch.device) -> _Seen:
            kept: _Seen = []
            waiting = set(names)

            def hook(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
                def show(_: nn.Module, args: tuple[Any, ...]) -> None:
                    routing = None if self.weights is None else routed_tokens(module, name)
                    if copies:
                        kept.append((name, args[0].clone(), routing))
                    else:
                        take(batch, name, args[0], routing)
                    waiting.discard(name)
                    if not waiting:
                        raise _AllSeen

                return show

            hooks = {module.get_submodule(name): hook(name) for name in names}
            with forward_pre_hooks(hooks), suppress(_AllSeen):
                self.replay.run(batch, names=tuple(names), block=module, device=device)
            return kept

        return run

    def hessians(self, names: Iterable[str], keep: bool = False) -> dict[str, Tensor]:
        """Return the mean of ``x x^T`` over the inputs of each named linear, [K, K] float32: half the Hessian of its
        error.

        The Hessian of an expert is accumulated in one pass with those of other experts (``Experts.chunks``), which are
        kept until they are requested. ``keep`` as in ``observe``.
        """
        requested = list(names)
        missing = [name for name in requested if name not in self._ahead]
        if missing:
            self._ahead |= self._hessians([*missing, *self.neighbours(missing)], keep)
        return {name: self._ahead.pop(name) for name in requested}

    def neighbours(self, names: list[str]) -> list[str]:
        """Return the corresponding linears of other experts in the stage that are not finished."""
        patterns = {expert_pattern(name) for name in names if expert_pattern(name) is not None}
        stage = next((stage for stage in self._stages if names[0] in stage), ())
        if not patterns:
            return []
        finished = self._result.finished
        return [
            name for name in stage if name not in finished and name not in names and expert_pattern(name) in patterns
        ]

    def _hessians(self, names: list[str], keep: bool) -> dict[str, Tensor]:
        keep = keep and not any(expert_pattern(name) for name in names)
        hessians = self.gather({name: self.second_moment(name) for name in names}, keep)
        return {name: mirror(total.div_(rows)) for name, (rows, (total,)) in hessians.items()}

    def second_moment(self, name: str) -> Statistic:
        """Return the statistic ``x^T x`` of a linear's inputs, weighted, the upper triangle of [K, K] float32."""

        def add(totals: list[Tensor], rows: Tensor, batch: int, weights: Tensor | None) -> None:
            add_second_moment(totals[0], rows if weights is None else rows * weights.sqrt().unsqueeze(1))

        return Statistic(lambda: [self.new_hessian(name)], add, weighted=True)

    def new_hessian(self, name: str) -> Tensor:
        """Return zeros [K, K] float32 for the Hessian of a linear."""
        weight = self._module.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        return torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)


def count_expert_tokens(
    module: nn.Module, index: int, prefix: str, activations: Activations, workers: Workers | None = None
) -> list[ExpertTokens]:
    """Count the calibration tokens of every expert of a block; experts with too few then see all tokens, or use RTN."""
    workers = workers or FirstWorker()
    mine = [batch for shard in shards(len(activations.hidden))[workers.rank :: workers.size] for batch in shard]

    def run() -> None:
        with torch.inference_mode():
            for batch in mine:
                activations.run(module, index, batch)

    def merge(total: list[Value], part: list[Value]) -> None:
        assert isinstance(total[0], Tensor) and isinstance(part[0], Tensor)
        total[0].add_(part[0])

    def add_up(tokens: Tensor) -> Tensor:
        (counts,) = workers.combine(workers.size, [[tokens]], merge)
        assert isinstance(counts, Tensor)
        return counts

    counted = []
    for name, mixture in experts_of(module).items():
        seen = count_tokens(f"{prefix}.{name}", mixture, run, activations.tokens, add_up)
        mixture.everywhere = frozenset(seen.everywhere)
        counted.append(seen)
    return counted
