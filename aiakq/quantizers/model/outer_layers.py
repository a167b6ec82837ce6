"""The layers outside the decoder blocks: embeddings before the first block, final norm and output layer after the last.

Blocks are temporarily replaced by stand-ins: before the blocks these record how they are called, after them they return
known outputs. So embeddings, masks, position tables, norms and heads are always the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.quantizers.calibration.image_features import AddedRows, is_alone
from aiakq.quantizers.model.activations import BLOCKS_HINT, Activations, Call, HiddenStates
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.model.token_arguments import Place, TokenArguments, differing
from aiakq.quantizers.model.wide_rows import apart, side_by_side

#: A label that counts for nothing.
_IGNORED = -100
#: The most tensors that blocks leave for later ones: keys and values of two kinds of layers.
_LEFT = 4


class _Captured(Exception):
    pass


def capture(
    model: SourceModel,
    batches: Sequence[Tensor],
    progress: Callable[[int], None],
    hidden: HiddenStates | None = None,
    here: Container[int] | None = None,
) -> Activations:
    """Run everything before the first block, and record the arguments of every block.

    batches: ids, each [B, T] int64, of tokens and of rows of ``model.features``. ``progress`` receives the number of
    batches done. The inputs of the first block are appended to ``hidden``; batches not in ``here`` are absent there
    (None: all batches are in it).
    """
    outside = _outside(model, model.model.base_model)
    for name, module in outside:
        model.load(module, name, recurse=False)
    model.load(model.blocks[0], model.block_prefix(0))
    hidden = HiddenStates() if hidden is None else hidden
    calls: dict[tuple[int, ...], list[Call]] = {}
    added: dict[int, AddedRows] = {}
    places: dict[int, list[Place]] = {}
    with _record_calls(model.blocks) as (record, outputs), torch.inference_mode():
        if len(batches):
            text = batches[0] if model.features is None else model.features.as_text(batches[0])
            places = _token_arguments(model, text, record)
        beside = _states_beside(model, batches, hidden, places)
        for number, ids in enumerate(batches):
            reached = _run_outside(model, ids, record)[0].args[0]
            if here is None or number in here:
                hidden.append(reached.to("cpu"))
                beside.put(number, _besides_hidden(record), places)
            else:
                hidden.append_absent(reached.shape)
            features = model.features if is_alone(model.features, ids) else None
            if features is not None and (rows := features.added(ids)) is not None:
                added[number] = rows
            # Arguments for a single sequence cannot always be sliced from those of a batch.
            for size in {len(ids), 1} if features is None else {len(ids)} if hidden.has(number) else ():
                shape = (size, ids.shape[1], *([] if features is None else [number]))
                if shape not in calls:
                    captured = record if size == len(ids) else _run_outside(model, ids[:size], record)
                    calls[shape] = _besides_hidden(captured)
            progress(number + 1)
    for _, module in outside:
        model.drop(module)
    return Activations(hidden, calls, model.device, outputs[0], model.others, added, beside)


def _besides_hidden(calls: Sequence[Call]) -> list[Call]:
    return [Call(call.args[1:], call.kwargs) for call in calls]


def _token_arguments(model: SourceModel, ids: Tensor, record: list[Call]) -> dict[int, list[Place]]:
    """Return the places of the arguments of each block that depend on the tokens, besides hidden states. With the other
    ones, blocks are called for any batch as for another one of its shape.

    ids: [B, T] int64. ``record`` is that of ``_record_calls``. Raises ``unsupported`` for blocks that need more.
    """
    calls = _run_outside(model, ids, record)
    reached = calls[0].args[0]
    some, others = _besides_hidden(calls), _besides_hidden(_run_outside(model, ids.flip(-1), record))
    places = {index: found for index, pair in enumerate(zip(some, others, strict=True)) if (found := differing(*pair))}
    values = [some[index].tensor(place) for index, found in places.items() for place in found]
    shares = bool(getattr(model.config, "num_kv_shared_layers", None))
    reason = ""
    if reached.shape[:-1] != ids.shape:
        reason = "take several hidden states of a token"
    elif shares and not any(isinstance(value, dict) for value in some[-1].kwargs.values()):
        reason = "read keys and values of earlier ones"
    elif not all(isinstance(value, Tensor) and value.shape[:2] == ids.shape for value in values):
        reason = "read more of a token than its hidden state"
    if reason:
        what = f"Quantizing {type(model.model).__name__}, whose blocks {reason},"
        raise error("unsupported", what=what, hint=BLOCKS_HINT)
    return places


def _states_beside(
    model: SourceModel, batches: Sequence[Tensor], hidden: HiddenStates, places: Mapping[int, Sequence[Place]]
) -> TokenArguments:
    """Return the place for what ``places`` hold: in memory as far as hidden states of two models leave some of the
    budget, else on disk.
    """
    total = 4 * model.hidden_width * sum(ids.numel() for ids in batches)
    lists = sum(map(len, places.values())) + _LEFT
    share = max(0.0, hidden.budget - 2 * total) / lists
    return TokenArguments(lambda: HiddenStates((), share, hidden.folder))


def _run_outside(model: SourceModel, ids: Tensor, record: list[Call]) -> list[Call]:
    """Return the calls of all blocks, which ``record`` holds until the next one. Raises ``unsupported``."""
    record.clear()
    with suppress(_Captured):
        model.model.base_model(**_inputs(model, ids), use_cache=False)
    if len(record) != len(model.blocks):
        what = f"Quantizing {type(model.model).__name__}, which runs {len(record)} blocks of {len(model.blocks)},"
        raise error("unsupported", what=what, hint="")
    return list(record)


def _inputs(model: SourceModel, ids: Tensor) -> dict[str, Tensor]:
    """Return what a model is called with for ids [B, T]: the ids, or the embeddings [B, T, H] if there are images."""
    ids = ids.to(model.device)
    if model.features is None or not bool(model.features.mask(ids).any()):
        return {"input_ids": ids}
    return model.features.arguments(ids, model.model.get_input_embeddings())


def head_name(model: SourceModel) -> str | None:
    """Return the module path of the output layer, if it is a linear."""
    head = model.model.get_output_embeddings()
    names = [name for name, module in model.model.named_modules() if module is head]
    return names[0] if names and isinstance(head, nn.Linear) else None


def embedding_name(model: SourceModel) -> str:
    """Return the name of the input embedding's weight."""
    embedding = model.model.get_input_embeddings()
    names: Iterator[str] = (name for name, module in model.model.named_modules() if module is embedding)
    return next(names) + ".weight"


def load_outside(model: SourceModel) -> None:
    """Load everything except the blocks; a tied output layer takes the embedding's weight."""
    head = head_name(model)
    for name, module in _outside(model, model.model):
        if name == head and not model.holds(name):
            module._parameters["weight"] = model.model.get_input_embeddings().weight
        else:
            model.load(module, name, recurse=False)


def finish(model: SourceModel, ids: Tensor, hidden: Tensor, outputs: int) -> Tensor:
    """Run the layers after the last block: ids [B, T], hidden [B, T, H] -> logits [B, T, V] float32.

    ``load_outside`` must have been called.
    """
    with _stub_blocks(model.blocks, hidden.to(model.device), outputs), torch.inference_mode():
        logits: Tensor = model.model(**_inputs(model, ids), use_cache=False).logits
        return logits.float()


def sampled_gradient(
    model: SourceModel, ids: Tensor, hidden: Tensor, outputs: int, generator: torch.Generator
) -> Tensor:
    """Return the gradient of ``-log p`` of sampled next tokens with respect to the last block's output.

    ids [B, T], hidden [B, T, H] -> [B, T, H] float32 on the CPU. The tokens are sampled from the model's predictions
    with ``generator``, on the model's device. One sequence is computed at a time, because logits are large.
    ``load_outside`` must have been called; call it outside of inference mode.
    """
    gradients = []
    for row in range(len(ids)):
        one = hidden[row : row + 1].to(model.device).clone().requires_grad_(True)
        with torch.enable_grad(), _stub_blocks(model.blocks, one, outputs):
            logits = model.model(**_inputs(model, ids[row : row + 1]), use_cache=False).logits[0].float()
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(-1)
            if model.features is not None:  # no model predicts embeddings of images
                labels[:-1].masked_fill_(model.features.mask(ids[row, 1:].to(model.device)), _IGNORED)
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=_IGNORED)
        gradients.append(torch.autograd.grad(loss, one)[0].float().cpu())
    return torch.cat(gradients)


def outside_modules(model: SourceModel) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the model that are not in the blocks."""
    return _outside(model, model.model)


def _outside(model: SourceModel, part: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and modules of ``part``, the whole model or its base, that are not in the blocks, without what is
    beside a multimodal model's decoder."""
    inside = model.blocks_name + "."
    prefix = "" if part is model.model else model.model.base_model_prefix
    modules = part.named_modules(prefix=prefix)
    return [(name, module) for name, module in modules if not name.startswith(inside) and not model.is_beside(name)]


@contextmanager
def _record_calls(blocks: nn.ModuleList) -> Iterator[tuple[list[Call], list[int]]]:
    """Record every call of a block and pass its hidden states on; the last block ends the pass.

    Only the first block runs, once, to show how many outputs blocks have; it must be loaded.
    """
    record: list[Call] = []
    outputs: list[int] = []

    def stand_in(block: nn.Module) -> Callable[..., Any]:
        real = block.forward

        def forward(*args: Any, **kwargs: object) -> object:
            if not args:
                args = (kwargs.pop("hidden_states"),)
            given = args[0]
            args = (side_by_side(given, block), *args[1:])
            record.append(Call(args, kwargs))
            if not outputs:
                output = real(*args, **kwargs)
                outputs.append(len(output) if isinstance(output, tuple) else 0)
            if block is blocks[-1]:
                raise _Captured
            return _output(given, outputs[0])

        return forward

    with _replaced(blocks, stand_in):
        yield record, outputs


@contextmanager
def _stub_blocks(blocks: nn.ModuleList, hidden: Tensor, outputs: int) -> Iterator[None]:
    """Context manager: the blocks return ``hidden`` for any input."""

    def stand_in(block: nn.Module) -> Callable[..., object]:
        return lambda *args, **kwargs: _output(apart(hidden, block), outputs)

    with _replaced(blocks, stand_in):
        yield


def _output(hidden: Tensor, outputs: int) -> object:
    """Return ``hidden`` as a block output of ``outputs`` elements, hidden states first; 0: no tuple."""
    return (hidden, *[None] * (outputs - 1)) if outputs else hidden


@contextmanager
def _replaced(blocks: nn.ModuleList, stand_in: Callable[[nn.Module], Callable[..., object]]) -> Iterator[None]:
    for block in blocks:
        block.forward = stand_in(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
