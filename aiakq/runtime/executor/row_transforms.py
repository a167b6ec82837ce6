"""Row transforms: each changes the logits of one sequence before its next token is sampled. Row masks: the tokens that
may come next.

A request has the transforms whose parameters it sets, in the order of ``TRANSFORMS``, which is vLLM's; those of
plug-ins (``aiakq.row_transforms``) come after them. Masks come last.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.transfer import on_device
from aiakq.registry import Registry
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor
from aiakq.runtime.protocol.step import SampledToken
from aiakq.runtime.protocol.token_bias import Bias

#: Row transforms of plug-ins by name: functions from a ``RequestSpec`` to a transform, or None where it needs none.
ROW_TRANSFORMS: Registry[Callable[[RequestSpec], RowTransform | None]] = Registry("aiakq.row_transforms", {})


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
        for process, takes_prompt in self._processors:
            given = (self._prompt, outputs.token_ids) if takes_prompt else (outputs.token_ids,)
            logits.copy_(process(*given, logits))


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


class Penalties(RowTransform):
    """``repetition_penalty`` of tokens in prompt and output; ``frequency_penalty`` and ``presence_penalty`` of output.

    Tokens are counted on the host, which knows them, so that counting does not synchronize with the device.
    """

    def __init__(self, spec: RequestSpec) -> None:
        params = spec.sampling
        self._repetition = params.repetition_penalty
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._prompt = frozenset(spec.prompt_token_ids) if self._repetition != 1 else frozenset()
        self._prompt_ids: Tensor | None = None
        self._counts: Counter[int] = Counter()
        self._num_counted = 0

    @staticmethod
    def of(spec: RequestSpec) -> Penalties | None:
        params = spec.sampling
        is_neutral = params.repetition_penalty == 1 and not (params.frequency_penalty or params.presence_penalty)
        return None if is_neutral else Penalties(spec)

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        counts = self._output_counts(outputs)
        if self._repetition != 1:
            self._penalize_repetition(logits, counts)
        if counts and (self._frequency or self._presence):
            ids, times = on_device(list(counts), logits.device), on_device(list(counts.values()), logits.device)
            logits[ids] -= self._frequency * times + self._presence

    def _penalize_repetition(self, logits: Tensor, counts: Counter[int]) -> None:
        if self._prompt_ids is None:
            self._prompt_ids = on_device(sorted(self._prompt), logits.device)
        new = sorted(set(counts) - self._prompt)
        seen = torch.cat([self._prompt_ids, on_device(new, logits.device, torch.long)]) if new else self._prompt_ids
        seen_logits = logits[seen]
        logits[seen] = torch.where(seen_logits > 0, seen_logits / self._repetition, seen_logits * self._repetition)

    def _output_counts(self, outputs: Outputs) -> Counter[int]:
        """Return the number of occurrences of each output token; those that are no drafts are counted once."""
        known = len(outputs.token_ids) - outputs.num_drafts
        self._counts.update(outputs.token_ids[self._num_counted : known])
        self._num_counted = known
        return self._counts + Counter(outputs.token_ids[known:]) if outputs.num_drafts else self._counts


#: In the order in which they are applied, after logits processors.
TRANSFORMS: tuple[Callable[[RequestSpec], RowTransform | None], ...] = (
    AllowedTokens.of,
    LogitBias.of,
    BadWords.of,
    MinTokens.of,
    Penalties.of,
)


@functools.cache
def _plugins() -> tuple[Callable[[RequestSpec], RowTransform | None], ...]:
    return tuple(ROW_TRANSFORMS.load(name) for name in ROW_TRANSFORMS)


def transforms_of(spec: RequestSpec, processors: Sequence[LogitsProcessor]) -> tuple[RowTransform, ...]:
    """Return the transforms of a sequence in their order: ``processors``, the built-in ones, those of plug-ins."""
    found: list[RowTransform] = [Processors(spec, processors)] if processors else []
    for make in (*TRANSFORMS, *_plugins()):
        transform = make(spec)
        if transform is not None:
            found.append(transform)
    return tuple(found)
