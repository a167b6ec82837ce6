"""EncoderPart: pooling by an encoder: scores of pooled rows, and the second texts of pairs."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.errors import error
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.models.encoders.encoder import EncoderModel
from aiakq.runtime.pooling.pooler import PoolingPart
from aiakq.runtime.pooling.projection import Projection
from aiakq.runtime.protocol.late_interaction import LateInteraction


class EncoderPart(PoolingPart):
    """The part of pooling in the executor of an encoder, a ``RowPart``."""

    def __init__(self, projection: Projection | None, model: EncoderModel) -> None:
        super().__init__(projection if model.pooled_head is None else model.pooled_head)
        self._segments = model.segments if model.num_segments > 1 else None
        self._num_keys = model.num_keys

    def assign(self, sequences: list[SequenceState], starts: list[int], logit_rows: list[range]) -> None:
        """See ``RowPart``: sets the rows of second texts and the numbers of keys. A prompt is computed in one step, so
        that rows are tokens."""
        self._num_keys.clear()
        for sequence, start in zip(sequences, starts, strict=False):
            if sequence.spec.num_unread:
                self._num_keys[start] = len(sequence.token_ids) - sequence.spec.num_unread
        if self._segments is not None:
            self._segments.second = [
                range(start + sequence.spec.second_text, start + len(sequence.token_ids))
                for sequence, start in zip(sequences, starts, strict=False)
                if sequence.spec.second_text
            ]


#: Tokens of the shortest text: those around it, and its marker.
_SHORTEST = 3


def check_windows(late: LateInteraction, windows: Sequence[int | None]) -> None:
    """Raise ``unsupported`` if tokens that fill up a query may be so far behind it that they read no token."""
    read = late.expansion is None or late.is_read
    if not read and any(window is not None and late.query_length > window + _SHORTEST for window in windows):
        what = f"Filling up queries to {late.query_length} tokens, which is more than the windows of attention"
        raise error(
            "unsupported", what=what, hint="A shorter query_length, or attend_to_expansion_tokens, is computed."
        )
