"""How close quantized models are to their original: scores of texts, for the tables of docs/quality.md."""

from __future__ import annotations

import math
from typing import Any

import torch

from aiakq.evaluation.intervals import Interval, Resamples, quantile
from aiakq.evaluation.metrics import Scorer, compare
from aiakq.evaluation.text import load_texts

Result = dict[str, Any]
#: Bundled texts that resemble neither the calibration nor the training text.
OTHER_TEXTS = ("dialogue", "code")
#: Tokens per block of these, which have few windows.
BLOCK = 128


def scores(model: Scorer, original: Scorer, windows: torch.Tensor) -> Result:
    """Compare a model with its original on windows [W, T]: means of each window, and what is not a mean."""
    parts = [compare(model, original, ids.unsqueeze(0)) for ids in windows]
    kl = torch.cat([part.scores.kl for part in parts])
    return {
        "loss": [math.log(part.perplexity) for part in parts],
        "loss_original": [math.log(part.perplexity_original) for part in parts],
        "kl": [part.kl for part in parts],
        "same": [part.top1_agreement for part in parts],
        "kl_p99": quantile(kl, 0.99),
        "kl_p99_interval": bounds(Resamples(*kl.shape).quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
    }


def other_texts(model: Scorer, original: Scorer, tokenizer: object, vocab_size: int, length: int) -> dict[str, Result]:
    """Return the divergence of each block of the texts that are unlike the subject's own, by their names."""
    found = {}
    for text in load_texts(OTHER_TEXTS, tokenizer, length, vocab_size):
        kl = compare(model, original, text.windows).scores.kl.double()
        count = -(-kl.shape[1] // BLOCK)
        # Sums with a common factor, so that their mean is that of all tokens although the last block is shorter.
        blocks = [part.sum(1) * count / kl.shape[1] for part in kl.tensor_split(count, 1)]
        found[text.name] = {"kl": torch.stack(blocks, 1).flatten().tolist()}
    return found


def bounds(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]
