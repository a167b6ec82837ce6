"""Hidden states of the calibration samples between blocks, in memory or, beyond a budget, on disk."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.quantizers.calibration.image_features import AddedRows

Result = TypeVar("Result")
#: What to do about a model that cannot be run block by block.
BLOCKS_HINT = "Models whose blocks map hidden states to hidden states can be quantized."
#: What a module returns: hidden states, or a tuple that starts with them.
Output = Tensor | tuple[Tensor, ...]
#: Tokens at the beginning of the calibration data that every worker has: the sample on which searches evaluate
#: candidates and errors are measured. More tokens would not change the second digit.
SAMPLE_TOKENS = 4096


class Call:
    """The arguments with which a block is called, except its hidden states."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


class HiddenStates:
    """A list of float32 tensors of which at most ``budget`` bytes are in memory; the rest are files in ``folder``.

    Tensors on a GPU stay there, and do not count. Spilling affects only speed: files hold the same bits. Tensors may be
    absent, because other workers hold them or they have not been set yet. An absent one is None but still has a shape.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), budget: float = float("inf"), folder: Path | None = None):
        self.budget = budget
        self.folder = folder
        self.shapes: list[torch.Size] = []
        self._items: list[Tensor | _Spilled | None] = []
        self._bytes_in_memory = 0
        for tensor in tensors:
            self.append(tensor)

    def append(self, tensor: Tensor) -> None:
        self.shapes.append(tensor.shape)
        self._items.append(self._placed(tensor))

    def append_absent(self, shape: torch.Size) -> None:
        self.shapes.append(shape)
        self._items.append(None)

    def put(self, index: int, tensor: Tensor) -> None:
        """Set the tensor at ``index``, which may lie beyond the end; indices in between become absent."""
        while len(self) <= index:
            self.append_absent(torch.Size((0,)))
        self[index] = tensor

    def __len__(self) -> int:
        return len(self._items)

    def has(self, index: int) -> bool:
        """Whether the tensor at ``index`` exists and is not absent."""
        return index < len(self._items) and self._items[index] is not None

    def __getitem__(self, index: int) -> Tensor:
        item = self._items[index]
        assert item is not None, f"another worker holds batch {index}"
        return item if isinstance(item, Tensor) else item.load()

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        self._bytes_in_memory -= _in_memory_bytes(self._items[index])
        self.shapes[index] = tensor.shape
        self._items[index] = self._placed(tensor)

    @property
    def bytes_in_memory(self) -> int:
        return self._bytes_in_memory

    @property
    def nbytes(self) -> int:
        """Total bytes in memory and on disk."""
        return sum(4 * shape.numel() for index, shape in enumerate(self.shapes) if self.has(index))

    def copy(self) -> HiddenStates:
        """Return a copy; files are shared until one of the two replaces them."""
        other = HiddenStates((), self.budget, self.folder)
        other.shapes, other._items, other._bytes_in_memory = list(self.shapes), list(self._items), self._bytes_in_memory
        return other

    def keep_only(self, indices: Collection[int]) -> None:
        """Make all other tensors absent."""
        for index, item in enumerate(self._items):
            if index not in indices:
                self._bytes_in_memory -= _in_memory_bytes(item)
                self._items[index] = None

    def _placed(self, tensor: Tensor) -> Tensor | _Spilled:
        size = _in_memory_bytes(tensor)
        if not size or self.folder is None or self._bytes_in_memory + size <= self.budget:
            self._bytes_in_memory += size
            return tensor
        return _Spilled(tensor, self.folder)


class _Spilled:
    """A float32 tensor in its own file, which is removed with the object."""

    _numbers = itertools.count()

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self.shape = tensor.shape
        self.path = folder / f"hidden-{os.getpid()}-{next(self._numbers)}"
        try:
            tensor.to(torch.float32).contiguous().numpy().tofile(self.path)
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise error("output_failed", path=str(folder), reason=f"hidden states found no place ({reason})") from None

    def load(self) -> Tensor:
        return torch.from_numpy(numpy.fromfile(self.path, dtype=numpy.float32)).view(self.shape)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def first(output: Output) -> Tensor:
    """Return the hidden states in a module's output."""
    return output[0] if isinstance(output, tuple) else output


def _run(block: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states that ``block`` makes of ``hidden``.

    Raises ``unsupported`` for a block that leaves keys and values of these tokens in a dictionary, for other blocks.
    """
    own = {name: dict(value) for name, value in kwargs.items() if isinstance(value, dict)}
    output = first(block(hidden, *args, **{**kwargs, **own}))
    for name, values in own.items():
        given = kwargs[name]
        if values.keys() != given.keys() or any(values[key] is not given[key] for key in values):
            what = f"Quantizing blocks of the type {type(block).__name__} that read keys and values of earlier ones"
            raise error("unsupported", what=what, hint=BLOCKS_HINT)
    return output


def same_arguments(some: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether blocks are called with the same tensors, their first arguments aside, the hidden states."""
    seen: set[tuple[int, int]] = set()

    def is_same(one: object, other: object) -> bool:
        if (id(one), id(other)) in seen:  # most blocks get the same position tables
            return True
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            seen.add((id(one), id(other)))
            return torch.equal(one, other)
        if isinstance(one, dict) and isinstance(other, dict):
            return all(is_same(one[key], other[key]) for key in one.keys() & other.keys())
        if isinstance(one, tuple | list) and isinstance(other, tuple | list):
            return all(map(is_same, one, other))
        return True

    return all(
        is_same(one.args[1:], other.args[1:]) and is_same(one.kwargs, other.kwargs)
        for one, other in zip(some, others, strict=True)
    )


def _in_memory_bytes(item: Tensor | _Spilled | None) -> int:
    """Return the bytes that an item takes in memory: a file, or a tensor on a GPU, takes none."""
    return item.nbytes if isinstance(item, Tensor) and item.device.type == "cpu" else 0


class Activations:
    """The hidden states of every calibration batch at the input of the next block, kept off the devices.

    hidden   one [B, T, hidden] float32 per batch; absent if another worker has the batch.
    calls    [B, T] -> the call of every block; equal shapes are called equally, because no batch has padding. Those of
             a batch whose positions or masks depend on its images have its number as well, [B, T, number].
    device   device of the blocks; with ``others``, batches are distributed to copies of the block on those as well.
    outputs  number of elements in the tuple that a block returns, hidden states first; 0: it returns a tensor.
    added    by batch, what the model adds to the outputs of blocks.
    """

    def __init__(
        self,
        hidden: HiddenStates | Sequence[Tensor],
        calls: dict[tuple[int, ...], list[Call]],
        device: torch.device,
        outputs: int = 0,
        others: tuple[torch.device, ...] = (),
        added: Mapping[int, AddedRows] | None = None,
    ) -> None:
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
        must be."""
        device = self.device if device is None else device
        hidden = self.hidden[batch].to(device)
        call = self._call(batch, index)
        args, kwargs = (
            (call.args, call.kwargs) if device == self.device else _to_device((call.args, call.kwargs), device)
        )
        output = _run(block, hidden, args, kwargs)
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
            call = self._call(batch, index)
            args, kwargs = _map_tensors((call.args, call.kwargs), lambda tensor: tensor.to(device).clone())
            return hidden, _run(block, hidden, args, kwargs)

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
        args, kwargs = call.args, call.kwargs
        if alone is None:
            args, kwargs = _first_row(args, rows), _first_row(kwargs, rows)
        if tokens is not None:
            args, kwargs = _first_tokens(args, length, tokens), _first_tokens(kwargs, length, tokens)
        return _run(block, hidden[:, :tokens], args, kwargs)

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
        return self.with_hidden(self.hidden.copy())

    def with_hidden(self, hidden: HiddenStates) -> Activations:
        """Return the activations of the same batches with other hidden states."""
        return Activations(hidden, self.calls, self.device, self.outputs, self.others, self.added)

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
