"""EncoderPart: pooling by an encoder: scores of pooled rows, and the second texts of pairs."""

from __future__ import annotations

from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.models.encoders.encoder import EncoderModel
from aiakq.runtime.pooling.pooler import PoolingPart
from aiakq.runtime.pooling.projection import Projection


class EncoderPart(PoolingPart):
    """The part of pooling in the executor of an encoder, a ``RowPart``."""

    def __init__(self, projection: Projection | None, model: EncoderModel) -> None:
        super().__init__(projection if model.pooled_head is None else model.pooled_head)
        self._segments = model.segments if model.num_segments > 1 else None

    def assign(self, sequences: list[SequenceState], starts: list[int], logit_rows: list[range]) -> None:
        """See ``RowPart``: sets the rows of second texts. A prompt is computed in one step, so that rows are tokens."""
        if self._segments is not None:
            self._segments.second = [
                range(start + sequence.spec.second_text, start + len(sequence.token_ids))
                for sequence, start in zip(sequences, starts, strict=False)
                if sequence.spec.second_text
            ]
