"""Modification of logits before sampling: the row transforms of one request.

A request has the transforms whose parameters it sets, in the order of ``TRANSFORMS``, which is vLLM's; those of
plug-ins (``aiakq.row_transforms``) come after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from aiakq.registry import Registry
from aiakq.runtime.executor.penalties import OccurredTokens, Penalties
from aiakq.runtime.executor.row_transforms import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Outputs,
    Processors,
    RowTransform,
)
from aiakq.runtime.executor.transcript_tokens import TranscriptTokens
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor

#: Row transforms of plug-ins by name: functions from a ``RequestSpec`` to a transform, or None where it needs none.
ROW_TRANSFORMS: Registry[Callable[[RequestSpec], RowTransform | None]] = Registry("aiakq.row_transforms", {})

#: In the order in which they are applied, after logits processors.
TRANSFORMS: tuple[Callable[[RequestSpec], RowTransform | None], ...] = (
    TranscriptTokens.of,
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


class Modifier(Protocol):
    """Modifies the logits of one sequence.

    calls_functions  whether the request has logits processors, which may have state and must be called once per token.
    is_idle          whether no logits are modified, at any position.
    penalties        if nothing but these modifies them; else None.
    """

    calls_functions: bool
    is_idle: bool
    penalties: Penalties | None

    def modifies(self, position: int, drafts: list[int]) -> bool:
        """Whether the logits of the token at ``position``, behind ``drafts``, are modified at all."""

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> OccurredTokens | None:
        """Modify ``logits`` [V] float32 of the token after ``token_ids`` and the draft tokens ``drafts``, in place.

        Returns what ``penalize`` is to do afterwards, for the rows of all sequences together.
        """


class LogitsModifier:
    """The ``Modifier`` that applies the row transforms of a request."""

    def __init__(self, spec: RequestSpec, processors: Sequence[LogitsProcessor]) -> None:
        self._num_prompt = len(spec.prompt_token_ids)
        self._transforms = transforms_of(spec, processors)
        self.calls_functions = bool(processors)
        self.is_idle = not self._transforms
        [*others, last] = self._transforms or (None,)
        self.penalties = last if not others and isinstance(last, Penalties) else None

    def modifies(self, position: int, drafts: list[int]) -> bool:
        """See ``Modifier``."""
        for transform in self._transforms:
            if transform.applies(position - self._num_prompt):
                return True
        return False

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> OccurredTokens | None:
        """See ``Modifier``; logits [V]."""
        outputs = Outputs([*token_ids[self._num_prompt :], *drafts], len(drafts))
        for transform in self._transforms:
            if transform is self._transforms[-1] and isinstance(transform, Penalties):
                return transform.occurred(outputs)
            if transform.applies(len(outputs.token_ids)):
                transform.apply(logits, outputs)
        return None
