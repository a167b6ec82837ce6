"""Finds what reads and writes the residual stream, by changing it and comparing.

A block is run with the outputs of all linears and routers frozen, so that nothing but the stream itself changes. What
then follows a change of the block's input, channel by channel, is the stream; a linear whose changed output changes the
block's output alike writes it. Readers behind a norm are its smooth mapping (smooth_mappings.py). Nothing is taken from
names, and preparation compares the rotated model with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.groups import Heads, SmoothMapping
from aiakq.quantizers.model.smooth_mappings import find_mappings, is_norm, multiplies
from aiakq.quantizers.rotation.orthogonal import random_hadamard
from aiakq.quantizers.rotation.rotation import ValueHeads, rotate_columns, rotate_rows

#: Maximum relative difference of equal values; unequal ones differ by a half or more.
_TOLERANCE = 1e-3


class NotRotatable(Exception):
    """Raised with the reason why a model cannot be rotated."""


@dataclass
class BlockStream:
    """What a block does with the residual stream, by name inside the block; the fields are those of Structure."""

    norms: dict[str, bool] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    writers: list[str] = field(default_factory=list)
    values: dict[str, ValueHeads] = field(default_factory=dict)
    layer_norms: bool = False


def trace_stream(block: nn.Module, run: Callable[[], Tensor], heads: Heads, width: int) -> BlockStream:
    """Find what reads and writes the stream of ``width`` channels in ``block``, whose weights are restored.

    ``run`` runs the block once and returns its output; every expert must see tokens. Raises ``NotRotatable``.
    """
    mappings = find_mappings(block, run, heads)
    found = BlockStream()
    stream = _Stream(block, run)
    on_stream = stream.follows_input()
    for mapping in mappings:
        name = mapping.smooth_layer
        if name in on_stream and is_norm(block.get_submodule(name)):
            found.norms[name] = mapping.plus_one
            found.readers |= dict.fromkeys(mapping.balance_layers, name)
            kind = norm_kind(block.get_submodule(name), mapping.plus_one)
            if kind is None:
                raise NotRotatable(f"{name} is a norm of another kind")
            found.layer_norms = found.layer_norms or kind == "layer"
    for name in on_stream:
        module = block.get_submodule(name)
        if is_norm(module) and name not in found.norms:
            raise NotRotatable(f"the output of {name} is not only read by linear layers")
        if not is_norm(module):
            found.readers[name] = ""
    found.writers = stream.writers(width)
    if not found.writers or not found.readers:
        raise NotRotatable("no layers that read and write the residual stream were found")
    for mapping in mappings:
        values = _values_of(block, mapping, found.writers, heads)
        if values is not None and _is_rotatable(block, run, mapping.smooth_layer, values):
            found.values[mapping.smooth_layer] = values
    return found


class _Stream:
    """Runs a block whose linears and routers return what they returned before."""

    def __init__(self, block: nn.Module, run: Callable[[], Tensor]) -> None:
        self.block = block
        self.run = run
        self.modules = {name: module for name, module in block.named_modules() if multiplies(module)}
        self.norms = {name: module for name, module in block.named_modules() if is_norm(module)}
        self.outputs: dict[str, list[Any]] = {name: [] for name in self.modules}
        self.inputs: dict[str, list[Tensor]] = {}
        self.generator = torch.Generator().manual_seed(0)
        with _output_hooks({module: self._record(name) for name, module in self.modules.items()}):
            plain = self._run()
        self.plain = plain

    def _record(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Any) -> None:
            self.outputs[name].append(_copy(output))  # blocks may add to it in place

        return hook

    def _run(self) -> Tensor:
        with torch.inference_mode():
            return self.run().float()

    def _frozen_run(self, changes: Mapping[str, Tensor], added: Tensor | None = None) -> Tensor:
        """Return the block's output with frozen outputs, to which ``changes`` are added by name, and ``added`` to the
        block's input. The inputs of norms and linears are kept in ``inputs``."""
        calls = dict.fromkeys(self.modules, 0)
        self.inputs = {}

        def frozen(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
                self._note(name, args)
                output = _copy(self.outputs[name][calls[name]])
                calls[name] += 1
                change = changes.get(name)
                return output if change is None else output + change[: output[..., 0].numel()].view(output.shape)

            return hook

        def noted(name: str) -> Callable[..., None]:
            return lambda module, args, output: self._note(name, args)

        def shift(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return args if added is None else (args[0] + added.view(args[0].shape), *args[1:])

        hooks = {module: frozen(name) for name, module in self.modules.items()}
        hooks |= {module: noted(name) for name, module in self.norms.items()}
        handle = self.block.register_forward_pre_hook(shift)
        try:
            with _output_hooks(hooks):
                return self._run()
        finally:
            handle.remove()

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self.inputs.setdefault(name, []).append(args[0].detach().clone())

    def _noise(self, width: int) -> Tensor:
        size = self.plain.square().mean().sqrt().clamp(min=1e-6)
        shape = (self.plain[..., 0].numel(), width)
        return torch.randn(shape, generator=self.generator).to(self.plain.device) * size

    def follows_input(self) -> list[str]:
        """Return the norms and linears whose input is the stream: it changes as the block's input does."""
        added = self._noise(self.plain.shape[-1])
        before = self._frozen_run({})
        plain_inputs = self.inputs
        if _factor(self._frozen_run({}, added) - before, added) is not True:
            raise NotRotatable("its residual stream is not the sum of its input and outputs of linear layers alone")
        changed = self.inputs
        names = []
        for name, inputs in plain_inputs.items():
            for old, new in zip(inputs, changed.get(name, []), strict=False):
                if old.shape[-1] == added.shape[-1] and old.numel() == added.numel() and _factor(new - old, added):
                    names.append(name)
                    break
        return names

    def writers(self, width: int) -> list[str]:
        """Return the linears whose outputs are added to the stream, each token's with any factor."""
        families: dict[str, list[str]] = {}
        for name, module in self.modules.items():
            if type(module) is nn.Linear and module.out_features == width and self.outputs[name]:
                families.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), []).append(
                    name
                )
        before = self._frozen_run({})
        writers = []
        for names in families.values():
            change = self._noise(width)
            writes = _factor(self._frozen_run(dict.fromkeys(names, change)) - before, change)
            if writes is False:
                raise NotRotatable(f"the output of {names[0]} passes a norm before it is added to the residual stream")
            writers += names if writes else []
        return writers


def _copy(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else output


def _factor(found: Tensor, change: Tensor) -> bool | None:
    """Whether every token of ``found`` is a multiple of ``change`` [T, H]; None if nothing changed."""
    found = found.reshape(change.shape).double()
    change = change.double()
    if float(found.norm()) <= 1e-6 * float(change.norm()):
        return None
    factors = (found * change).sum(-1, keepdim=True) / change.square().sum(-1, keepdim=True)
    return bool((found - factors * change).norm() <= _TOLERANCE * found.norm())


def norm_kind(norm: nn.Module, plus_one: bool) -> str | None:
    """Return "rms" for a norm that any rotation passes through, "layer" if it must keep the vector of ones, else None.

    Its gain and bias are left out. The weights of ``norm`` are restored.
    """
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    n = len(weight)
    x = torch.randn(8, n, generator=generator) + 0.5
    kept = [(tensor, tensor.detach().clone()) for tensor in (weight, bias) if isinstance(tensor, Tensor)]
    try:
        with torch.inference_mode():
            weight.data.fill_(0.0 if plus_one else 1.0)
            if isinstance(bias, Tensor):
                bias.data.zero_()
            for kind, keeps_ones in (("rms", False), ("layer", True)):
                rotation = random_hadamard(n, generator, keeps_ones)
                ours = norm(rotation.apply(x).to(weight.device)).cpu()
                wanted = rotation.apply(norm(x.to(weight.device)).cpu())
                if float((ours - wanted).norm()) <= _TOLERANCE * float(wanted.norm()):
                    return kind
    except (TypeError, RuntimeError):
        return None
    finally:
        for tensor, value in kept:
            tensor.data.copy_(value)
    return None


def _values_of(block: nn.Module, mapping: SmoothMapping, writers: list[str], heads: Heads) -> ValueHeads | None:
    """Return the heads of a linear that may compute values for an attention output, or None."""
    source = block.get_submodule(mapping.smooth_layer)
    if not isinstance(source, nn.Linear) or len(mapping.balance_layers) != 1:
        return None
    target = mapping.balance_layers[0]
    output = block.get_submodule(target)
    count = heads.kv_heads if mapping.heads else heads.q_heads
    channels = len(mapping.rows(source.out_features))
    if target not in writers or not isinstance(output, nn.Linear) or channels % count or channels == count:
        return None
    return ValueHeads(target, count, mapping.part) if output.in_features % channels == 0 else None


def _is_rotatable(block: nn.Module, run: Callable[[], Tensor], name: str, values: ValueHeads) -> bool:
    """Whether rotating the heads of the linear ``name`` and the columns that read them keeps the block's output."""
    source, target = block.get_submodule(name), block.get_submodule(values.target)
    assert isinstance(source, nn.Linear) and isinstance(target, nn.Linear)
    size = values.rows(source.out_features).shape[1]
    matrix = random_hadamard(size, torch.Generator().manual_seed(0)).apply(torch.eye(size))
    kept = source.weight, source.bias, target.weight
    with torch.inference_mode():
        plain = run()
        turned = matrix.to(kept[0].device).expand(values.count, -1, -1)
        try:
            source.weight = _parameter(rotate_rows(kept[0].data, turned, values))
            if kept[1] is not None:
                source.bias = _parameter(rotate_rows(kept[1].data, turned, values))
            target.weight = _parameter(rotate_columns(kept[2].data, turned))
            return bool((run() - plain).norm() <= _TOLERANCE * plain.norm())
        finally:
            source.weight, source.bias, target.weight = kept


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


@contextmanager
def _output_hooks(hooks: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
