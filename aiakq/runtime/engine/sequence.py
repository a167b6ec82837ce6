"""Sequence: the state of one request in the engine, from waiting to finished. ScheduledChunk: its part of a step.
ScheduledDecodes: those of many sequences, in columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field

from aiakq.runtime.engine.pages import media_hash, page_hash, root_hash
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import Chunk, Decodes, NewSequence, TokenLogprobs


@dataclass(eq=False)
class Sequence:
    """A request's tokens, its pages, and how far its keys and values are computed.

    token_ids           prompt, then generated tokens; those of pending steps are not among them.
    num_computed_tokens tokens whose keys and values are in ``pages``, or will be after the pending steps.
    pending_chunks      its chunks in pending steps, oldest first, or the columns that they are part of.
    is_steady           whether each further step computes and samples one token of it, and there is nothing else to do
                        unless it ends: it may be a part of ``ScheduledDecodes``.
    num_needed_tokens   tokens whose keys and values are needed if it becomes as long as it may.
    end_ids             tokens that end it.
    slot                its number in the executor while it runs.
    num_submitted_pages of ``pages``, how many the executor knows; None: it does not know the sequence.
    pages               KV pages in order; covers at least num_computed_tokens.
    num_inserted_pages  of ``pages``, how many are in the prefix cache, or are kept out of it.
    resamples           whether its tokens are sampled among the whole vocabulary sorted: the sampler's usual
                        candidates were not enough once.
    client, adapter     of its request.
    whole_runs          (first token, number) of runs of tokens of which a step computes all that are not cached.
    reads_whole_prompt  whether the model's output for every token of the prompt is needed, so that none is left out.
    hashes              of the full pages' tokens, as far as computed by ``page_hashes``.
    order               (priority, number of arrival); the smallest is scheduled first.
    """

    spec: RequestSpec
    times: RequestTimes
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    order: tuple[int, int] = (0, 0)
    num_computed_tokens: int = 0
    pending_chunks: list[ScheduledChunk | ScheduledDecodes] = field(default_factory=list)
    is_steady: bool = False
    slot: int | None = None
    num_submitted_pages: int | None = None
    resamples: bool = False
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_inserted_pages: int = 0
    num_cached: int | None = None
    num_preemptions: int = 0
    prompt_done: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __post_init__(self) -> None:
        options, sampling = self.spec.options, self.spec.sampling
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.stop_ids = frozenset(sampling.stop_token_ids or ())
        self.eos_ids = frozenset(self.spec.eos_token_ids)
        self.end_ids = self.stop_ids | self.eos_ids
        self.max_length = self.num_prompt + self.spec.max_tokens
        self.client, self.adapter = options.client, options.adapter
        self.reads_whole_prompt = sampling.prompt_logprobs is not None or options.reads_every_token
        self._repetition = sampling.repetition_detection
        # Of most sequences there are none: not even a comprehension runs.
        media = self.spec.media
        self._media_starts = [(item.first, item.key) for item in media if item.places] if media else []
        self.whole_runs = [place for item in media if item.is_whole for place in item.places] if media else []
        # The keys and values of the last token are never needed.
        self.num_needed_tokens = self.num_prompt + max(self.spec.max_tokens - 1, 0)

    @property
    def id(self) -> str:
        return self.spec.request_id

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that pending steps will add."""
        return sum([chunk.samples for chunk in self.pending_chunks])

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, pending ones included, whose keys and values are still to be computed."""
        num_tokens = len(self.token_ids)
        if self.pending_chunks:
            num_tokens += self.num_pending_tokens
        return min(num_tokens, self.num_needed_tokens) - self.num_computed_tokens

    @property
    def max_draft_tokens(self) -> int:
        """How many draft tokens may follow its last token. The last token of all needs none: it would save no step."""
        if self.num_uncomputed_tokens != 1 or self.num_pending_tokens or self.num_outputs < 1:
            return 0
        return self.spec.max_tokens - self.num_outputs - 1

    @property
    def may_be_steady(self) -> bool:
        """Whether it is steady once its prompt is computed."""
        return not (self.resamples or self.reads_whole_prompt or self._repetition is not None)

    @property
    def scope(self) -> bytes:
        """Sequences with the same one may share pages and learn draft tokens from each other."""
        return root_hash(self.spec.page_scope)

    def page_hashes(self, page_size: int, count: int) -> list[bytes]:
        """Chained hashes of the first ``count`` full pages; computed once each."""
        while len(self.hashes) < count:
            start = len(self.hashes) * page_size
            parent = self.hashes[-1] if self.hashes else self.scope
            hashed = page_hash(parent, self.token_ids[start : start + page_size])
            if self._media_starts:
                hashed = self._with_media(hashed, start, start + page_size)
            self.hashes.append(hashed)
        return self.hashes[:count]

    def _with_media(self, hashed: bytes, start: int, end: int) -> bytes:
        """Return the hash of a page of tokens ``start`` .. ``end - 1`` with the keys of the images that begin in it:
        hashes are chained, so that all later pages depend on them too.
        """
        begin = [f"{first - start} {key}" for first, key in self._media_starts if start <= first < end]
        return media_hash(hashed, begin) if begin else hashed

    def chunk_end(self, begin: int, end: int, limit: int) -> int:
        """Return where a chunk of the tokens from ``begin`` on ends that should end at ``end``, and has to at
        ``limit``: not within a run of which a step computes all.
        """
        for first, count in self.whole_runs:
            if first < end < first + count:
                return first + count if first + count <= limit else max(begin, first)
        return end

    def introduction(self) -> NewSequence:
        """The record with which the executor gets to know the sequence; from then on it keeps its tokens and pages."""
        assert self.slot is not None
        self.num_submitted_pages = 0
        return NewSequence(self.slot, self.spec, self.token_ids[self.num_prompt :])

    def collected(self, chunk: ScheduledChunk) -> None:
        """Take ``chunk``, the oldest pending one, off the pending ones."""
        oldest = self.pending_chunks.pop(0)
        assert oldest is chunk

    def reset(self) -> list[int]:
        """Discard everything computed, for a preemption; returns the pages to release."""
        assert not self.pending_chunks, "a pending step writes into the pages"
        pages, self.pages = self.pages, []
        self.is_steady = False
        self.num_computed_tokens = 0
        self.num_inserted_pages = 0
        self.num_preemptions += 1
        return pages

    def drop_pending(self) -> None:
        """Ignore the results of this sequence's chunks in pending steps."""
        for chunk in self.pending_chunks:
            chunk.drop(self)
        self.pending_chunks.clear()

    def resample(self) -> None:
        """Compute the last token once more, and sample the next from the whole vocabulary."""
        self.drop_pending()
        self.num_computed_tokens = len(self.token_ids) - 1
        self.resamples = True
        self.is_steady = False

    def finish_reason(self, token: int, is_complete: bool = False) -> tuple[str | None, int | str | None]:
        """Whether the sequence ends with ``token`` just appended: (finish_reason, stop_reason).

        is_complete  whether its grammar allows nothing more.
        """
        if self.num_outputs >= self.spec.sampling.min_tokens:
            if token in self.eos_ids:
                return "stop", None
            if token in self.stop_ids:
                return "stop", token
        if is_complete:
            return "stop", None
        if self.num_outputs >= self.spec.max_tokens:
            return "length", None
        if self._repetition is not None and self.num_outputs >= self.spec.sampling.min_tokens:
            if repeats(self.token_ids, self.num_outputs, self._repetition):
                return "repetition", "repetition_detected"
        return None, None


@dataclass(eq=False)
class ScheduledChunk:
    """``count`` tokens of ``sequence`` to compute in a step, from number ``first`` on.

    completes  whether these are its last uncomputed tokens.
    samples    maximum number of tokens that it samples: one after its known tokens, and one after each draft token.
    drafts     draft tokens at its end, see ``Chunk``.
    num_proposed, num_forced  draft tokens that the executor is asked to propose, see ``Chunk``.
    dropped    whether the result is ignored.
    """

    sequence: Sequence
    first: int
    count: int
    completes: bool
    samples: int
    drafts: list[int] = field(default_factory=list)
    num_proposed: int = 0
    num_forced: int = 0
    dropped: bool = False

    @staticmethod
    def of(sequence: Sequence, count: int) -> ScheduledChunk:
        """The next ``count`` tokens."""
        completes = count == sequence.num_uncomputed_tokens
        samples = int(completes and sequence.spec.max_tokens > 0)
        return ScheduledChunk(sequence, sequence.num_computed_tokens, count, completes, samples)

    @property
    def end(self) -> int:
        return self.first + self.count

    def drop(self, sequence: Sequence) -> None:
        """Ignore the result."""
        self.dropped = True

    def add_drafts(self, drafts: list[int]) -> None:
        """Append draft tokens."""
        self.drafts = drafts
        self.count += len(drafts)
        self.samples += len(drafts)

    def max_requested_drafts(self, max_model_len: int) -> int:
        """How many draft tokens may follow what it samples, within ``max_model_len`` tokens."""
        sequence = self.sequence
        left = sequence.spec.max_tokens - sequence.num_outputs - sequence.num_pending_tokens - self.samples - 1
        return min(left, max_model_len - self.end - 1)

    def accept(self, num_drafts: int) -> None:
        """Keep the first ``num_drafts`` draft tokens, and roll back what was computed for the others."""
        rejected = len(self.drafts) - num_drafts
        self.sequence.num_computed_tokens -= rejected
        self.count -= rejected
        self.drafts = self.drafts[:num_drafts]

    def record(self) -> Chunk:
        """The chunk as the executor gets it, with the pages it does not know yet."""
        sequence = self.sequence
        assert sequence.slot is not None
        new_pages = sequence.pages[sequence.num_submitted_pages :]
        sequence.num_submitted_pages = len(sequence.pages)
        samples = self.samples > 0
        return Chunk(
            sequence.slot,
            self.first,
            self.count,
            new_pages,
            samples,
            sequence.resamples,
            self.drafts,
            self.num_proposed,
            self.num_forced,
        )


class SteadySequences:
    """Sequences that are steady together, and what of them is the same in every step, in columns.

    slots      of them, which they keep while they are steady.
    token_ids  the lists to which their tokens are appended.
    end_ids    tokens that end any of them.

    The other columns are those of ``ContinuedOutputs``.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        assert len(self.slots) == len(sequences), "a steady sequence has a slot"
        self.token_ids = [sequence.token_ids for sequence in sequences]
        self.max_lengths = [sequence.max_length for sequence in sequences]
        self.end_ids = frozenset().union(*{sequence.end_ids for sequence in sequences})
        self.request_ids = [sequence.spec.request_id for sequence in sequences]
        self.num_cached = [sequence.num_cached or 0 for sequence in sequences]
        self.num_preemptions = [sequence.num_preemptions for sequence in sequences]
        self.times = [sequence.times for sequence in sequences]


class ScheduledDecodes:
    """One token each of many steady sequences, after which one is sampled: chunks in columns.

    steady     the sequences of the chunks, in columns.
    sequences  the same as a list.
    firsts     the numbers of their tokens, as in ``ScheduledChunk``.
    dropped    sequences whose results are ignored.
    """

    samples, num_proposed = 1, 0  # of each chunk
    drafts: tuple[int, ...] = ()

    def __init__(self, sequences: list[Sequence], previous: SteadySequences | None = None) -> None:
        """Their counters are advanced. ``previous`` are used again if they are the same sequences, which have been
        steady since.
        """
        if previous is None or previous.sequences != sequences:
            previous = SteadySequences(sequences)
        self.steady = previous
        self.sequences = sequences
        self.firsts = [sequence.num_computed_tokens for sequence in sequences]
        self.dropped: set[Sequence] = set()
        for sequence in sequences:
            sequence.num_computed_tokens += 1
            sequence.pending_chunks.append(self)

    def __len__(self) -> int:
        return len(self.sequences)

    def drop(self, sequence: Sequence) -> None:
        """Ignore the result of ``sequence``."""
        self.dropped.add(sequence)

    def record(self) -> Decodes:
        """The chunks as the executor gets them, with the pages it does not know yet."""
        new_pages = {}
        for sequence in [one for one in self.sequences if one.num_submitted_pages != len(one.pages)]:
            assert sequence.slot is not None
            new_pages[sequence.slot] = sequence.pages[sequence.num_submitted_pages :]
            sequence.num_submitted_pages = len(sequence.pages)
        return Decodes(self.steady.slots, self.firsts, new_pages)

    def filling(self, page_size: int, rows: SequenceType[int]) -> list[ScheduledChunk]:
        """The chunks of ``rows`` that fill a page, as records; they stay in the columns."""
        firsts, last = self.firsts, page_size - 1
        filling = [row for row in rows if firsts[row] % page_size == last]
        return [ScheduledChunk(self.sequences[row], firsts[row], 1, completes=True, samples=1) for row in filling]

    def chunk(self, number: int) -> ScheduledChunk:
        """Take the chunk with this number out of the columns."""
        sequence = self.sequences[number]
        chunk = ScheduledChunk(sequence, self.firsts[number], 1, completes=True, samples=1)
        chunk.dropped = sequence in self.dropped
        if not chunk.dropped:
            sequence.pending_chunks[sequence.pending_chunks.index(self)] = chunk
        return chunk


class ScheduledStep(list[ScheduledChunk]):
    """The chunks of a step.

    decodes  further ones, which come first; None if there are none.
    """

    def __init__(self, chunks: Iterable[ScheduledChunk] = (), decodes: ScheduledDecodes | None = None) -> None:
        super().__init__(chunks)
        self.decodes = decodes

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return sum(chunk.count for chunk in self) + (0 if self.decodes is None else len(self.decodes))

    def expanded(self) -> list[ScheduledChunk]:
        """Take all chunks out of the columns."""
        decodes = self.decodes
        return list(self) if decodes is None else [*map(decodes.chunk, range(len(decodes))), *self]


def repeats(token_ids: list[int], num_outputs: int, detection: dict[str, int]) -> bool:
    """Whether the last of ``num_outputs`` generated tokens repeat a pattern, see ``repetition_detection``."""
    count = detection.get("min_count", 0)
    for size in range(detection.get("min_pattern_size", 0) or 1, detection.get("max_pattern_size", 0) + 1):
        if size * count > num_outputs:
            return False
        # Every token but the first ``size`` equals the one that is ``size`` tokens before it.
        end = len(token_ids)
        if all(token_ids[at] == token_ids[at - size] for at in range(end - 1, end - 1 - size * (count - 1), -1)):
            return True
    return False
