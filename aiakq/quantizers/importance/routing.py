"""Which tokens an expert of a block receives, while the block runs."""

from __future__ import annotations

import torch
from torch import nn

from aiakq.quantizers.importance.token_weights import RoutedTokens
from aiakq.quantizers.model.experts import Experts, expert


def routed_tokens(block: nn.Module, name: str) -> RoutedTokens | None:
    """Return the tokens that the expert with the linear ``name`` receives in the current call, in the order of its
    rows; None outside of experts, and for an expert that receives every token."""
    above, _, number = (expert(name) or "").rpartition(".")
    mixture = block.get_submodule(above) if above else None
    if not isinstance(mixture, Experts) or int(number) in mixture.everywhere:
        return None
    if mixture.selected is None or mixture.shares is None:
        return None
    tokens, place = torch.where(mixture.selected == int(number))
    return RoutedTokens(tokens, mixture.shares[tokens, place])
