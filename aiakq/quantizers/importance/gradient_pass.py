"""One backward pass of the original model over the calibration samples, with one block in memory at a time.

The samples first pass through all blocks, and the input of every block is kept, in files beyond the budget. Then the
gradient passes through the blocks from the last to the first, each of which is loaded and computed again. So the
checkpoint is read once more, and memory holds a block in float32 with the activations of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from aiakq.errors import error, one_line
from aiakq.quantizers.importance.routing import routed_tokens
from aiakq.quantizers.importance.row_factors import RowFactors, RowSums, finished, merge
from aiakq.quantizers.importance.token_weights import RoutedTokens, TokenWeights
from aiakq.quantizers.model.activations import Activations, HiddenStates
from aiakq.quantizers.model.experts import expert_pattern
from aiakq.quantizers.model.groups import block_linears
from aiakq.quantizers.model.outer_layers import capture, load_outside, sampled_gradient
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.numerics.deterministic import deterministic_gradients
from aiakq.quantizers.workers.protocol import Value, Workers, shards
from aiakq.runtime.device_memory import release_memory

OnBatch = Callable[[int, int], None]


class GradientPass:
    """The backward pass of one worker, over its shards of the batches.

    batches   token ids of all calibration batches, each [B, T] int64.
    budget    bytes of hidden states in memory; the rest is spilled to files in ``scratch``.
    seed      seed of the sampled tokens.
    rows      whether to find the factors of the rows as well; they take up to a quarter of the budget.
    progress  receives the number of finished blocks, forward and backward, and their total.
    """

    def __init__(
        self,
        model: SourceModel,
        batches: Sequence[Tensor],
        workers: Workers,
        budget: float,
        scratch: Path,
        seed: int,
        progress: OnBatch,
        rows: bool = False,
    ) -> None:
        self.model = model
        self.batches = batches
        self.workers = workers
        self._row_budget = budget / 4 if rows else 0.0
        self.budget = budget - self._row_budget
        self.scratch = scratch
        self.seed = seed
        self.progress = progress
        self.rows = rows
        self._shards = shards(len(batches))
        self._mine = [batch for shard in self._shards[workers.rank :: workers.size] for batch in shard]
        self._inputs: list[Activations] = []

    def run(self) -> list[TokenWeights]:
        """Return the weights of the tokens of this worker's batches, block by block.

        Raises ``unsupported`` if the model has an operation without a gradient.
        """
        count = len(self.model.blocks)
        self._forward()
        gradients = self._of_predictions()
        weights: list[TokenWeights] = []
        for index in reversed(range(count)):
            gradients = self._backward(index, gradients, weights)
            self.progress(2 * count - index, 2 * count)
        return weights[::-1]

    def _forward(self) -> None:
        """Keep the inputs of all blocks, and the outputs of the last one."""
        model, count = self.model, len(self.model.blocks)
        states = HiddenStates((), self.budget, self.scratch)
        self._inputs = [capture(model, self.batches, lambda _: None, states, frozenset(self._mine))]
        for index, block in enumerate(model.blocks):
            inputs, outputs = self._inputs[-1], self._states()
            model.load(block, model.block_prefix(index))

            def work(
                block: nn.Module, batch: int, device: torch.device, inputs: Activations = inputs, index: int = index
            ) -> Tensor:
                return inputs.run(block, index, batch, device).to("cpu")

            for batch, output in inputs.spread(block, self._mine, work):
                outputs.put(batch, output)
            if inputs.beside.are_left:
                what = (
                    f"--importance with {type(model.model).__name__}, whose blocks read keys and values of earlier ones"
                )
                raise error("unsupported", what=what, hint="Leave --importance away.")
            self._inputs.append(inputs.with_hidden(outputs))
            model.drop(block)
            model.checkpoint.close()
            release_memory()
            self.progress(index + 1, 2 * count)

    def _states(self) -> HiddenStates:
        """Return an empty list for hidden states, with what is left of the budget."""
        used = sum(inputs.hidden.bytes_in_memory for inputs in self._inputs)
        return HiddenStates((), max(0.0, self.budget - used), self.scratch)

    def _of_predictions(self) -> HiddenStates:
        """Return the gradients at the outputs of the last block, and free these outputs."""
        last, gradients = self._inputs.pop(), self._states()
        load_outside(self.model)
        for batch in self._mine:
            # One generator for each batch, so that it does not matter who computes the others.
            generator = torch.Generator(self.model.device).manual_seed((self.seed * 1_000_003 + batch) % 2**63)
            with deterministic_gradients():
                gradient = sampled_gradient(
                    self.model, self.batches[batch], last.hidden[batch], last.outputs, generator
                )
            gradients.put(batch, gradient)
        for name, module in self.model.model.named_modules():
            if not name.startswith(self.model.blocks_name + "."):
                self.model.drop(module)
        return gradients

    def _backward(self, index: int, gradients: HiddenStates, weights: list[TokenWeights]) -> HiddenStates:
        """Append the weights of block ``index`` and return the gradients at its inputs, which are freed."""
        model, block = self.model, self.model.blocks[index]
        inputs, before = self._inputs.pop(), self._states()
        model.load(block, model.block_prefix(index))

        def work(block: nn.Module, batch: int, device: torch.device) -> tuple[Tensor, _OutputGradients]:
            tokens = self.batches[batch].numel()
            with torch.inference_mode(False), _OutputGradients(block, tokens, self.rows) as seen:
                hidden, output = inputs.run_with_gradient(block, index, batch, device)
                upstream = gradients[batch].to(device)
                (gradient,) = torch.autograd.grad(output, hidden, upstream.clone())
            return gradient.cpu(), seen

        linears = block_linears(block)
        sums = _Sums(list(linears), self._shards, self.workers)
        outputs = RowSums({name: linear.out_features for name, linear in linears.items()})
        found = TokenWeights()

        def parts() -> Iterator[list[Value]]:
            """Go over the batches; yield the sums for the rows' factors of each shard."""
            last = {shard[-1] for shard in self._shards}
            for batch, (gradient, seen) in inputs.spread(block, self._mine, work):
                before.put(batch, gradient)
                sums.add(batch, seen, found)
                outputs.add(seen.gradients)
                if batch in last:
                    yield outputs.take()

        with deterministic_gradients():
            try:
                self._go(parts(), linears, found)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as problem:
                option = "--importance gradient-rows" if self.rows else "--importance gradient"
                what = f"{option} with {type(model.model).__name__} ({one_line(problem)})"
                raise error("unsupported", what=what, hint="Leave --importance away.") from problem
        found.means = sums.means()
        weights.append(found)
        model.drop(block)
        model.checkpoint.close()
        release_memory()
        return before

    def _go(self, parts: Iterator[list[Value]], linears: Mapping[str, nn.Linear], found: TokenWeights) -> None:
        """Go over the batches of a block, and put the factors of its rows into ``found`` if they are wanted."""
        if not self.rows:
            for _ in parts:
                pass
            return
        totals = self.workers.combine(len(self._shards), parts, merge)
        budget = self._row_budget / len(self.model.blocks)
        found.rows = RowFactors(finished(list(linears), totals), budget, self.scratch)


class _OutputGradients:
    """Context manager: the squared norms of the gradients at the outputs of a block's linears.

    squares  name -> [tokens] float32 on the CPU; absent if a linear ran more than once.
    routing  name of an expert's linear -> its tokens.
    tokens   number of tokens of the batch.
    gradients  the gradients themselves, [tokens, N] float32, if they are ``kept``; else empty.
    """

    def __init__(self, block: nn.Module, tokens: int, kept: bool = False) -> None:
        self.tokens, self.kept = tokens, kept
        self.gradients: dict[str, Tensor] = {}
        self._linears = block_linears(block)
        self._block = block
        self._calls = dict.fromkeys(self._linears, 0)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.squares: dict[str, Tensor] = {}
        self.routing: dict[str, RoutedTokens] = {}

    def __enter__(self) -> _OutputGradients:
        for name, linear in self._linears.items():
            self._handles.append(linear.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *failure: object) -> None:
        for handle in self._handles:
            handle.remove()
        for name, calls in self._calls.items():
            if calls > 1:
                self.squares.pop(name, None)
                self.gradients.pop(name, None)

    def _hook(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def note(gradient: Tensor) -> None:
            squares = gradient.detach().float().square().sum(-1).flatten().cpu()
            self.squares[name] = torch.nan_to_num(squares, nan=0.0, posinf=0.0)
            if self.kept:
                rows = gradient.detach().float().flatten(0, -2)
                self.gradients[name] = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)

        def watch(_: nn.Module, args: object, output: Tensor) -> None:
            self._calls[name] += 1
            routing = routed_tokens(self._block, name)
            if routing is not None:
                self.routing[name] = routing
            if output.requires_grad:
                output.register_hook(note)

        return watch


class _Sums:
    """Sums over all tokens of the run, added shard by shard, so that the bits do not depend on the workers."""

    def __init__(self, names: list[str], parts: Sequence[range], workers: Workers) -> None:
        patterns = [pattern for name in names if (pattern := expert_pattern(name)) is not None]
        self._rows = {name: row for row, name in enumerate(dict.fromkeys([*names, *patterns]))}
        self._shard_of = {batch: number for number, shard in enumerate(parts) for batch in shard}
        self._workers = workers
        self._count = len(parts)
        own = range(workers.rank, self._count, workers.size)
        self._parts = {number: torch.zeros(len(self._rows), 2, dtype=torch.float64) for number in own}

    def add(self, batch: int, seen: _OutputGradients, weights: TokenWeights) -> None:
        """Add one batch, and put its squared norms into ``weights``."""
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        total = self._parts[self._shard_of[batch]]
        for name, squares in seen.squares.items():
            total[self._rows[name]] += torch.tensor([float(squares.double().sum()), len(squares)])
            pattern, routing = expert_pattern(name), seen.routing.get(name)
            if pattern is None:
                weights.squares.setdefault(name, {})[batch] = squares
            elif routing is not None and len(routing.tokens) == len(squares):
                norms, shares = shared.setdefault(pattern, _zeros(seen.tokens))
                tokens = routing.tokens.cpu()
                norms.index_add_(0, tokens, squares)
                shares.index_add_(0, tokens, routing.shares.cpu().float().square())
        for pattern, (norms, shares) in shared.items():
            squares = norms / shares.clamp_(min=1e-12)
            total[self._rows[pattern]] += torch.tensor([float(squares.double().sum()), len(squares)])
            weights.squares.setdefault(pattern, {})[batch] = squares

    def means(self) -> dict[str, float]:
        """Return the mean of the squared norms of each linear and pattern over the tokens of all workers."""

        def merge(total: list[Value], part: list[Value]) -> None:
            assert isinstance(total[0], Tensor) and isinstance(part[0], Tensor)
            total[0].add_(part[0])

        (totals,) = self._workers.combine(self._count, ([part] for part in self._parts.values()), merge)
        assert isinstance(totals, Tensor)
        return {name: float(totals[row, 0] / totals[row, 1].clamp(min=1)) for name, row in self._rows.items()}


def _zeros(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(tokens), torch.zeros(tokens)
