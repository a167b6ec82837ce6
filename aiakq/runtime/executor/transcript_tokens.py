"""TranscriptTokens: which tokens may come next in a transcript of audio."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.transfer import on_device
from aiakq.runtime.executor.row_transforms import Outputs, RowTransform
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.transcripts import TranscriptRules

_NEVER = float("-inf")


class TranscriptTokens(RowTransform):
    """Forbids tokens as Whisper's authors do: some always, some as the first, and timestamps out of order.

    Source: Radford et al. 2022, arXiv:2212.04356; transformers' WhisperTimeStampLogitsProcessor.
    """

    def __init__(self, rules: TranscriptRules) -> None:
        self._rules = rules

    @staticmethod
    def of(spec: RequestSpec) -> TranscriptTokens | None:
        """Return the transform of a transcript; None for other texts."""
        return None if spec.options.rules is None else TranscriptTokens(spec.options.rules)

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        """See RowTransform; logits [V]."""
        rules, seen = self._rules, outputs.token_ids
        forbidden = rules.suppressed if seen else [*rules.suppressed, *rules.first_suppressed]
        if forbidden:
            logits.index_fill_(0, on_device(forbidden, logits.device, torch.long), _NEVER)
        if rules.timestamps is not None:
            self._forbid_disorder(logits, seen, rules.timestamps)

    def _forbid_disorder(self, logits: Tensor, seen: list[int], zero: int) -> None:
        """Forbid timestamps that do not fit behind ``seen``, and text where a timestamp has to come.

        zero  the timestamp of 0 s; the token before it asks for no timestamps.
        """
        rules = self._rules
        logits[zero - 1] = _NEVER
        times = [token for token in seen if token >= zero]
        follows_time = bool(seen) and seen[-1] >= zero
        is_pair = len(seen) < 2 or seen[-2] >= zero
        if follows_time:
            # Segments end and begin with timestamps, so that these come in pairs, but for the first and the last.
            logits[slice(zero, None) if is_pair else slice(rules.end)] = _NEVER
        if times:
            logits[zero : times[-1] + (not follows_time or is_pair)] = _NEVER
        if not seen:
            logits[:zero] = _NEVER
            if rules.max_first_timestamp is not None:
                logits[zero + rules.max_first_timestamp + 1 :] = _NEVER
        if logits[zero:].logsumexp(0) > logits[:zero].max():
            logits[:zero] = _NEVER  # timestamps together are likelier than any text
