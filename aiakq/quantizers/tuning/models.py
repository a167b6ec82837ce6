"""The two models of a tuning: the original's predictions, and the quantized model with gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aiakq.kernels.types import QWeight
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.groups import block_linears
from aiakq.quantizers.model.outer_layers import capture, finish, load_outside
from aiakq.quantizers.model.plain_linears import take_weight
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.tuning.scaled_linear import ScaledLinear
from aiakq.quantizers.writing import take_over_parameters

#: Maximum bytes of the logits of one call, and its maximum number of tokens.
_LOGIT_BYTES, _CALL_TOKENS = 256 << 20, 2048


class Teacher:
    """The original model: the outputs of its last block on every sample, spilled beyond a budget, and its output layer.

    model    the source, of which only the layers outside the blocks stay in memory.
    samples  token ids, each [T] int64.
    """

    def __init__(
        self, model: SourceModel, samples: Sequence[Tensor], hidden: HiddenStates, progress: Callable[[int, int], None]
    ) -> None:
        self.model, self.samples = model, samples
        inputs = capture(model, [sample[None] for sample in samples], lambda _: None, hidden)
        count = len(model.blocks)
        for index, block in enumerate(model.blocks):
            model.load(block, model.block_prefix(index))
            inputs.advance(block, index)
            model.drop(block)
            model.checkpoint.close()
            progress(index + 1, count)
        self._hidden, self._outputs = inputs.hidden, inputs.outputs
        load_outside(model)

    def log_probabilities(self, chosen: Sequence[int]) -> Tensor:
        """Return the predictions on some samples of equal length, [B, T, V] float32."""
        ids = torch.stack([self.samples[number] for number in chosen])
        hidden = torch.cat([self._hidden[number] for number in chosen])
        # A copy, because autograd cannot keep a tensor that was made in inference mode.
        return finish(self.model, ids, hidden, self._outputs).clone().log_softmax(-1)

    def close(self) -> None:
        """Free the layers outside the blocks."""
        inside = self.model.blocks_name + "."
        for name, module in self.model.model.named_modules():
            if not name.startswith(inside):
                self.model.drop(module)


@dataclass(frozen=True)
class StudentBlock:
    """What the output holds for a block: its linears by full name, and its tensors by theirs."""

    prefix: str
    linears: Mapping[str, QWeight]
    tensors: Mapping[str, Tensor]


class Student:
    """The quantized model, whose scales and gains of norms have gradients. Each block is computed again in the backward
    pass, so that memory holds the activations of one block.

    linears  full name -> a linear with fixed codes.
    gains    full name -> the gain of a norm, a float32 parameter [channels].
    """

    def __init__(self, source: SourceModel) -> None:
        """``source``: the original model, no layer of which is in memory."""
        self._source = source
        # A copy without weights; they are read through the source, which merges and rotates them.
        self._model = copy.deepcopy(source.model)
        blocks = self._model.get_submodule(source.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        self._blocks = blocks
        self.linears: dict[str, ScaledLinear] = {}
        self.gains: dict[str, nn.Parameter] = {}

    def share_outside(self, teacher: Teacher) -> None:
        """Take the layers outside the blocks from the teacher, except the gains of norms."""
        inside = self._source.blocks_name + "."
        for name, module in self._model.named_modules():
            if name.startswith(inside) or self._source.is_beside(name):
                continue
            other = teacher.model.model.get_submodule(name)
            module._parameters.update(other._parameters)
            module._buffers.update(other._buffers)
            self._tune_gain(name, module)

    def add(self, index: int, block: StudentBlock) -> None:
        """Load a block: its codes stay in memory."""
        module, device = self._blocks[index], self._source.device
        self._source.load(module, block.prefix)
        take_over_parameters(module, block.prefix, block.linears, block.tensors, self._source.stored_name)
        for name in block_linears(module):
            full = f"{block.prefix}.{name}"
            if full in block.linears:
                linear = ScaledLinear(block.linears[full], device)
                module.set_submodule(name, linear)
                self.linears[full] = linear
        for name, child in module.named_modules():
            self._tune_gain(".".join(part for part in (block.prefix, name) if part), child)
        self._source.checkpoint.close()

    def quantize_head(self, name: str, weight: QWeight) -> None:
        """Replace the output layer by its quantized version, which is not tuned."""
        head = self._model.get_submodule(name)
        assert isinstance(head, nn.Linear)
        take_weight(head, weight, self._source.device)

    def _tune_gain(self, name: str, module: nn.Module) -> None:
        gain = module._parameters.get("weight")
        if gain is not None and gain.dim() == 1 and not isinstance(module, (nn.Linear, ScaledLinear)):
            module._parameters["weight"] = tuned = nn.Parameter(gain.detach().clone())
            self.gains[f"{name}.weight"] = tuned

    def log_probabilities(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> predictions [B, T, V] float32."""
        with self._recomputed_blocks():
            output = self._model(input_ids=ids.to(self._source.device), use_cache=False)
        logits: Tensor = output.logits
        return logits.float().log_softmax(-1)

    @contextmanager
    def _recomputed_blocks(self) -> Iterator[None]:
        def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)

            return call

        blocks = list(self._blocks) if torch.is_grad_enabled() else []
        for block in blocks:
            block.forward = recomputed(block.forward)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    @contextmanager
    def rounded(self, scales: torch.dtype, storage: torch.dtype) -> Iterator[None]:
        """Context manager: compute with scales and gains rounded to the dtypes in which they are stored."""
        kept = [(gain, gain.detach().clone()) for gain in self.parameters()]
        with torch.no_grad():
            for linear in self.linears.values():
                before = linear.get_buffer("scales")
                factor = linear.tuned().to(scales).float() / before
                linear.factor.copy_(torch.where(before == 0, 1.0, factor))
            for gain in self.gains.values():
                gain.copy_(gain.to(storage))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)

    def parameters(self) -> list[nn.Parameter]:
        return [*(linear.factor for linear in self.linears.values()), *self.gains.values()]


def calls_of(lengths: Sequence[int], chosen: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Split samples into calls of equal length whose logits fit into memory. ``lengths`` are those of all samples."""
    calls: list[list[int]] = []
    for number in sorted(chosen, key=lambda number: lengths[number]):
        length = lengths[number]
        most = max(1, min(_CALL_TOKENS // length, _LOGIT_BYTES // (4 * length * vocabulary)))
        if calls and lengths[calls[-1][0]] == length and len(calls[-1]) < most:
            calls[-1].append(number)
        else:
            calls.append([number])
    return calls


def needed_bytes(prepared: Prepared) -> int:
    """Return roughly the memory that tuning takes on the device: codes, layers that are not quantized, optimizer, the
    largest block in float32, activations between blocks, and logits."""
    model = prepared.model
    scales = codes = 0.0
    for shape in prepared.shapes:
        spec = prepared.spec.for_layer(shape.name)
        if spec is not None:
            codes += shape.n * shape.k
            scales += shape.n * shape.k / (shape.k if spec.group_size == -1 else spec.group_size)
    whole = sum(math.prod(info.shape) for info in prepared.checkpoint.inventory.values())
    block = max(sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks)
    activations = 4 * _CALL_TOKENS * model.hidden_width * (len(model.blocks) + 20)
    logits = 6 * min(_LOGIT_BYTES, 4 * _CALL_TOKENS * model.config.vocab_size)
    return int(codes + 7 * 4 * scales + 4 * max(whole - codes, 0) + 8 * block + activations + logits)
