"""The ways into a model's blocks and out of them, with nothing but one block, or no block at all, in memory.

Blocks are replaced by stand-ins for the moment: on the way in they note how they are called, on the way out they answer
what is already known. So embeddings, masks, position tables, norms and heads are the model's own, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.activations import Activations, Call, HiddenStates
from aiakq.quantizers.model.source import SourceModel


class _Captured(Exception):
    pass


def capture(
    model: SourceModel,
    batches: Sequence[Tensor],
    progress: Callable[[int], None],
    hidden: HiddenStates | None = None,
) -> Activations:
    """Run everything before the first block, and note with which arguments each block is called.

    batches: token ids, each [B, T] int64. ``progress`` is told how many batches are done. What reaches the first block
    is appended to ``hidden``.
    """
    outside = _outside(model, model.model.base_model)
    for name, module in outside:
        model.load(module, name, recurse=False)
    model.load(model.blocks[0], model.block_prefix(0))
    hidden = HiddenStates() if hidden is None else hidden
    calls: dict[tuple[int, ...], list[Call]] = {}
    with _recording(model.blocks) as (record, returns_tuple), torch.inference_mode():
        for number, ids in enumerate(batches):
            record.clear()
            with suppress(_Captured):
                model.model.base_model(input_ids=ids.to(model.device), use_cache=False)
            assert len(record) == len(model.blocks), f"{len(record)} of {len(model.blocks)} blocks were called"
            hidden.append(record[0].args[0].to("cpu"))
            shape = tuple(ids.shape)
            if shape not in calls:
                calls[shape] = [Call(call.args[1:], call.kwargs) for call in record]
            progress(number + 1)
    for _, module in outside:
        model.drop(module)
    return Activations(hidden, calls, model.device, returns_tuple[0], model.others)


def head_name(model: SourceModel) -> str | None:
    """The module path of the output layer, if it is a linear."""
    head = model.model.get_output_embeddings()
    names = [name for name, module in model.model.named_modules() if module is head]
    return names[0] if names and isinstance(head, nn.Linear) else None


def embedding_name(model: SourceModel) -> str:
    """The name of the input embedding's weight."""
    embedding = model.model.get_input_embeddings()
    return next(name for name, module in model.model.named_modules() if module is embedding) + ".weight"


def load_outside(model: SourceModel) -> None:
    """Load everything but the blocks; a tied output layer takes the embedding's weight."""
    head = head_name(model)
    for name, module in _outside(model, model.model):
        if name == head and not model.holds(name):
            module._parameters["weight"] = model.model.get_input_embeddings().weight
        else:
            model.load(module, name, recurse=False)


def finish(model: SourceModel, ids: Tensor, hidden: Tensor, returns_tuple: bool) -> Tensor:
    """What the model makes of the last block's output: ids [B, T], hidden [B, T, H] -> logits [B, T, V] float32.

    ``load_outside`` must have been called.
    """
    with _answering(model.blocks, hidden.to(model.device), returns_tuple), torch.inference_mode():
        return model.model(input_ids=ids.to(model.device), use_cache=False).logits.float()


def _outside(model: SourceModel, part: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of ``part``, the whole model or its base, that are not in the blocks."""
    inside = model.blocks_name + "."
    prefix = "" if part is model.model else model.model.base_model_prefix
    return [(name, module) for name, module in part.named_modules(prefix=prefix) if not name.startswith(inside)]


@contextmanager
def _recording(blocks: nn.ModuleList) -> Iterator[tuple[list[Call], list[bool]]]:
    """While open, each call of a block is noted and its hidden states are passed on; the last block ends the pass.

    Only the first block runs, once, to show whether blocks return a tensor or a tuple; it must be loaded.
    """
    record: list[Call] = []
    returns_tuple: list[bool] = []

    def stand_in(block: nn.Module) -> Callable[..., Any]:
        real = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not args:
                args = (kwargs.pop("hidden_states"),)
            record.append(Call(args, kwargs))
            if not returns_tuple:
                returns_tuple.append(isinstance(real(*args, **kwargs), tuple))
            if block is blocks[-1]:
                raise _Captured
            return (args[0],) if returns_tuple[0] else args[0]

        return forward

    with _replaced(blocks, stand_in):
        yield record, returns_tuple


@contextmanager
def _answering(blocks: nn.ModuleList, hidden: Tensor, returns_tuple: bool) -> Iterator[None]:
    """While open, the blocks answer ``hidden`` whatever they are given."""

    def stand_in(block: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: (hidden,) if returns_tuple else hidden

    with _replaced(blocks, stand_in):
        yield


@contextmanager
def _replaced(blocks: nn.ModuleList, stand_in: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    for block in blocks:
        block.forward = stand_in(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
