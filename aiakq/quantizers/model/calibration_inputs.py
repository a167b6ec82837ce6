"""The calibration samples in batches, and at the input of the first block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from aiakq.quantizers.calibration.image_features import ImageFeatures, is_alone
from aiakq.quantizers.model.activations import SAMPLE_TOKENS, Activations, HiddenStates, batched, first_batches
from aiakq.quantizers.model.outer_layers import capture
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.workers.protocol import SHARDS, Workers, shards

#: Maximum number of tokens per batch.
_BATCH_TOKENS = 4096


def calibration_batches(samples: Sequence[Tensor] | None, features: ImageFeatures | None) -> list[Tensor]:
    """Stack samples [T] into batches [B, T]; none if there are no samples. ``features`` are the images in them."""
    if not samples:
        return []
    rows = min(_BATCH_TOKENS // max(map(len, samples)), -(-len(samples) // SHARDS))
    return with_images_alone(samples, features, max(1, rows))


def with_images_alone(samples: Sequence[Tensor], features: ImageFeatures | None, rows: int = 8) -> list[Tensor]:
    """Stack samples [T] into batches [B, T] of at most ``rows``. Those with images of which blocks see more than of
    text come first, as batches of their own.
    """
    alone = [is_alone(features, sample) for sample in samples]
    own = [sample[None] for sample, is_own in zip(samples, alone, strict=True) if is_own]
    return own + batched([sample for sample, is_own in zip(samples, alone, strict=True) if not is_own], rows)


def first_inputs(
    model: SourceModel,
    batches: Sequence[Tensor],
    workers: Workers,
    budget: float,
    scratch: Path,
    report: Callable[[int], None],
) -> Activations:
    """Return the hidden states of ``batches`` at the first block: this worker's shards, and the sample that every
    worker has.

    ``budget`` bytes are in memory, the rest in files in ``scratch``; ``report`` receives the number of batches done.
    """
    states = HiddenStates((), budget, scratch)
    if not batches:
        return Activations(states, {}, model.device)
    here = {batch for shard in shards(len(batches))[workers.rank :: workers.size] for batch in shard}
    here.update(first_batches([batch.shape for batch in batches], SAMPLE_TOKENS))
    return capture(model, batches, report, states, here)
