"""DraftChain: the draft tokens of one sequence in the making, one behind the other, whatever model samples them."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.runtime.executor.row_transforms import RowMask
from aiakq.runtime.executor.sampler import SamplerRow
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.step import Chunk, ChunkResult, SampledToken


class DraftChain:
    """The draft tokens that follow the last token of ``sequence``.

    tokens      sampled so far.
    num_wanted  how many there shall be. 0 where ``chunk`` asks for none, ``result`` holds forced tokens or ends the
                sequence, or a logits processor would have to be called.
    masks       of the sequence, behind ``tokens``.
    shift       offset between a token and the position at which the model reads it, see ``Runner``.
    """

    shift = 0

    def __init__(self, chunk: Chunk, sequence: SequenceState, result: ChunkResult, num_positions: int) -> None:
        """num_positions: of the sequence, for whose keys there is memory."""
        self.sequence = sequence
        self.masks: Sequence[RowMask] = sequence.masks
        self.tokens: list[int] = []
        self._chunk, self._result = chunk, result
        self._num_known, self._num_positions = len(sequence.token_ids), num_positions
        last = result.sampled[-1] if result.sampled else None
        goes_on = last is not None and last.is_valid and not last.ends and not sequence.modifier.calls_functions
        self.num_wanted = chunk.num_proposed if goes_on and not result.proposed else 0

    def row(self) -> SamplerRow:
        """The row of logits from which the next draft token is sampled: with the number and masks of its position."""
        return SamplerRow(self.sequence, list(self.tokens), masks=self.masks)

    def append(self, sampled: SampledToken) -> None:
        """The next draft token; the last one if it is not valid or none may follow it."""
        if not sampled.is_valid:
            self.num_wanted = len(self.tokens)
            return
        self.tokens.append(sampled.token)
        if self.masks and len(self.tokens) < self.num_wanted:
            self.masks = [mask.after(sampled.token) for mask in self.masks]
            if any(mask.failure is not None for mask in self.masks):
                self.num_wanted = len(self.tokens)

    @property
    def wants_more(self) -> bool:
        """Whether another draft token is wanted, and there is room for the keys of the one before."""
        return len(self.tokens) < self.num_wanted and self._last_position < self._num_positions

    def last_chunk(self) -> Chunk:
        """The draft token sampled last, from whose logits the next one is sampled."""
        return Chunk(self._chunk.slot, self._last_position, 1, [], True, drafts=self.tokens[-1:])

    def finish(self) -> None:
        """Hand over the draft tokens."""
        if self.tokens:
            self._result.proposed = self.tokens

    @property
    def _last_position(self) -> int:
        """At which the model reads the draft token sampled last."""
        return self._num_known + len(self.tokens) - 1 - self.shift
