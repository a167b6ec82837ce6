"""Replaces linears of custom classes by torch's, where they compute the same."""

from __future__ import annotations

import copy
from contextlib import suppress

import torch
from torch import Tensor, nn


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
