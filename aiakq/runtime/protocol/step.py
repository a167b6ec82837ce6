"""A step of the model: what is computed, and the results.

A sequence is introduced once, with its tokens and its request; from then on the executor keeps its tokens and its page
table under a slot number, and a step names only what is new (docs/decisions/0018-executor.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from aiakq.runtime.protocol.command import ExecutorCommand
from aiakq.runtime.protocol.media import MediaKind
from aiakq.runtime.protocol.pooling_params import Pooled
from aiakq.runtime.protocol.request import RequestSpec

#: The ``error`` of a sequence whose logits are not finite.
NOT_FINITE = "the model's output is not finite (overflow)"
#: The ``error`` of a sequence whose masks forbid every token.
NOTHING_LEFT = "no token is left that the request allows"
#: The ``error`` of a sequence whose grammar matcher has failed.
GRAMMAR_FAILED = "its grammar cannot be followed any further"
#: Prefix of the ``error`` of a sequence whose LoRA adapter could not be loaded.
ADAPTER_FAILED = "its adapter cannot be loaded"
#: Prefixes of the ``error`` of a sequence with media that could not be encoded.
MEDIA_FAILED: Mapping[MediaKind, str] = {
    "image": "its image cannot be encoded",
    "audio": "its audio cannot be encoded",
}


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that starts to run, or runs again after a preemption.

    slot              the number under which later records name it, until a batch lists it in ``freed_slots``.
    output_token_ids  generated before a preemption.
    """

    slot: int
    spec: RequestSpec
    output_token_ids: list[int] = []


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens ``first`` .. ``first + count - 1`` of a sequence, to be computed in this step.

    new_pages  appended to the sequence's page table before the step runs; for the first chunk this includes the
               pages of a cached prefix.
    samples    whether the token after the last one is sampled.
    resamples  whether that is among the whole vocabulary sorted, because the usual candidates were not enough.
    drafts     the last tokens, if they are draft tokens. A token is sampled before the first of them and after each, up
               to the first that differs from the draft token at its position.
    num_proposed  maximum number of draft tokens that a model of the executor proposes, for ``drafts`` of a later chunk.
    num_forced    the same of tokens that the sequence's grammar forces; they go before those of a model.
    """

    slot: int
    first: int
    count: int
    new_pages: list[int]
    samples: bool
    resamples: bool = False
    drafts: list[int] = []
    num_proposed: int = 0
    num_forced: int = 0


class Decodes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Chunks of one token each, after which one is sampled: most of those of a large step, in columns.

    slots, firsts  as in ``Chunk``, one per chunk.
    new_pages      as in ``Chunk``, by slot, of the few chunks that have any.
    """

    slots: list[int] = []
    firsts: list[int] = []
    new_pages: dict[int, list[int]] = {}

    def chunks(self) -> list[Chunk]:
        """The same as records."""
        pairs = zip(self.slots, self.firsts, strict=True)
        return [Chunk(slot, first, 1, self.new_pages.get(slot, []), True) for slot, first in pairs]


NO_DECODES = Decodes()


class StepBatch(msgspec.Struct, frozen=True):
    """One step, and what changed since the batch before it. A batch without chunks only has commands.

    freed_slots    sequences that finished or were preempted; their numbers may be used again in ``new_sequences``.
    cleared_pages  pages to fill with zeros, because a failed sequence may have left values that are not finite.
    new_sequences  added when the slots are free.
    chunks         those of one token come first.
    commands       applied first, in order.
    decodes        further chunks, which come before ``chunks``.
    """

    freed_slots: list[int] = []
    cleared_pages: list[int] = []
    new_sequences: list[NewSequence] = []
    chunks: list[Chunk] = []
    commands: list[ExecutorCommand] = []
    decodes: Decodes = NO_DECODES

    @property
    def num_chunks(self) -> int:
        """The number of all chunks."""
        return len(self.decodes.slots) + len(self.chunks)

    def expanded(self) -> StepBatch:
        """The same batch without ``decodes``: they are among ``chunks``."""
        if not self.decodes.slots:
            return self
        return replace(self, chunks=[*self.decodes.chunks(), *self.chunks], decodes=NO_DECODES)


class TokenLogprobs(msgspec.Struct):
    """Log-probabilities at one position: the chosen token first, then the most likely ones, best first.

    is_ranked  false: the others are those of ``logprob_token_ids``.
    """

    token_ids: list[int]
    logprobs: list[float]
    chosen_rank: int
    is_ranked: bool = True


class SampledToken(msgspec.Struct):
    """The token sampled from one row of logits.

    logprob   of the raw logits, before temperature and penalties.
    logprobs  of the most likely tokens, if the request asked.
    error     why there is no valid token: NOT_FINITE, NOTHING_LEFT or GRAMMAR_FAILED.
    ends      whether the text is complete with it, because its grammar allows nothing more.
    resample  whether there is none because the candidates did not suffice to choose it.
    """

    token: int
    logprob: float
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    resample: bool = False
    ends: bool = False

    @property
    def is_valid(self) -> bool:
        """Whether the token continues the sequence."""
        return self.error is None and not self.resample


class ChunkResult(msgspec.Struct, omit_defaults=True):
    """The results of a step for one chunk.

    sampled          in order; empty if nothing was to be sampled, or if the token before was not valid.
    prompt_logprobs  of the prompt tokens that the chunk's logits predict, if the request asked.
    pooled           what the prompt has become, if the chunk is its last.
    error            why it has not: NOT_FINITE.
    proposed         draft tokens to follow ``sampled``, see ``Chunk``.
    is_forced        whether a grammar forces them.
    """

    sampled: list[SampledToken] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: Pooled | None = None
    error: str | None = None
    proposed: list[int] = []
    is_forced: bool = False

    @staticmethod
    def of_failure(failure: str) -> ChunkResult:
        """Return the result of a chunk of a sequence that has failed."""
        return ChunkResult([SampledToken(0, 0.0, error=failure)])

    def new_tokens(self) -> list[int]:
        """The tokens that continue the sequence."""
        return [sampled.token for sampled in self.sampled if sampled.is_valid]

    @property
    def is_finite(self) -> bool:
        """Whether the model's output is known to be finite."""
        return self.pooled is not None or bool(self.sampled and self.sampled[0].error != NOT_FINITE)

    @property
    def failure(self) -> str | None:
        """Why the sequence cannot go on: a token that could not be sampled, or a result that is not finite."""
        for sampled in self.sampled:
            if sampled.error is not None:
                return sampled.error
        if self.error is not None:
            return self.error
        if self.prompt_logprobs and any(math.isnan(scores.logprobs[0]) for scores in self.prompt_logprobs):
            return NOT_FINITE
        return None


class DecodeResults(msgspec.Struct, omit_defaults=True):
    """The results of the ``decodes`` of a batch, in columns.

    tokens, logprobs  as in ``SampledToken``, one per chunk.
    top               its ``logprobs``, one per chunk; empty if no request asked.
    others            results that are not just a valid token, by number of the chunk.
    """

    tokens: list[int]
    logprobs: list[float]
    top: list[TokenLogprobs | None] = []
    others: dict[int, ChunkResult] = {}


class StepResult(msgspec.Struct):
    """The results of a step, one per chunk, in order.

    decodes        of the batch's ``decodes``; None: theirs are the first of ``chunks``.
    out_of_memory  the chunks did not run, because they do not fit into memory or because a step before them did not.
                   The other fields of the batch were applied. The same chunks may be submitted again, without their
                   new pages, after every pending step has been collected.
    """

    chunks: list[ChunkResult] = []
    out_of_memory: bool = False
    decodes: DecodeResults | None = None

    def new_tokens(self) -> list[list[int]]:
        """For each chunk the tokens that continue its sequence."""
        decoded: list[list[int]] = []
        if self.decodes is not None:
            decoded = [[token] for token in self.decodes.tokens]
            for at, other in self.decodes.others.items():
                decoded[at] = other.new_tokens()
        return decoded + [chunk.new_tokens() for chunk in self.chunks]
