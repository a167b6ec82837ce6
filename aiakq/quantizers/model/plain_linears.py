"""Linears of a model: those of custom classes that are replaced by torch's, and quantized weights in a linear."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.types import QWeight
from aiakq.rounding.integers import round_activations


def plain_linears(model: nn.Module) -> set[str]:
    """Replace linears of custom classes by torch's: Falcon's if a test shows that they are equivalent, and GPT-2's,
    whose weights are [K, N]. Returns the names of the latter; ``stored`` knows the modules."""
    from transformers.pytorch_utils import Conv1D

    same: dict[type, bool] = {nn.Linear: False}
    transposed = set()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(child.nx, child.nf, device="meta")
                linear.stored_transposed = True  # type: ignore[assignment]
                setattr(parent, name, linear)
                transposed.add(".".join(filter(None, (path, name, "weight"))))
            if not isinstance(child, nn.Linear):
                continue
            if type(child) not in same:
                same[type(child)] = _is_plain(child)
            if same[type(child)]:
                with torch.device("meta"):
                    setattr(parent, name, nn.Linear(child.in_features, child.out_features, child.bias is not None))
    return transposed


def _is_plain(linear: nn.Linear) -> bool:
    make = torch.Generator().manual_seed(0)
    small = copy.copy(linear)
    small._parameters = {"weight": nn.Parameter(torch.randn(3, 4, generator=make)), "bias": None}
    if linear.bias is not None:
        small._parameters["bias"] = nn.Parameter(torch.randn(3, generator=make))
    x = torch.randn(2, 5, 4, generator=make)
    with torch.no_grad(), suppress(RuntimeError, ValueError, TypeError, AttributeError):
        output = small(x)
        return isinstance(output, Tensor) and torch.allclose(output, nn.functional.linear(x, small.weight, small.bias))
    return False


def take_weight(linear: nn.Linear, weight: QWeight | DecodedWeight, device: torch.device) -> None:
    """Replace the weight of ``linear`` by the dequantized ``weight``; inputs are multiplied and rounded as it says."""
    factors = weight.factors if isinstance(weight, QWeight) else None
    plain = replace(weight, factors=None) if isinstance(weight, QWeight) else weight
    linear.weight = nn.Parameter(as_floats(plain).to(device), requires_grad=False)
    if factors is not None:
        multiplied = factors.to(device)
        linear.register_forward_pre_hook(lambda module, args: (args[0] * multiplied.to(args[0].dtype), *args[1:]))
    if weight.bias is not None:
        linear.bias = nn.Parameter(weight.bias.to(device, torch.float32), requires_grad=False)
    if isinstance(weight, DecodedWeight):
        return
    if weight.scheme == "w8a8" and not weight.rounding.is_separate:
        scale = weight.input_scale
        linear.register_forward_pre_hook(lambda module, args: (round_activations(args[0], scale), *args[1:]))
    elif not weight.scheme.endswith("a16"):
        static, rounding = weight.input_scale, weight.rounding

        def rounded(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            values = round_inputs(x.reshape(-1, x.shape[-1]), None if static is None else static.to(x.device), rounding)
            return values.view(x.shape).to(x.dtype), *args[1:]

        linear.register_forward_pre_hook(rounded)


def stored(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Convert the parameter ``name`` of ``module`` between the layouts of checkpoint and model: a transpose between
    [K, N] and [N, K] for weights of GPT-2, the identity for all others."""
    turned = name == "weight" and getattr(module, "stored_transposed", False)
    return tensor.T.contiguous() if turned else tensor
