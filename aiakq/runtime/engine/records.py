"""The executor protocol, and the records that describe a step and its results.

The engine decides what runs; an executor holds the model, the KV memory and its own copy of every running sequence.
Between them pass the records below: integers, strings, floats and lists, which could cross a process or be broadcast
to ranks. A sequence is introduced once, with its tokens and its request; from then on the executor keeps its tokens
and its page table under a slot number, and a step names only what is new (docs/decisions/0018-executor.md).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from aiakq.runtime.engine.adapters import AdapterRef, DropAdapter, FreeAdapter, LoadAdapter
from aiakq.runtime.engine.messages import EnableDrafts, RequestSpec, TokenLogprobs
from aiakq.runtime.pooling_params import Pooled
from aiakq.runtime.structured.grammars import Grammar
from aiakq.runtime.structured.vocabulary import Vocabulary


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


class UseVocabulary(msgspec.Struct, frozen=True, tag="use_vocabulary"):
    """The vocabulary for grammars. It precedes the first sequence with a grammar."""

    vocabulary: Vocabulary


class ResetSequences(msgspec.Struct, frozen=True, tag="reset_sequences"):
    """Drop every pending step and every sequence."""


class PrepareGrammar(msgspec.Struct, frozen=True, tag="prepare_grammar"):
    """Begin to compile a grammar while steps run. While the future exists, the compiled grammar stays in memory; if it
    is cancelled, nobody waits for the grammar any more.
    """

    grammar: Grammar


class PrepareAdapter(msgspec.Struct, frozen=True, tag="prepare_adapter"):
    """Start reading an adapter while steps run. The result of the future is the error if that failed."""

    adapter: AdapterRef


#: What an executor does before it runs the chunks of a batch.
ExecutorCommand = UseVocabulary | ResetSequences | EnableDrafts | DropAdapter | FreeAdapter | LoadAdapter
#: What an executor does while steps run.
Preparation = PrepareGrammar | PrepareAdapter


class StepBatch(msgspec.Struct, frozen=True):
    """One step, and what changed since the batch before it. A batch without chunks only has commands.

    freed_slots    sequences that finished or were preempted; their numbers may be used again in ``new_sequences``.
    cleared_pages  pages to fill with zeros, because a failed sequence may have left values that are not finite.
    new_sequences  added when the slots are free.
    chunks         those of one token come first.
    commands       applied first, in order.
    """

    freed_slots: list[int] = []
    cleared_pages: list[int] = []
    new_sequences: list[NewSequence] = []
    chunks: list[Chunk] = []
    commands: list[ExecutorCommand] = []


class SampledToken(msgspec.Struct):
    """The token sampled from one row of logits.

    logprob   of the raw logits, before temperature and penalties.
    logprobs  of the most likely tokens, if the request asked.
    error     why there is no valid token: NOT_FINITE, NOTHING_LEFT or GRAMMAR_FAILED.
    ends      whether the text is complete with it, because its grammar allows nothing more.
    resample  whether there is none because the candidates were not enough to settle it.
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
    pooling_error    why it has not: NOT_FINITE.
    proposed         draft tokens to follow ``sampled``, see ``Chunk``.
    is_forced        whether a grammar forces them.
    """

    sampled: list[SampledToken] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: Pooled | None = None
    pooling_error: str | None = None
    proposed: list[int] = []
    is_forced: bool = False


class StepResult(msgspec.Struct):
    """The results of a step, one per chunk, in order.

    out_of_memory  the chunks did not run, because they do not fit into memory or because a step before them did not.
                   The other fields of the batch were applied. The same chunks may be submitted again, without their
                   new pages, after every pending step has been collected.
    """

    chunks: list[ChunkResult] = []
    out_of_memory: bool = False

    def new_tokens(self) -> list[list[int]]:
        """For each chunk the tokens that continue its sequence."""
        return [[sampled.token for sampled in chunk.sampled if sampled.is_valid] for chunk in self.chunks]


class PendingStep(Protocol):
    """A step that was submitted."""

    def collect(self) -> StepResult:
        """Wait for the step's results. Steps are collected once each, in the order in which they were submitted."""


class CommandsDone:
    """The ``PendingStep`` of a batch without chunks."""

    def collect(self) -> StepResult:
        """Return an empty result."""
        return StepResult()


class Executor(Protocol):
    """Runs the steps that an engine schedules, one after the other."""

    def submit(self, batch: StepBatch) -> PendingStep:
        """Start a step behind those that are pending, without waiting for them.

        A chunk may end with the token that the step before samples. Its own token is sampled only when that step was
        collected: it may depend on every token before it.
        """

    def prepare(self, preparation: Preparation) -> Future[Any] | None:
        """Start what later sequences need, while steps run. The future is done when a batch need not wait for it; None
        if nothing is to be waited for.
        """
