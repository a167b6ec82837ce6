"""smooth_quant: 8-bit weights and 8-bit activations, after moving outliers from activations into weights.

Xiao et al. 2023 (arXiv:2211.10438), equation 4: ``s_j = max|X_j|^a / max|W_j|^(1-a)`` per input channel j; activations
are divided and weights multiplied by s, which a norm or a linear before absorbs. The paper folds the two inputs that
follow a norm; here the inputs of the attention output and of the last MLP linear are folded as well, into the value
and the up projection, which costs nothing at run time. Weights are then rounded per row; activations get one scale per
token at run time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aiakq.quantizers.groups import Pair
from aiakq.quantizers.work import BlockWork

_SMALLEST = 1e-5


def quantize_block(work: BlockWork) -> None:
    """Smooth every pair of the block, then round every linear."""
    largest: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[Tensor], None]:
        def note(x: Tensor) -> None:
            peak = x.abs().amax(0)
            largest[name] = torch.maximum(largest[name], peak) if name in largest else peak

        return note

    if work.pairs:
        work.observe({pair.witness: see(pair.witness) for pair in work.pairs})
    for pair in work.pairs:
        work.fold(pair, smoothing_scales(work, pair, largest[pair.witness], work.plan.alpha))
    for name in work.linears:
        work.finish(name, *work.round_plainly(name))


def smoothing_scales(work: BlockWork, pair: Pair, activations: Tensor, alpha: float) -> Tensor:
    """The scale of every channel of the pair's source.

    activations [K], the largest magnitude of each input channel of the targets. Channels that are never used keep
    scale 1; channels without weight are brought to magnitude 1. Channels of one value head are tied by their maxima.
    """
    weights = torch.stack([work.weight(name).abs().amax(0) for name in pair.targets if name in work.linears]).amax(0)
    if pair.heads:
        activations = work.plan.heads.tie(activations, "max")
        weights = work.plan.heads.tie(weights, "max")
    scales = activations.clamp(min=_SMALLEST).pow(alpha) / weights.clamp(min=_SMALLEST).pow(1 - alpha)
    scales = torch.where(weights == 0, activations, scales)
    scales = torch.where(activations == 0, torch.ones_like(scales), scales)
    return scales.clamp(min=_SMALLEST)
