"""What blocks read of tokens besides hidden states: arguments that differ from batch to batch, such as Gemma 4's inputs
of layers, and keys and values that an earlier block left in a dictionary for all blocks.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aiakq.quantizers.model.hidden_states import HiddenStates

#: Place of an argument of a block: its position behind the hidden states, or its name.
Place = int | str
#: What a block left: name of the dictionary -> key -> tensors.
Written = dict[str, dict[Any, tuple[Tensor, ...]]]


class Call:
    """The arguments with which a block is called, except its hidden states."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        #: Dictionaries are copies, as blocks may write to them.
        self.kwargs = {name: dict(value) if is_dictionary(value) else value for name, value in kwargs.items()}

    def tensor(self, place: Place) -> object:
        """Return the argument at ``place``."""
        return self.args[place] if isinstance(place, int) else self.kwargs.get(place)

    def replaced(self, values: Mapping[Place, Any]) -> Call:
        """Return the call with other arguments at some places."""
        args = tuple(values.get(place, value) for place, value in enumerate(self.args))
        return Call(args, self.kwargs | {place: value for place, value in values.items() if isinstance(place, str)})

    @property
    def places(self) -> list[Place]:
        return [*range(len(self.args)), *self.kwargs]


def is_dictionary(value: object) -> bool:
    """Whether a block may leave something for others in ``value``."""
    return isinstance(value, dict | UserDict)


def written(given: Mapping[str, Any], own: Mapping[str, Any]) -> Written:
    """Return what a block, called with the dictionaries ``given`` and copies of them, left in these, ``own``."""
    return {
        name: changed
        for name, values in own.items()
        if (changed := {key: value for key, value in values.items() if value is not given[name].get(key)})
    }


def differing(one: Call, other: Call) -> list[Place]:
    """Return the places at which two calls of a block have different tensors."""

    def is_same(one: object, other: object) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one is other or torch.equal(one, other)
        if isinstance(one, dict) and isinstance(other, dict):
            return all(is_same(one[key], other[key]) for key in one.keys() & other.keys())
        if isinstance(one, tuple | list) and isinstance(other, tuple | list):
            return all(map(is_same, one, other))
        return True

    return [place for place in one.places if not is_same(one.tensor(place), other.tensor(place))]


class TokenArguments:
    """What blocks read of the tokens of every batch besides hidden states, in float32.

    states  returns an empty list for tensors of the batches.
    """

    def __init__(self, states: Callable[[], HiddenStates] = HiddenStates) -> None:
        self._states = states
        self._arguments: dict[tuple[int, Place], HiddenStates] = {}
        self._left: dict[tuple[str, Any], tuple[HiddenStates, ...]] = {}
        self._lock = threading.Lock()

    @property
    def are_left(self) -> bool:
        """Whether a block left something for others."""
        return bool(self._left)

    def put(self, batch: int, calls: Sequence[Call], places: Mapping[int, Sequence[Place]]) -> None:
        """Keep the arguments at ``places`` of each block of one batch, [B, T, ...] each."""
        for index, each in places.items():
            for place in each:
                value = calls[index].tensor(place)
                assert isinstance(value, Tensor)
                self._arguments.setdefault((index, place), self._states()).put(batch, _kept(value))

    def leave(self, batch: int, values: Written) -> None:
        """Keep what a block left for later ones; it replaces what the block left before."""
        with self._lock:
            for name, entries in values.items():
                for key, tensors in entries.items():
                    if (name, key) not in self._left:
                        self._left[name, key] = tuple(self._states() for _ in tensors)
                    for states, tensor in zip(self._left[name, key], tensors, strict=True):
                        states.put(batch, _kept(tensor))

    def of(self, call: Call, index: int, batch: int, change: Callable[[Tensor], Tensor]) -> Call:
        """Return the call of block ``index`` with the arguments of a batch, to each of which ``change`` is applied."""
        values: dict[Place, Any] = {
            place: change(states[batch]) for (block, place), states in self._arguments.items() if block == index
        }
        for name, entries in self._entries(batch):
            if is_dictionary(call.kwargs.get(name)):
                values[name] = call.kwargs[name] | {key: tuple(map(change, each)) for key, each in entries.items()}
        return call.replaced(values) if values else call

    def _entries(self, batch: int) -> Iterator[tuple[str, dict[Any, tuple[Tensor, ...]]]]:
        """Return what blocks left for a batch, by the name of the dictionary."""
        with self._lock:
            found: dict[str, dict[Any, tuple[Tensor, ...]]] = {}
            for (name, key), states in self._left.items():
                if all(each.has(batch) for each in states):
                    found.setdefault(name, {})[key] = tuple(each[batch] for each in states)
        yield from found.items()

    def copy(self) -> TokenArguments:
        """Return a copy, whose blocks leave their own values."""
        other = TokenArguments(self._states)
        other._arguments = dict(self._arguments)
        other._left = {place: tuple(each.copy() for each in states) for place, states in self._left.items()}
        return other


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)
