"""TokenWeights: how much each calibration token counts in the statistics of a block's linears.

The weight of a token is the squared norm of the gradient of ``-log p`` at a linear's output, over its mean: the
diagonal of the Fisher information, one number for all outputs (GuidedQuant, arXiv:2505.07004, with one group).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aiakq.quantizers.importance.row_factors import RowFactors
from aiakq.quantizers.model.experts import expert_pattern

#: Maximum weight of a token. Single tokens reach 150 times the mean, and would decide the codes alone.
MAX_WEIGHT = 8.0


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that an expert received: their indices [T] int64 and the weights [T] of their outputs."""

    tokens: Tensor
    shares: Tensor


@dataclass
class TokenWeights:
    """The squared norms of gradients at the outputs of a block's linears, for the batches of one worker.

    squares  name of a linear -> batch -> [tokens of the batch] float32. For experts, whose tokens differ between the
             original and the quantized model, all of one projection share an entry, named by ``expert_pattern``: the
             squared norm of a token over the squared weight of the expert's output.
    means    the same names, and those of the experts' linears -> the mean over all tokens of the run.
    rows     the factors of the rows, if they were wanted; those of all workers together.
    """

    squares: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    rows: RowFactors | None = None

    def of(self, group: Sequence[str], batch: int, routing: RoutedTokens | None = None) -> Tensor | None:
        """Return the weights [T] float32 of a batch's tokens for linears that share an input, with a mean near 1.

        Those of several linears are averaged, because each has its own scale. routing: the tokens that reach the
        expert; None if all do. None is returned if the gradients of a linear are not known.
        """
        found = [self._of_one(name, batch, routing) for name in group]
        known = [weights for weights in found if weights is not None]
        if not known or len(known) < len(found):
            return None
        return torch.stack(known).mean(0).clamp_(max=MAX_WEIGHT)

    def _of_one(self, name: str, batch: int, routing: RoutedTokens | None) -> Tensor | None:
        pattern = expert_pattern(name)
        squares = self.squares.get(pattern or name, {}).get(batch)
        if squares is None:
            return None
        if pattern is None or routing is None:
            return _over_mean(squares, self.means[pattern or name])
        squares = squares[routing.tokens.cpu()] * routing.shares.cpu().float().square()
        return _over_mean(squares, self.means[name] or self.means[pattern])


def _over_mean(squares: Tensor, mean: float) -> Tensor:
    """Return ``squares`` over their mean; ones if no gradient reaches the linear."""
    return squares / mean if mean > 0 else torch.ones_like(squares)
