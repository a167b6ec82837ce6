"""RoutingRecorder: which tokens each expert of a block receives, while the block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.importance.token_weights import RoutedTokens
from aiakq.quantizers.model.experts import expert, experts_of


class RoutingRecorder:
    """Context manager: records how the mixtures in ``block`` that contain any of ``names`` route tokens."""

    def __init__(self, block: nn.Module, names: Iterable[str]) -> None:
        wanted = {parent for name in names if (parent := _mixture_of(name)) is not None}
        self._mixtures = {name: module for name, module in experts_of(block).items() if name in wanted}
        self._calls: dict[str, tuple[Tensor, Tensor]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def of(self, name: str) -> RoutedTokens | None:
        """Return the tokens that the expert with the linear ``name`` receives in the current call, in the order of its
        rows; None outside of experts, and for an expert that receives every token."""
        mixture = _mixture_of(name)
        if mixture not in self._calls or mixture is None:
            return None
        number = int((expert(name) or "").rpartition(".")[2])
        if number in self._mixtures[mixture].everywhere:
            return None
        selected, shares = self._calls[mixture]
        tokens, place = torch.where(selected == number)
        return RoutedTokens(tokens, shares[tokens, place])

    def __enter__(self) -> RoutingRecorder:
        for name, mixture in self._mixtures.items():
            self._handles.append(mixture.register_forward_pre_hook(self._hook(name)))
        return self

    def __exit__(self, *failure: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._calls[name] = args[1].detach(), args[2].detach()

        return note


def _mixture_of(name: str) -> str | None:
    """Return the name of the mixture that contains the expert's linear ``name``; None outside of experts."""
    inside = expert(name)
    return None if inside is None else inside.rpartition(".")[0]
