"""Row transforms: each changes the logits of one sequence before its next token is sampled. Row masks: the tokens that
may come next.

``logits_modifier`` says which transforms a request has, and their order. Masks come last.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.transfer import on_device
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor
from aiakq.runtime.protocol.step import SampledToken
from aiakq.runtime.protocol.token_bias import Bias


class Outputs:
    """The generated tokens before the one that is sampled.

    token_ids   with draft tokens at the end.
    num_drafts  how many of them are draft tokens.
    """

    __slots__ = ("num_drafts", "token_ids")

    def __init__(self, token_ids: list[int], num_drafts: int) -> None:
        self.token_ids = token_ids
        self.num_drafts = num_drafts


class RowTransform:
    """Changes logits of one sequence. Tensors that are the same in every step are copied to the device once."""

    def applies(self, num_outputs: int) -> bool:
        """Return whether logits are changed after ``num_outputs`` generated tokens, draft tokens included."""
        return True

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        """Change ``logits`` [V] float32 in place."""
        raise NotImplementedError


class RowMask(Protocol):
    """The tokens that may come next in one sequence, whatever else changes its logits. It follows the sampled tokens.

    num_words  32-bit words of a mask, for at least the tokens that have logits.
    failure    why no token may come any more; None while one may.
    """

    num_words: int
    failure: str | None

    def fill_mask(self, address: int) -> None:
        """Write the bits of the tokens allowed next to ``num_words`` int32 at ``address``.

        Bit t % 32 of word t // 32 is that of token t.
        """

    def after(self, draft: int) -> RowMask:
        """Return the mask behind the draft token ``draft``; it has failed if no token can be sampled there."""

    def follow(self, sampled: SampledToken) -> None:
        """Advance by what was sampled; note there if the sequence ends with it, or cannot go on."""

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` of the tokens that have to come next, as far as they are known."""


class Processors(RowTransform):
    """Logits processors: functions of the caller, as in vLLM's offline API."""

    def __init__(self, spec: RequestSpec, processors: Sequence[LogitsProcessor]) -> None:
        self._prompt = spec.prompt_token_ids
        self._processors = [(each, len(inspect.signature(each).parameters) >= 3) for each in processors]

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        """See RowTransform; logits [V]. Raises ``invalid_type`` for a processor that does not return as many logits."""
        for process, takes_prompt in self._processors:
            given = (self._prompt, outputs.token_ids) if takes_prompt else (outputs.token_ids,)
            changed: object = process(*given, logits)
            if not isinstance(changed, Tensor) or changed.shape != logits.shape:
                raise error("invalid_type", param="logits_processors", reason=_mismatch(process, changed, len(logits)))
            logits.copy_(changed)


def _mismatch(processor: LogitsProcessor, returned: object, vocab: int) -> str:
    """Say what ``processor`` returned instead of ``vocab`` logits."""
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    shape = f"a tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
    return f"{name} returns {shape}, a tensor of shape [{vocab}] is expected"


class AllowedTokens(RowTransform):
    """``allowed_token_ids``: forbids all others."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self._allowed = allowed
        self._forbidden: Tensor | None = None

    @staticmethod
    def of(spec: RequestSpec) -> AllowedTokens | None:
        allowed = spec.sampling.allowed_token_ids
        return None if allowed is None else AllowedTokens(allowed)

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        if self._forbidden is None:
            mask = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            self._forbidden = mask.index_fill_(0, on_device(list(self._allowed), logits.device, torch.long), False)
        logits.masked_fill_(self._forbidden, float("-inf"))


class LogitBias(RowTransform):
    """``logit_bias``: adds to the logits of some tokens."""

    def __init__(self, bias: dict[int, Bias]) -> None:
        self._bias = bias
        self._tensors: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(spec: RequestSpec) -> LogitBias | None:
        return LogitBias(spec.sampling.logit_bias) if spec.sampling.logit_bias else None

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        if self._tensors is None:
            ids, biases = list(self._bias), list(self._bias.values())
            self._tensors = on_device(ids, logits.device), on_device(biases, logits.device)
        ids_tensor, bias_tensor = self._tensors
        logits[ids_tensor] += bias_tensor


class BadWords(RowTransform):
    """``bad_words``: forbids the last token of a word whose other tokens are there."""

    def __init__(self, words: list[list[int]]) -> None:
        self._words = words

    @staticmethod
    def of(spec: RequestSpec) -> BadWords | None:
        return BadWords(spec.bad_word_ids) if spec.bad_word_ids else None

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        seen = outputs.token_ids
        banned = [word[-1] for word in self._words if len(word) == 1 or seen[-(len(word) - 1) :] == word[:-1]]
        if banned:
            logits.index_fill_(0, on_device(banned, logits.device, torch.long), float("-inf"))


class MinTokens(RowTransform):
    """``min_tokens``: forbids the tokens that end the sequence."""

    def __init__(self, min_tokens: int, end_ids: list[int]) -> None:
        self._min_tokens = min_tokens
        self._end_ids = end_ids
        self._ends: Tensor | None = None

    @staticmethod
    def of(spec: RequestSpec) -> MinTokens | None:
        ends = sorted({*(spec.sampling.stop_token_ids or ()), *spec.eos_token_ids})
        return MinTokens(spec.sampling.min_tokens, ends) if spec.sampling.min_tokens else None

    def applies(self, num_outputs: int) -> bool:
        return num_outputs < self._min_tokens

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        if self._ends is None:
            self._ends = on_device(self._end_ids, logits.device, torch.long)
        logits.index_fill_(0, self._ends, float("-inf"))
