"""Metrics: perplexity, KL divergence, and the rate at which two models agree on the most likely token.

A model is a ``Scorer``. Windows do not overlap; all tokens of a window except the first are predicted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.evaluation.worst import WorstPrediction, WorstPredictions

#: Maximum bytes of logits per call; windows are batched accordingly.
_LOGIT_BYTES = 256 << 20
#: Maximum bytes of logits converted to float32 probabilities at a time.
_ROW_BYTES = 64 << 20

OnWindow = Callable[[int, int], None]


class Scorer(Protocol):
    """The interface of a model for evaluation."""

    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V] float32; every row is a separate sequence."""
        ...


#: Loads a model folder.
LoadScorer = Callable[[Path], Scorer]


@dataclass(frozen=True)
class Perplexity:
    """``value = exp(mean negative log likelihood)`` over ``tokens`` predictions; ``loss`` [W, T - 1] of each."""

    value: float
    tokens: int
    seconds: float
    loss: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of every prediction, each [W, T - 1] float32.

    kl             KL(original || model), in nats.
    loss           negative log likelihood of the next token in the model; ``loss_original`` in the original.
    same           1 where the most likely tokens are the same, else 0.
    """

    kl: Tensor
    loss: Tensor
    loss_original: Tensor
    same: Tensor


@dataclass(frozen=True)
class Comparison:
    """A model compared with the original on the same windows.

    kl              mean over predictions of KL(original || model), in nats.
    top1_agreement  fraction of predictions with the same most likely token.
    scores          of every prediction.
    worst           the predictions with the largest divergence, largest first.
    """

    perplexity: float
    perplexity_original: float
    kl: float
    top1_agreement: float
    tokens: int
    scores: TokenScores = field(repr=False)
    worst: tuple[WorstPrediction, ...] = field(default=(), repr=False)


def windows(token_ids: Sequence[int] | Tensor, length: int, limit: int | None = None) -> Tensor:
    """Split token ids into at most ``limit`` windows, [W, length] int64; the remainder is dropped.

    A text shorter than one window gives one shorter window. Raises ``evaluation_text`` for fewer than two tokens.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64).flatten()
    if len(ids) < 2:
        raise error("evaluation_text", reason=f"it has {len(ids)} tokens")
    length = min(length, len(ids))
    count = len(ids) // length
    if limit is not None:
        count = min(count, max(limit, 1))
    return ids[: count * length].view(count, length)


def perplexity(model: Scorer, windows: Tensor, on_window: OnWindow | None = None) -> Perplexity:
    """Return the perplexity of ``model`` over windows [W, T]; ``on_window(done, total)`` reports progress."""
    started = time.perf_counter()
    losses: list[Tensor] = []
    for batch in _batches(windows, model, on_window):
        logits, targets = batch.predictions()
        for rows, wanted in _row_chunks(logits, targets):
            losses.append(-torch.log_softmax(rows.float(), dim=-1).gather(1, wanted.unsqueeze(1)).squeeze(1).cpu())
    loss = torch.cat(losses).view(len(windows), -1)
    return Perplexity(_exp(float(loss.double().mean())), loss.numel(), time.perf_counter() - started, loss)


def compare(model: Scorer, original: Scorer, windows: Tensor, on_window: OnWindow | None = None) -> Comparison:
    """Return the perplexity of both models and the divergence of their predictions over windows [W, T]."""
    columns: list[Tensor] = []
    worst = WorstPredictions(windows)
    for batch in _batches(windows, model, on_window):
        logits, targets = batch.predictions()
        reference = original.logits(batch.ids)[:, :-1].flatten(0, 1).to(logits.device)
        for (rows, wanted), (other, _) in zip(
            _row_chunks(logits, targets), _row_chunks(reference, targets), strict=True
        ):
            ours, theirs = torch.log_softmax(rows.float(), -1), torch.log_softmax(other.float(), -1)
            # Terms with zero probability in the original are 0, not 0 * infinity.
            terms = torch.where(theirs.isneginf(), torch.zeros_like(theirs), theirs.exp() * (theirs - ours))
            divergence = terms.sum(-1, dtype=torch.float64)
            same = ours.argmax(-1) == theirs.argmax(-1)
            losses = (-each.gather(1, wanted.unsqueeze(1)).squeeze(1).double() for each in (ours, theirs))
            columns.append(torch.stack([divergence, *losses, same.double()]).cpu())
            worst.add(divergence, ours, theirs)
    table = torch.cat(columns, 1)
    kl, loss, loss_original, agreement = table.mean(1).tolist()
    scores = TokenScores(*table.float().view(4, len(windows), -1).unbind())
    counts = (max(kl, 0.0), agreement, table.shape[1])
    return Comparison(_exp(loss), _exp(loss_original), *counts, scores, worst.largest())


def _exp(value: float) -> float:
    """Return exp(value), with infinity or NaN where math.exp raises."""
    return math.exp(value) if value < 700 else value * math.inf


@dataclass
class _Batch:
    ids: Tensor
    logits: Tensor

    def predictions(self) -> tuple[Tensor, Tensor]:
        """Return logits [R, V] of every position that has a next token, and that token [R]."""
        logits = self.logits[:, :-1].flatten(0, 1)
        return logits, self.ids[:, 1:].flatten().to(logits.device)


def _batches(windows: Tensor, model: Scorer, on_window: OnWindow | None) -> Iterator[_Batch]:
    """Yield windows with their logits. The first window is its own batch; its size determines the other batch sizes."""
    done, total, size = 0, len(windows), 1
    while done < total:
        ids = windows[done : done + size]
        with torch.inference_mode():
            logits = model.logits(ids)
        yield _Batch(ids, logits)
        done += len(ids)
        size = _batch_size(logits.shape[1], logits.shape[2])
        if on_window is not None:
            on_window(done, total)


def _batch_size(length: int, vocabulary: int) -> int:
    """Return the number of windows of ``length`` tokens per call."""
    return max(1, min(8, _LOGIT_BYTES // (length * vocabulary * 4)))


def batch_bytes(count: int, length: int, vocabulary: int) -> tuple[int, int]:
    """Return the bytes of the logits of a call for ``count`` windows, and of those converted at a time."""
    logits = min(count, _batch_size(length, vocabulary)) * length * vocabulary * 4
    return logits, min(logits, max(_ROW_BYTES, vocabulary * 4))


def _row_chunks(logits: Tensor, targets: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    step = max(1, _ROW_BYTES // (logits.shape[-1] * 4))
    return zip(logits.split(step), targets.split(step), strict=True)
