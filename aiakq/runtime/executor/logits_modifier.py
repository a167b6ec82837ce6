"""Modification of logits before sampling: processors, masks, biases and penalties of one request, in vLLM's order, and
then the ends of thoughts.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aiakq.kernels.transfer import on_device
from aiakq.runtime.executor.thought_tracker import SpelledBudget, ThoughtTracker
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor, SamplingParams

#: A difference of logits that leaves no probability for the lower one.
_FAR_AHEAD = 1e4


class LogitsModifier:
    """Modifies the logits of one sequence.

    Tensors that are the same in every step are copied to the device once. Tokens are counted on the host, which knows
    them, so that counting does not synchronize with the device.
    """

    def __init__(self, spec: RequestSpec, processors: Sequence[LogitsProcessor]) -> None:
        self._spec = spec
        self._params: SamplingParams = spec.sampling
        self._num_prompt = len(spec.prompt_token_ids)
        self._processors = tuple(processors)
        self._takes_prompt = [len(inspect.signature(process).parameters) >= 3 for process in processors]
        self._end_ids = sorted({*(spec.sampling.stop_token_ids or ()), *spec.eos_token_ids})
        params = spec.sampling
        self._always = (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
            or params.logit_bias is not None
            or params.allowed_token_ids is not None
            or bool(spec.bad_word_ids or processors)
        )
        self._prompt_set = frozenset(spec.prompt_token_ids) if params.repetition_penalty != 1 else frozenset()
        self._tensors: dict[str, Tensor] = {}
        self._counts: Counter[int] = Counter()
        self._num_counted = 0

    @property
    def calls_functions(self) -> bool:
        """Whether the request has logits processors, which may have state and must be called once per token."""
        return bool(self._processors)

    def modifies(self, position: int, drafts: list[int]) -> bool:
        """Whether the logits of the token at ``position``, behind ``drafts``, are modified at all."""
        return self._always or self._masks_stops(position)

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> None:
        """Modify ``logits`` [V] float32 of the token after ``token_ids`` and the draft tokens ``drafts``, in place."""
        params, spec, device = self._params, self._spec, logits.device
        position = len(token_ids) + len(drafts)
        outputs = [*token_ids[self._num_prompt :], *drafts]
        for process, takes_prompt in zip(self._processors, self._takes_prompt, strict=True):
            logits.copy_(process(spec.prompt_token_ids, outputs, logits) if takes_prompt else process(outputs, logits))
        if params.allowed_token_ids is not None:
            allowed = params.allowed_token_ids
            forbidden = self._cached("forbidden", lambda: _all_but(allowed, len(logits), device))
            logits.masked_fill_(forbidden, float("-inf"))
        if params.logit_bias:
            biases = params.logit_bias
            ids = self._cached("bias_ids", lambda: on_device(list(biases), device))
            logits[ids] += self._cached("biases", lambda: on_device(list(biases.values()), device))
        banned = _completing(spec.bad_word_ids, outputs)
        if banned:
            logits.index_fill_(0, on_device(banned, device, torch.long), float("-inf"))
        if self._masks_stops(position):
            ends = self._cached("end_ids", lambda: on_device(self._end_ids, device, torch.long))
            logits.index_fill_(0, ends, float("-inf"))
        if params.repetition_penalty != 1:
            self._penalize_repetition(logits, self._output_counts(outputs, len(drafts)))
        if params.frequency_penalty or params.presence_penalty:
            counts = self._output_counts(outputs, len(drafts))
            if counts:
                ids, times = on_device(list(counts), device), on_device(list(counts.values()), device)
                logits[ids] -= params.frequency_penalty * times + params.presence_penalty

    def _masks_stops(self, position: int) -> bool:
        """Whether ``min_tokens`` forbids ending the sequence with the token at ``position``."""
        return position - self._num_prompt < self._params.min_tokens

    def _penalize_repetition(self, logits: Tensor, counts: Counter[int]) -> None:
        prompt = self._cached("prompt_ids", lambda: on_device(sorted(self._prompt_set), logits.device))
        new = sorted(set(counts) - self._prompt_set)
        seen = torch.cat([prompt, on_device(new, logits.device, torch.long)]) if new else prompt
        seen_logits = logits[seen]
        factor = self._params.repetition_penalty
        logits[seen] = torch.where(seen_logits > 0, seen_logits / factor, seen_logits * factor)

    def _output_counts(self, outputs: list[int], num_drafts: int) -> Counter[int]:
        """Return the number of occurrences of each output token.

        The last ``num_drafts`` of ``outputs`` are draft tokens. The others are counted incrementally.
        """
        known = len(outputs) - num_drafts
        self._counts.update(outputs[self._num_counted : known])
        self._num_counted = known
        return self._counts + Counter(outputs[known:]) if num_drafts else self._counts

    def _cached(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the cached tensor ``name``, which ``make`` creates on first use."""
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = make()
        return tensor


class BudgetedModifier(LogitsModifier):
    """A modifier that also ends thoughts whose budget is used up: it leaves only the token that has to come next.

    Where the model would end the message, behind a call for example, it may do so.
    """

    def __init__(
        self, spec: RequestSpec, processors: Sequence[LogitsProcessor], token_ids: list[int], spelled: SpelledBudget
    ) -> None:
        """token_ids: prompt and outputs, to which the outputs of later steps are appended."""
        super().__init__(spec, processors)
        self._token_ids = token_ids
        self._num_followed = len(spec.prompt_token_ids)
        self._tracker = ThoughtTracker(spelled)

    def modifies(self, position: int, drafts: list[int]) -> bool:
        return super().modifies(position, drafts) or self._followed(drafts).forced is not None

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> None:
        """See LogitsModifier; logits [V]."""
        tracker = self._followed(drafts)
        forced, may_end = tracker.forced, not (tracker.is_ending or self._masks_stops(len(token_ids) + len(drafts)))
        best = int(logits.argmax()) if forced is not None and may_end else None
        if forced is None or self.calls_functions:
            super().apply(logits, token_ids, drafts)
        if forced is not None:
            logits.fill_(float("-inf"))
            logits[forced] = 0.0
            if best in self._spec.eos_token_ids:
                logits[best] = _FAR_AHEAD  # a grammar may forbid it, and leaves the other

    def _followed(self, drafts: list[int]) -> ThoughtTracker:
        """The tracker behind ``drafts``."""
        tracker = self._tracker
        if tracker.is_done:
            return tracker
        for token in self._token_ids[self._num_followed :]:
            tracker.add(token)
        self._num_followed = len(self._token_ids)
        if drafts:
            tracker = tracker.copy()
            for token in drafts:
                tracker.add(token)
        return tracker


def _all_but(allowed: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    """Return a mask [V] bool that is True for tokens that are not ``allowed``."""
    mask = torch.ones(vocab, dtype=torch.bool, device=device)
    return mask.index_fill_(0, on_device(list(allowed), device, torch.long), False)


def _completing(words: list[list[int]], outputs: list[int]) -> list[int]:
    """Return the tokens that would complete one of ``words`` after ``outputs``."""
    return [word[-1] for word in words if len(word) == 1 or outputs[-(len(word) - 1) :] == word[:-1]]
