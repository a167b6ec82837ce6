"""Modification of logits before sampling: the row transforms of one request, and then the ends of thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aiakq.runtime.executor.row_transforms import Outputs, transforms_of
from aiakq.runtime.executor.thought_tracker import SpelledBudget, ThoughtTracker
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor

#: A difference of logits that leaves no probability for the lower one.
_FAR_AHEAD = 1e4


class LogitsModifier:
    """Modifies the logits of one sequence.

    calls_functions  whether the request has logits processors, which may have state and must be called once per token.
    """

    def __init__(self, spec: RequestSpec, processors: Sequence[LogitsProcessor]) -> None:
        self._spec = spec
        self._num_prompt = len(spec.prompt_token_ids)
        self._transforms = transforms_of(spec, processors)
        self.calls_functions = bool(processors)

    def modifies(self, position: int, drafts: list[int]) -> bool:
        """Whether the logits of the token at ``position``, behind ``drafts``, are modified at all."""
        for transform in self._transforms:
            if transform.applies(position - self._num_prompt):
                return True
        return False

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> None:
        """Modify ``logits`` [V] float32 of the token after ``token_ids`` and the draft tokens ``drafts``, in place."""
        outputs = Outputs([*token_ids[self._num_prompt :], *drafts], len(drafts))
        for transform in self._transforms:
            if transform.applies(len(outputs.token_ids)):
                transform.apply(logits, outputs)


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
        num_outputs = len(token_ids) + len(drafts) - self._num_prompt
        forced, may_end = tracker.forced, not tracker.is_ending and num_outputs >= self._spec.sampling.min_tokens
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
