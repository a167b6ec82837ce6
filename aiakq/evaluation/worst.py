"""The predictions of a text that quantization changed most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

#: Number of predictions kept.
WORST = 5
#: Most likely tokens shown of each model.
_CHOICES = 3
#: Tokens shown before the predicted one.
_CONTEXT = 12

#: Token ids with their probabilities, the most likely first.
Choices = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class WorstPrediction:
    """One prediction.

    kl                its divergence, in nats.
    window, position  where the predicted token is: in which window, and at which position there.
    context           ids of the tokens before it; ``token`` is the one that the text has.
    p, p_original     probability of ``token`` in the model and in the original.
    choices           the model's most likely tokens; ``original`` those of the original.
    """

    kl: float
    window: int
    position: int
    context: tuple[int, ...]
    token: int
    p: float
    p_original: float
    choices: Choices
    original: Choices


class WorstPredictions:
    """Keeps the predictions of windows [W, T] with the largest divergence, while they are scored in order."""

    def __init__(self, windows: Tensor, limit: int = WORST) -> None:
        self._windows, self._limit = windows, limit
        self._kept: list[WorstPrediction] = []
        self._seen = 0

    def add(self, divergence: Tensor, ours: Tensor, theirs: Tensor) -> None:
        """Consider the next R predictions: divergence [R], log-probabilities of the model and the original [R, V]."""
        start, self._seen = self._seen, self._seen + len(divergence)
        floor = self._kept[-1].kl if len(self._kept) == self._limit else 0.0
        largest = divergence.nan_to_num(nan=-math.inf, posinf=math.inf).topk(min(self._limit, len(divergence)))
        for kl, row in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
            if kl > floor:
                self._kept.append(self._prediction(start + row, kl, ours[row], theirs[row]))
        # Sorting is stable: of equal ones the first are kept.
        self._kept = sorted(self._kept, key=lambda each: -each.kl)[: self._limit]

    def largest(self) -> tuple[WorstPrediction, ...]:
        return tuple(self._kept)

    def _prediction(self, index: int, kl: float, ours: Tensor, theirs: Tensor) -> WorstPrediction:
        window, position = divmod(index, self._windows.shape[1] - 1)
        ids = self._windows[window].tolist()
        token, before = ids[position + 1], ids[max(0, position + 1 - _CONTEXT) : position + 1]
        p, p_original = float(ours[token].exp()), float(theirs[token].exp())
        choices = (_choices(ours), _choices(theirs))
        return WorstPrediction(kl, window, position + 1, tuple(before), token, p, p_original, *choices)


def _choices(logprobs: Tensor) -> Choices:
    best = logprobs.topk(min(_CHOICES, len(logprobs)))
    return tuple(zip(best.indices.tolist(), best.values.exp().tolist(), strict=True))


def described(prediction: WorstPrediction, tokenizer: Any) -> dict[str, object]:
    """Return the prediction as JSON values, its tokens as text. ``tokenizer`` is a transformers tokenizer."""
    context = list(prediction.context)

    def texts(choices: Choices) -> list[dict[str, object]]:
        return [{"token": _text(context, token, tokenizer), "id": token, "p": p} for token, p in choices]

    return {
        "kl": prediction.kl,
        "window": prediction.window,
        "position": prediction.position,
        "context": tokenizer.decode(context),
        "token": _text(context, prediction.token, tokenizer),
        "id": prediction.token,
        "p_original": prediction.p_original,
        "p": prediction.p,
        "original_choices": texts(prediction.original),
        "choices": texts(prediction.choices),
    }


def _text(context: list[int], token: int, tokenizer: Any) -> str:
    """Return the text that ``token`` adds to its context, such as a word with the space before it."""
    before, after = tokenizer.decode(context), tokenizer.decode([*context, token])
    return str(after.removeprefix(before)) if after.startswith(before) else str(tokenizer.decode([token]))
