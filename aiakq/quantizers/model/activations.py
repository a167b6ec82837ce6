"""The calibration samples at the input of a block, and what the block makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.quantizers.calibration.image_features import AddedRows
from aiakq.quantizers.model.hidden_states import HiddenStates as HiddenStates
from aiakq.quantizers.model.token_arguments import Call as Call
from aiakq.quantizers.model.token_arguments import TokenArguments, Written, written

Result = TypeVar("Result")
#: What to do about a model that cannot be run block by block.
BLOCKS_HINT = "Models whose blocks map hidden states to hidden states can be quantized."
#: What a module returns: hidden states, or a tuple that starts with them.
Output = Tensor | tuple[Tensor, ...]
#: Tokens at the beginning of the calibration data that every worker has: the sample on which searches evaluate
#: candidates and errors are measured. More tokens would not change the second digit.
SAMPLE_TOKENS = 4096


def first(output: Output) -> Tensor:
    """Return the hidden states in a module's output."""
    return output[0] if isinstance(output, tuple) else output


def _run(block: nn.Module, hidden: Tensor, call: Call, leave: Callable[[Written], None] = lambda left: None) -> Tensor:
    """Return the hidden states that ``block`` makes of ``hidden``. ``leave`` receives what it left in dictionaries for
    other blocks, also if a hook ends the run: a later run may replace the module that wrote it (replay.py).

    Raises ``unsupported`` for a block that leaves anything but tuples of tensors.
    """
    own = {name: dict(value) for name, value in call.kwargs.items() if isinstance(value, dict)}
    try:
        return first(block(hidden, *call.args, **{**call.kwargs, **own}))
    finally:
        left = written(call.kwargs, own)
        for value in (value for values in left.values() for value in values.values()):
            if not isinstance(value, tuple) or not all(isinstance(each, Tensor) for each in value):
                what = f"Quantizing blocks of the type {type(block).__name__} that read what earlier ones left"
                raise error("unsupported", what=what, hint=BLOCKS_HINT)
        leave(left)


class Activations:
    """The hidden states of every calibration batch at the input of the next block, kept off the devices.

    hidden   one [B, T, hidden] float32 per batch; absent if another worker has the batch.
    calls    [B, T] -> the call of every block; equal shapes are called equally, because no batch has padding. Those of
             a batch whose positions or masks depend on its images have its number as well, [B, T, number].
    device   device of the blocks; with ``others``, batches are distributed to copies of the block on those as well.
    outputs  number of elements in the tuple that a block returns, hidden states first; 0: it returns a tensor.
    added    by batch, what the model adds to the outputs of blocks.
    beside   what blocks read of tokens besides hidden states.
    """

    def __init__(
        self,
        hidden: HiddenStates | Sequence[Tensor],
        calls: dict[tuple[int, ...], list[Call]],
        device: torch.device,
        outputs: int = 0,
        others: tuple[torch.device, ...] = (),
        added: Mapping[int, AddedRows] | None = None,
        beside: TokenArguments | None = None,
    ) -> None:
        self.beside = TokenArguments() if beside is None else beside
        self.hidden = hidden if isinstance(hidden, HiddenStates) else HiddenStates(hidden)
        self.calls = calls
        self.device = device
        self.outputs = outputs
        self.others = others
        self.added = added or {}

    def _call(self, batch: int, index: int) -> Call:
        """Return the call of block ``index`` for a batch."""
        rows, length = self.hidden.shapes[batch][:2]
        calls = self.calls.get((rows, length, batch)) or self.calls[rows, length]
        return calls[index]

    def run(self, block: nn.Module, index: int, batch: int, device: torch.device | None = None) -> Tensor:
        """Return the output of block ``index`` on one batch, with what is added to it, on ``device``, where the block
        must be. What it leaves for later blocks is kept.
        """
        device = self.device if device is None else device
        hidden = self.hidden[batch].to(device)
        call = self._call(batch, index)
        if device != self.device:
            call = Call(*_to_device((call.args, call.kwargs), device))
        call = self.beside.of(call, index, batch, lambda tensor: tensor.to(device))
        output = _run(block, hidden, call, partial(self.beside.leave, batch))
        return self.added[batch].to_output(output, index) if batch in self.added else output

    def run_with_gradient(
        self, block: nn.Module, index: int, batch: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the input of block ``index`` on one batch, as a leaf that requires a gradient, and its output, without
        what is added to it: no gradient depends on that.

        Call it outside of inference mode.
        """
        with torch.enable_grad():
            # Copies, because autograd cannot keep tensors that were made in inference mode.
            hidden = self.hidden[batch].to(device).clone().requires_grad_(True)
            call = self.beside.of(self._call(batch, index), index, batch, lambda tensor: tensor)
            call = Call(*_map_tensors((call.args, call.kwargs), lambda tensor: tensor.to(device).clone()))
            return hidden, _run(block, hidden, call)

    def spread(
        self, block: nn.Module, batches: Iterable[int], work: Callable[[nn.Module, int, torch.device], Result]
    ) -> Iterator[tuple[int, Result]]:
        """Yield (batch, ``work(copy of the block, batch, its device)``) for every batch, in order.

        With several devices, each one runs in its own thread and processes every n-th batch. Copies are created anew
        each time, because blocks change between passes.
        """
        if not self.others:
            for batch in batches:
                # Not around the yield: where a caller ends early, the mode of the thread would never be restored.
                with torch.inference_mode():
                    result = work(block, batch, self.device)
                yield batch, result
            return
        places = [(block, self.device), *((copy.deepcopy(block).to(device), device) for device in self.others)]

        def one(place: tuple[nn.Module, torch.device], batch: int) -> Result:
            with torch.inference_mode():  # the mode is per thread
                return work(place[0], batch, place[1])

        waiting = list(batches)
        with ThreadPoolExecutor(len(places)) as threads:
            for start in range(0, len(waiting), len(places)):
                wave = waiting[start : start + len(places)]
                running = [threads.submit(one, place, batch) for place, batch in zip(places, wave, strict=False)]
                for batch, future in zip(wave, running, strict=True):
                    yield batch, future.result()

    def run_one(self, block: nn.Module, index: int, batch: int = 0, row: int = 0, tokens: int | None = None) -> Tensor:
        """Return the output of block ``index`` on one sequence of a batch alone, [1, T, hidden], or on its first
        ``tokens``.

        The other arguments of the block are those recorded for a single sequence, else a slice of the batch's. Every
        dimension as long as the sequence is cut to ``tokens``, which may be wrong; see ``sample_forward``.
        """
        hidden = self.hidden[batch][row : row + 1].to(self.device)
        rows, length = self.hidden.shapes[batch][:2]
        alone = self.calls.get((1, length, batch)) or (
            self.calls.get((1, length)) if (rows, length, batch) not in self.calls else None
        )
        call = self._call(batch, index) if alone is None else alone[index]
        if alone is None:
            call = Call(_first_row(call.args, rows), _first_row(call.kwargs, rows))
        call = self.beside.of(call, index, batch, lambda tensor: tensor[row : row + 1].to(self.device))
        if tokens is not None:
            call = Call(_first_tokens(call.args, length, tokens), _first_tokens(call.kwargs, length, tokens))
        return _run(block, hidden[:, :tokens], call)

    def sample_forward(self, block: nn.Module, index: int, tokens: int) -> Callable[[], Tensor] | None:
        """Bind ``run_one`` to the first sequence of the sample whose output is mostly finite; None if there is none.

        The sequence is cut to its first ``tokens`` if their outputs are then the same as with the rest, as in every
        causal model.
        """
        with torch.inference_mode():
            for batch in self.first_batches(SAMPLE_TOKENS):
                for row in range(self.hidden.shapes[batch][0]):
                    whole = self.run_one(block, index, batch, row)
                    if float(torch.isfinite(whole).float().mean()) < 0.5:
                        continue
                    short = self._same_for_few(block, index, batch, row, tokens, whole)
                    return partial(self.run_one, block, index, batch, row, tokens if short else None)
        return None

    def _same_for_few(self, block: nn.Module, index: int, batch: int, row: int, tokens: int, whole: Tensor) -> bool:
        if tokens < whole.shape[1]:
            with suppress(RuntimeError, ValueError, IndexError, TypeError):
                short, wanted = self.run_one(block, index, batch, row, tokens), whole[:, :tokens]
                fine = torch.isfinite(wanted)
                size = float(wanted[fine].abs().max()) if bool(fine.any()) else 0.0
                return size > 0 and torch.allclose(short[fine], wanted[fine], rtol=1e-3, atol=1e-4 * size)
        return False

    def advance(self, block: nn.Module, index: int, done: Collection[int] = ()) -> None:
        """Replace every batch held here, except those ``done``, by the output of block ``index`` on it."""

        def work(block: nn.Module, batch: int, device: torch.device) -> Tensor:
            return self.run(block, index, batch, device).to("cpu")

        for batch, output in self.spread(block, [batch for batch in self.here if batch not in done], work):
            self.hidden[batch] = output

    @property
    def here(self) -> list[int]:
        """Return the batches that this worker holds."""
        return [batch for batch in range(len(self.hidden)) if self.hidden.has(batch)]

    def copy(self) -> Activations:
        """Return a copy that can advance independently."""
        return self.with_hidden(self.hidden.copy(), self.beside.copy())

    def with_hidden(self, hidden: HiddenStates, beside: TokenArguments | None = None) -> Activations:
        """Return the activations of the same batches with other hidden states."""
        beside = self.beside if beside is None else beside
        return Activations(hidden, self.calls, self.device, self.outputs, self.others, self.added, beside)

    def first_batches(self, tokens: int) -> list[int]:
        """Return the first batches that together hold at least ``tokens`` tokens; all if there are fewer."""
        return first_batches(self.hidden.shapes, tokens)

    @property
    def tokens(self) -> int:
        return sum(shape[0] * shape[1] for shape in self.hidden.shapes)


def first_batches(shapes: Iterable[Sequence[int]], tokens: int) -> list[int]:
    """Return the first batches of ``shapes`` [B, T, ...] that together hold at least ``tokens`` tokens."""
    chosen: list[int] = []
    for number, shape in enumerate(shapes):
        if tokens <= 0:
            break
        chosen.append(number)
        tokens -= shape[0] * shape[1]
    return chosen


def _first_row(value: object, rows: int) -> Any:
    """Slice every tensor inside ``value`` that has ``rows`` rows to its first row."""

    def cut(tensor: Tensor) -> Tensor:
        # A single dimension counts positions, not sequences.
        return tensor[:1] if tensor.dim() > 1 and tensor.shape[0] == rows else tensor

    return _map_tensors(value, cut)


def _first_tokens(value: object, length: int, tokens: int) -> Any:
    """Slice every dimension of size ``length`` of the tensors inside ``value`` to ``tokens``."""

    def cut(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            tensor = tensor.narrow(dim, 0, tokens) if size == length else tensor
        return tensor

    return _map_tensors(value, cut)


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to the tensors in dictionaries, tuples and lists inside ``value``."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(item, change) for item in value)
    return value


def _to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor inside ``value`` to ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_to_device(item, device) for item in value)
    return value


def batched(samples: Iterable[Tensor], rows: int = 8) -> list[Tensor]:
    """Stack consecutive samples [T] of equal length into batches [B, T] of at most ``rows``."""
    by_length: dict[int, list[Tensor]] = {}
    for sample in samples:
        by_length.setdefault(len(sample), []).append(sample)
    return [
        torch.stack(group[start : start + rows]) for group in by_length.values() for start in range(0, len(group), rows)
    ]
