"""Blocks whose tokens have several hidden states (Gemma 3n): they are called with these side by side in one row, so
that everything else sees hidden states [B, T, n * hidden] like those of other models.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def widen(blocks: nn.ModuleList) -> None:
    """Let the blocks of a model whose tokens have several hidden states take and return them side by side."""
    for block in blocks:
        if states_of(block) > 1:
            own = type(block)
            block.__class__ = _WIDE.setdefault(own, _wide(own))


def states_of(block: nn.Module) -> int:
    """Return the number n of hidden states of a token that a block reads."""
    return int(getattr(getattr(block, "config", None), "altup_num_inputs", 1)) if hasattr(block, "altup") else 1


def side_by_side(x: Tensor, block: nn.Module) -> Tensor:
    """Return hidden states as the model passes them to ``block``, [n, B, T, hidden], as [B, T, n * hidden]; those of
    other models, [B, T, hidden], as they are.
    """
    return x if states_of(block) == 1 else x.permute(1, 2, 0, 3).flatten(2)


def apart(x: Tensor, block: nn.Module) -> Tensor:
    """Return what ``side_by_side`` made of hidden states as the model has it."""
    n = states_of(block)
    return x if n == 1 else x.unflatten(-1, (n, -1)).permute(2, 0, 1, 3).contiguous()


#: Class of a block -> the same with hidden states side by side.
_WIDE: dict[type[nn.Module], type[nn.Module]] = {}


def _wide(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        states: Tensor = cls.forward(self, apart(hidden_states, self), *args, **kwargs)
        return side_by_side(states, self)

    return type(cls.__name__, (cls,), {"forward": forward})
