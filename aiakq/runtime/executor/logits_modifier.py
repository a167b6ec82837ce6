"""Modification of logits before sampling: the row transforms of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from aiakq.runtime.executor.row_transforms import Outputs, transforms_of
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor


class Modifier(Protocol):
    """Modifies the logits of one sequence.

    calls_functions  whether the request has logits processors, which may have state and must be called once per token.
    """

    calls_functions: bool

    def modifies(self, position: int, drafts: list[int]) -> bool:
        """Whether the logits of the token at ``position``, behind ``drafts``, are modified at all."""

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> None:
        """Modify ``logits`` [V] float32 of the token after ``token_ids`` and the draft tokens ``drafts``, in place."""


class LogitsModifier:
    """The ``Modifier`` that applies the row transforms of a request."""

    def __init__(self, spec: RequestSpec, processors: Sequence[LogitsProcessor]) -> None:
        self._num_prompt = len(spec.prompt_token_ids)
        self._transforms = transforms_of(spec, processors)
        self.calls_functions = bool(processors)

    def modifies(self, position: int, drafts: list[int]) -> bool:
        """See ``Modifier``."""
        for transform in self._transforms:
            if transform.applies(position - self._num_prompt):
                return True
        return False

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> None:
        """See ``Modifier``; logits [V]."""
        outputs = Outputs([*token_ids[self._num_prompt :], *drafts], len(drafts))
        for transform in self._transforms:
            if transform.applies(len(outputs.token_ids)):
                transform.apply(logits, outputs)
