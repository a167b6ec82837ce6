"""A model of a model, for the simulator: a paged memory, and answers that depend on everything read back from it.

What a position holds is a hash of what the position before holds, of its token and of its number, as keys and values
of a real model depend on the whole context. The next token is a hash of all positions, read through the page table.
So whatever is lost, stale, crossed or at a wrong position changes the answer, and the answer of a request alone is
known from its tokens (``Alone``), without pages.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from aiakq.runtime.engine.engine import PROBE
from aiakq.runtime.engine.executor import CommandsDone, PendingStep
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import (
    NOT_FINITE,
    NOTHING_LEFT,
    Chunk,
    ChunkResult,
    NewSequence,
    SampledToken,
    StepBatch,
    StepResult,
    TokenLogprobs,
)

VOCAB = 2048
#: Tokens 0 .. ENDS - 1 come up often: what requests stop at.
ENDS = 8
#: What a position holds that was cleared, or never written.
EMPTY = 0
#: What a position holds that is not finite.
POISON = 1
#: Before position 0.
START = 7919
_MASK = 0xFFFFFFFF


class Died(Exception):
    """The process of the engine ended in the middle of a step."""


@dataclass
class Fault:
    """What goes wrong in one step.

    kind   "row": a row is not finite. "nothing": a request leaves no token of a row. "poison": what a sequence
           writes is not finite. "all": no row is finite. "broken": nor is one of any later step. "memory": more tokens
           at a time than some number do not fit. "dies": the process ends.
    place  in 0 .. 1, which row, how many tokens, or when.
    """

    kind: str
    place: float


def entry(before: int, token: int, position: int) -> int:
    """What ``position`` holds."""
    return POISON if before == POISON else hash((before, token, position))


def unsettled(entries: list[int]) -> bool:
    """Whether the sampler's candidates do not settle the token after ``entries``."""
    return hash((tuple(entries), 104729)) % 50 == 0


def choice(entries: list[int], spec: RequestSpec, outputs: int) -> tuple[int, float]:
    """The next token after ``entries``, and a number that stands for its log-probability."""
    value = hash((tuple(entries), spec.seed))
    token = value % VOCAB
    if value & 0xF00000 == 0:
        token %= ENDS
    ends = {*(spec.sampling.stop_token_ids or ()), *spec.eos_token_ids}
    if outputs < spec.sampling.min_tokens and token in ends:
        token = ENDS + token
    return token, -float(value & _MASK)


class Alone:
    """One request computed without a batch and without pages."""

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.entries: list[int] = []
        self.outputs = 0
        for token in spec.prompt_token_ids:
            self._put(token)

    def next(self) -> tuple[int, float, str | None, int | None]:
        """The next token, its log-probability, and how the request ends with it: finish_reason and stop_reason."""
        spec = self.spec
        token, logprob = choice(self.entries, spec, self.outputs)
        self._put(token)
        self.outputs += 1
        if self.outputs >= spec.sampling.min_tokens:
            if token in spec.eos_token_ids:
                return token, logprob, "stop", None
            if token in (spec.sampling.stop_token_ids or ()):
                return token, logprob, "stop", token
        return token, logprob, "length" if self.outputs >= spec.max_tokens else None, None

    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """What a request that asks for them gets."""
        prompt = self.spec.prompt_token_ids
        return [None, *(_scored(self.entries[at - 1], prompt[at]) for at in range(1, len(prompt)))]

    def _put(self, token: int) -> None:
        before = self.entries[-1] if self.entries else START
        self.entries.append(entry(before, token, len(self.entries)))


def _scored(held: int, target: int) -> TokenLogprobs:
    return TokenLogprobs([target], [math.nan if held == POISON else -float(held & _MASK)], 1)


@dataclass(frozen=True)
class Row:
    """A sequence's part of a step that runs. starts: how often the sequence was introduced. drafts: of its tokens, the
    draft tokens.
    """

    id: str
    first: int
    count: int
    samples: bool
    starts: int
    epoch: int
    drafts: int = 0


@dataclass(frozen=True)
class Refused:
    """A part of a step that did not fit into memory alone, for the second time."""

    row: Row


@dataclass
class Collected:
    """What became of a row: with which words it ``failed``, and whether its token is to be sampled again or was not
    sampled, because the token before it was not valid. written: the pages it wrote to, of ``pages``. dropped: whether
    nobody waits for it any more, which the world knows. num_tokens: those that were sampled.
    """

    row: Row
    failed: str | None
    resample: bool
    skipped: bool
    pages: list[int]
    written: list[int]
    dropped: bool = False
    num_tokens: int = 0


#: What the engine asked the executor for and got, in order: rows that run, rows whose results it takes, a refused one;
#: or, with None, whether anything is finite.
Event = list[Row] | list[Collected] | Refused | None


@dataclass(eq=False)
class State:
    """A sequence as the executor knows it."""

    spec: RequestSpec
    tokens: list[int]
    pages: list[int] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.spec.prompt_token_ids)


class PagedExecutor:
    """An executor over a memory of pages, with faults on demand.

    fault    of what is submitted next.
    epoch    a number of the caller, to know rows by.
    events   since ``begin``.
    broken   whether nothing is finite any more.
    ran_out  whether memory ran out since ``begin``.
    cleared  pages that were filled with zeros since ``begin``.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [[EMPTY] * page_size for _ in range(num_pages)]
        self.fault: Fault | None = None
        self.epoch = 0
        self.events: list[Event] = []
        self.broken = False
        self.poisoned = False
        self.silent = False
        self.ran_out = False
        self.sampled: dict[State, int] = {}
        self._limit: int | None = None
        self._states: dict[int, State] = {}
        self._starts: Counter[str] = Counter()
        self._pending: deque[PagedStep] = deque()
        #: Rows that did not run: id and first token, with the epoch in which they were submitted first.
        self._not_run: dict[tuple[str, int], int] = {}
        self.cleared: set[int] = set()

    def begin(self, fault: Fault | None) -> None:
        """A step begins in which ``fault`` happens; memory stays short while a step is pending that did not fit."""
        if not any(step.out_of_memory for step in self._pending):
            self.fault, self._limit = fault, None
        self.events = []
        self.cleared = set()
        self.ran_out = False
        self.silent = False

    def apply(self, batch: StepBatch) -> PagedStep:
        """What a batch changes before its step runs."""
        for slot in batch.freed_slots:
            del self._states[slot]
        for page in batch.cleared_pages:
            self.pages[page] = [EMPTY] * self.page_size
        self.cleared.update(batch.cleared_pages)
        for record in batch.new_sequences:
            self._introduce(record)
        for chunk in batch.chunks:
            self._states[chunk.slot].pages += chunk.new_pages
        return PagedStep(self, batch.chunks, [self._states[chunk.slot] for chunk in batch.chunks])

    def submit(self, batch: StepBatch) -> PendingStep:
        """See ``Executor``."""
        if not batch.chunks:
            self.reset()
            return CommandsDone()
        step = self.apply(batch)
        behind = self._pending[-1] if self._pending else None
        self._pending.append(step)
        if step.states[0].spec.request_id == PROBE:
            self._probe(step)
        elif behind is not None and behind.out_of_memory:
            step.rows = [self._row(chunk, state) for chunk, state in zip(step.chunks, step.states, strict=True)]
            self._does_not_run(step)
        else:
            assert behind is None or behind.is_sampled
            self._run(step)
            if behind is None and not step.out_of_memory:
                self._sample(step)
        return step

    def collect(self, step: PagedStep) -> StepResult:
        """See ``PendingStep``."""
        assert self._pending.popleft() is step
        if step.out_of_memory:
            return StepResult(out_of_memory=True)
        if step.dies:
            raise Died
        for state, result in zip(step.states, step.results, strict=True):
            state.tokens += [sampled.token for sampled in result.sampled if sampled.is_valid]
        if step.rows:
            self.events.append([self._collected(step, at) for at in range(len(step.rows))])
        if self._pending and not self._pending[0].out_of_memory:
            self._sample(self._pending[0])
        return StepResult(step.results)

    def reset(self) -> None:
        """Drop every pending step and every sequence."""
        self._pending.clear()
        self._states.clear()
        self._not_run.clear()

    def _introduce(self, record: NewSequence) -> None:
        assert record.slot not in self._states, f"slot {record.slot} is in use"
        self._states[record.slot] = State(record.spec, record.spec.prompt_token_ids + record.output_token_ids)
        self._starts[record.spec.request_id] += 1

    def _row(self, chunk: Chunk, state: State) -> Row:
        id = state.spec.request_id
        epoch = self._not_run.get((id, chunk.first), self.epoch)
        return Row(id, chunk.first, chunk.count, chunk.samples, self._starts[id], epoch, len(chunk.drafts))

    def _run(self, step: PagedStep) -> None:
        fault = self.fault
        step.rows = [self._row(chunk, state) for chunk, state in zip(step.chunks, step.states, strict=True)]
        if self._too_large(step, "launch"):
            # Some of it was written before.
            self._write(step, len(step.chunks) // 2, None)
            return
        self.events.append(step.rows)
        self.broken |= bool(fault and fault.kind == "broken")
        kind, place = (fault.kind, fault.place) if fault else ("", 0.0)
        chosen = int(place * len(step.chunks))
        self._write(step, len(step.chunks), chosen if kind == "poison" else None)
        if kind == "dies" and place < 0.5:
            raise Died
        step.dies = kind == "dies"
        for at, (chunk, state) in enumerate(zip(step.chunks, step.states, strict=True)):
            seen = self._read(state, chunk.first + chunk.count)
            is_chosen = at == chosen and chunk.samples
            bad = kind == "all" or self.broken or (kind == "row" and is_chosen) or POISON in seen
            failed = NOT_FINITE if bad and chunk.samples else None
            step.seen.append(seen)
            step.failed.append(NOTHING_LEFT if kind == "nothing" and is_chosen and not bad else failed)

    def _sample(self, step: PagedStep) -> None:
        if self._too_large(step, "sample"):
            self.events = [one for one in self.events if one is not step.rows]
            return
        step.is_sampled = True
        self.sampled = {}
        for at, (chunk, state) in enumerate(zip(step.chunks, step.states, strict=True)):
            seen = step.seen[at]
            result = ChunkResult([], _prompt_logprobs(chunk, state, seen))
            step.results.append(result)
            self._not_run.pop((state.spec.request_id, chunk.first), None)
            if any(math.isnan(one.logprobs[0]) for one in result.prompt_logprobs or ()):
                step.failed[at] = NOT_FINITE
            if not chunk.samples or chunk.first + chunk.count - len(chunk.drafts) != len(state.tokens):
                continue
            failed = step.failed[at]
            result.sampled = [SampledToken(0, math.nan, error=failed)] if failed else _sampled(chunk, state, seen)
            last = result.sampled[-1]
            self.sampled[state] = last.token
            if last.is_valid:
                outputs = state.num_outputs + len(result.sampled)
                known = seen[: len(state.tokens) + len(result.sampled) - 1]
                result.proposed = _proposed(known, last.token, state.spec, outputs, chunk.num_proposed)

    def _probe(self, step: PagedStep) -> None:
        """The engine tests the model; ``silent`` if there is no memory for that."""
        self.silent = self.fault is not None and self.fault.kind == "memory"
        step.out_of_memory = self.silent
        step.is_sampled = True
        if not self.silent:
            self.events.append(None)
            sampled = SampledToken(0, 0.0, error=NOT_FINITE if self.broken else None)
            step.results = [ChunkResult([sampled])]

    def _too_large(self, step: PagedStep, where: str) -> bool:
        """Whether memory runs out in ``where``, "launch" or "sample"; then the step does not run."""
        fault = self.fault
        if not fault or fault.kind != "memory" or where != ("launch" if fault.place * 10 % 1 < 0.6 else "sample"):
            return False
        tokens = sum(chunk.count for chunk in step.chunks)
        if self._limit is None:
            self._limit = int(fault.place * tokens)
        if tokens <= self._limit:
            return False
        self.ran_out = True
        # The first time, memory may have been released.
        if len(step.rows) == 1 and (step.rows[0].id, step.rows[0].first) in self._not_run:
            self.events.append(Refused(step.rows[0]))
        self._does_not_run(step)
        return True

    def _does_not_run(self, step: PagedStep) -> None:
        step.out_of_memory = True
        self._not_run.update({(row.id, row.first): row.epoch for row in step.rows})

    def _write(self, step: PagedStep, count: int, poisoned: int | None) -> None:
        P = self.page_size
        for at, (chunk, state) in enumerate(zip(step.chunks[:count], step.states, strict=False)):
            first, end, tokens, pages = chunk.first, chunk.first + chunk.count, state.tokens, state.pages
            if chunk.drafts:
                tokens = [*tokens, *chunk.drafts]
            elif end > len(tokens):
                # The host does not know its last token yet; the device has it.
                tokens = [*tokens, self.sampled[state]]
            held = START if first == 0 else self.pages[pages[(first - 1) // P]][(first - 1) % P]
            if at == poisoned or (self.poisoned and POISON in self._read(state, first)):
                # Later layers see the whole context.
                held, self.poisoned = POISON, True
            for position in range(first, end):
                held = entry(held, tokens[position], position)
                self.pages[pages[position // P]][position % P] = held

    def _read(self, state: State, end: int) -> list[int]:
        """What the first ``end`` positions hold; a page that is missing reads as the scratch page."""
        P = self.page_size
        pages = state.pages + [0] * (-(-end // P) - len(state.pages))
        seen: list[int] = []
        for page in pages:
            seen += self.pages[page]
        del seen[end:]
        return seen

    def _collected(self, step: PagedStep, at: int) -> Collected:
        row, result, pages = step.rows[at], step.results[at], list(step.states[at].pages)
        resample = any(sampled.resample for sampled in result.sampled)
        skipped = row.samples and not result.sampled
        written = pages[row.first // self.page_size :]
        num_tokens = sum(sampled.is_valid for sampled in result.sampled)
        return Collected(row, step.failed[at], resample, skipped, pages, written, num_tokens=num_tokens)


class PagedStep:
    """A pending step: what it read from the pages, and what is made of it."""

    def __init__(self, executor: PagedExecutor, chunks: list[Chunk], states: list[State]) -> None:
        self.chunks, self.states = chunks, states
        self.out_of_memory = False
        self.is_sampled = False
        self.dies = False
        self.rows: list[Row] = []
        self.seen: list[list[int]] = []
        self.failed: list[str | None] = []
        self.results: list[ChunkResult] = []
        self._executor = executor

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        return self._executor.collect(self)


def _prompt_logprobs(chunk: Chunk, state: State, seen: list[int]) -> list[TokenLogprobs] | None:
    num_prompt = len(state.spec.prompt_token_ids)
    if state.spec.sampling.prompt_logprobs is None or chunk.first >= num_prompt:
        return None
    end = min(chunk.first + chunk.count + 1, num_prompt)
    return [_scored(seen[at - 1], state.tokens[at]) for at in range(chunk.first + 1, end)]


def _sampled(chunk: Chunk, state: State, seen: list[int]) -> list[SampledToken]:
    """The token after what is known, and those after accepted draft tokens."""
    found: list[SampledToken] = []
    for at, draft in enumerate([*chunk.drafts, None]):
        entries = seen[: len(seen) - len(chunk.drafts) + at]
        if unsettled(entries) and not chunk.resamples:
            return found or [SampledToken(0, math.nan, resample=True)]
        found.append(SampledToken(*choice(entries, state.spec, state.num_outputs + at)))
        if found[-1].token != draft:
            break
    return found


def _proposed(entries: list[int], token: int, spec: RequestSpec, outputs: int, count: int) -> list[int]:
    """Tokens after ``entries`` and ``token``, of which one in five is wrong, and with it those behind it."""
    entries, found = list(entries), []
    for _ in range(count):
        entries.append(entry(entries[-1], token, len(entries)))
        token, _ = choice(entries, spec, outputs + len(found))
        if hash((entries[-1], 31)) % 5 == 0:
            token = (token + 1) % VOCAB
        found.append(token)
    return found
