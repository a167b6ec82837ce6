"""A fake executor: it computes the simulated model over a real page table, with faults on demand."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from simulated_model import (
    EMPTY,
    FIRST_ENTRY,
    NAN_ENTRY,
    VOCAB,
    needs_all_candidates,
    next_entry,
    next_token,
    prompt_logprob,
)

from aiakq.runtime.engine.engine import PROBE
from aiakq.runtime.engine.executor import CommandsDone, PendingStep
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import (
    NOT_FINITE,
    NOTHING_LEFT,
    Chunk,
    ChunkResult,
    DecodeResults,
    NewSequence,
    SampledToken,
    StepBatch,
    StepResult,
    TokenLogprobs,
)


class EngineDied(Exception):
    """The process of the engine ended in the middle of a step."""


@dataclass
class Fault:
    """A fault of one step.

    kind      "nan_row": the logits of a row are not finite. "no_tokens": a row's request allows no token. "nan_cache":
              what a sequence writes to its pages is not finite. "nan_step": no row is finite. "broken_model": nor is a
              row of any later step. "out_of_memory": steps of more than some number of tokens do not fit into memory.
              "engine_death": the process of the engine ends.
    position  0 .. 1: which row, how many tokens, or when in the step.
    """

    kind: str
    position: float


@dataclass(frozen=True)
class Row:
    """A sequence's part of a step that runs.

    num_starts  times that the executor was given the sequence.
    epoch       of the prefix cache.
    num_drafts  of ``count`` tokens.
    """

    id: str
    first: int
    count: int
    samples: bool
    num_starts: int
    epoch: int
    num_drafts: int = 0


@dataclass(frozen=True)
class OutOfMemoryRow:
    """A step of one row that did not fit into memory, for the second time."""

    row: Row


@dataclass
class RowResult:
    """The result of a row.

    error          the message, if it failed.
    resamples      whether its token is to be sampled again.
    is_skipped     whether it was not sampled, because the token before it was not valid.
    pages          of the sequence; the row wrote to ``written_pages``.
    num_tokens     that were sampled.
    is_dropped     whether the request had finished before; set by the simulation.
    """

    row: Row
    error: str | None
    resamples: bool
    is_skipped: bool
    pages: list[int]
    written_pages: list[int]
    num_tokens: int = 0
    is_dropped: bool = False


#: What the executor did for the engine: rows that run, results that were collected, a row that does not fit into
#: memory, or None for a probe of the model.
Event = list[Row] | list[RowResult] | OutOfMemoryRow | None


@dataclass(eq=False)
class State:
    """The executor's copy of a sequence."""

    spec: RequestSpec
    tokens: list[int]
    pages: list[int] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.spec.prompt_token_ids)


class PagedExecutor:
    """An executor of the simulated model whose pages hold entries.

    fault              of the next step that is submitted.
    epoch              of the prefix cache; callers advance it with every reset.
    is_broken          whether no logits are finite any more.

    Since ``begin``:

    events               what was done, in order.
    ran_out_of_memory    whether a step did not fit.
    probe_out_of_memory  whether a probe of the model did not fit.
    cleared_pages        pages that were filled with zeros.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [[EMPTY] * page_size for _ in range(num_pages)]
        self.fault: Fault | None = None
        self.epoch = 0
        self.events: list[Event] = []
        self.is_broken = False
        self._has_nan_entries = False
        self.probe_out_of_memory = False
        self.ran_out_of_memory = False
        self._last_sampled: dict[State, int] = {}
        self._limit: int | None = None
        self._states: dict[int, State] = {}
        self._num_starts: Counter[str] = Counter()
        self._pending: deque[PagedStep] = deque()
        #: Epochs in which rows that were cancelled were first submitted, by id and first position.
        self._cancelled: dict[tuple[str, int], int] = {}
        self.cleared_pages: set[int] = set()

    def begin(self, fault: Fault | None) -> None:
        """Begin a step with ``fault``; a shortage of memory lasts while a step that did not fit is pending."""
        if not any(step.out_of_memory for step in self._pending):
            self.fault, self._limit = fault, None
        self.events = []
        self.cleared_pages = set()
        self.ran_out_of_memory = False
        self.probe_out_of_memory = False

    def apply(self, batch: StepBatch) -> PagedStep:
        """Apply the changes of a batch to pages and sequences; return its step, which has not run."""
        for slot in batch.freed_slots:
            del self._states[slot]
        for page in batch.cleared_pages:
            self.pages[page] = [EMPTY] * self.page_size
        self.cleared_pages.update(batch.cleared_pages)
        for record in batch.new_sequences:
            self._introduce(record)
        num_decodes = len(batch.decodes.slots)
        batch = batch.expanded()
        for chunk in batch.chunks:
            self._states[chunk.slot].pages += chunk.new_pages
        return PagedStep(self, batch.chunks, [self._states[chunk.slot] for chunk in batch.chunks], num_decodes)

    def submit(self, batch: StepBatch) -> PendingStep:
        """See ``Executor``."""
        if not batch.num_chunks:
            self.reset()
            return CommandsDone()
        step = self.apply(batch)
        previous = self._pending[-1] if self._pending else None
        self._pending.append(step)
        if step.states[0].spec.request_id == PROBE:
            self._probe(step)
        elif previous is not None and previous.out_of_memory:
            step.rows = [self._row(chunk, state) for chunk, state in zip(step.chunks, step.states, strict=True)]
            self._cancel(step)
        else:
            assert previous is None or previous.is_sampled
            self._run(step)
            if previous is None and not step.out_of_memory:
                self._sample(step)
        return step

    def collect(self, step: PagedStep) -> StepResult:
        """See ``PendingStep``."""
        assert self._pending.popleft() is step
        if step.out_of_memory:
            return StepResult(out_of_memory=True)
        if step.engine_dies:
            raise EngineDied
        for state, result in zip(step.states, step.results, strict=True):
            state.tokens += [sampled.token for sampled in result.sampled if sampled.is_valid]
        if step.rows:
            self.events.append([self._row_result(step, at) for at in range(len(step.rows))])
        if self._pending and not self._pending[0].out_of_memory:
            self._sample(self._pending[0])
        return _with_columns(step.results, step.num_decodes)

    def reset(self) -> None:
        """Drop every pending step and every sequence."""
        self._pending.clear()
        self._states.clear()
        self._cancelled.clear()

    def _introduce(self, record: NewSequence) -> None:
        assert record.slot not in self._states, f"slot {record.slot} is in use"
        self._states[record.slot] = State(record.spec, record.spec.prompt_token_ids + record.output_token_ids)
        self._num_starts[record.spec.request_id] += 1

    def _row(self, chunk: Chunk, state: State) -> Row:
        id = state.spec.request_id
        epoch = self._cancelled.get((id, chunk.first), self.epoch)
        return Row(id, chunk.first, chunk.count, chunk.samples, self._num_starts[id], epoch, len(chunk.drafts))

    def _run(self, step: PagedStep) -> None:
        fault = self.fault
        step.rows = [self._row(chunk, state) for chunk, state in zip(step.chunks, step.states, strict=True)]
        if self._too_large(step, "launch"):
            # Half of it was written before.
            self._write(step, len(step.chunks) // 2, None)
            return
        self.events.append(step.rows)
        self.is_broken |= bool(fault and fault.kind == "broken_model")
        kind, position = (fault.kind, fault.position) if fault else ("", 0.0)
        chosen = int(position * len(step.chunks))
        self._write(step, len(step.chunks), chosen if kind == "nan_cache" else None)
        if kind == "engine_death" and position < 0.5:
            raise EngineDied
        step.engine_dies = kind == "engine_death"
        for at, (chunk, state) in enumerate(zip(step.chunks, step.states, strict=True)):
            entries = self._read(state, chunk.first + chunk.count)
            is_chosen = at == chosen and chunk.samples
            not_finite = self.is_broken or kind == "nan_step" or (kind == "nan_row" and is_chosen)
            not_finite = not_finite or NAN_ENTRY in entries
            error = NOT_FINITE if not_finite and chunk.samples else None
            step.read.append(entries)
            step.errors.append(NOTHING_LEFT if kind == "no_tokens" and is_chosen and not not_finite else error)

    def _sample(self, step: PagedStep) -> None:
        if self._too_large(step, "sample"):
            self.events = [one for one in self.events if one is not step.rows]
            return
        step.is_sampled = True
        self._last_sampled = {}
        for at, (chunk, state) in enumerate(zip(step.chunks, step.states, strict=True)):
            entries = step.read[at]
            result = ChunkResult([], _prompt_logprobs(chunk, state, entries))
            step.results.append(result)
            self._cancelled.pop((state.spec.request_id, chunk.first), None)
            if any(math.isnan(one.logprobs[0]) for one in result.prompt_logprobs or ()):
                step.errors[at] = NOT_FINITE
            if not chunk.samples or chunk.first + chunk.count - len(chunk.drafts) != len(state.tokens):
                continue
            error = step.errors[at]
            result.sampled = [SampledToken(0, math.nan, error=error)] if error else _sampled(chunk, state, entries)
            last = result.sampled[-1]
            self._last_sampled[state] = last.token
            if last.is_valid:
                outputs = state.num_outputs + len(result.sampled)
                known = entries[: len(state.tokens) + len(result.sampled) - 1]
                result.proposed = _proposed(known, last.token, state.spec, outputs, chunk.num_proposed)

    def _probe(self, step: PagedStep) -> None:
        """Run the engine's test of whether the model is finite."""
        self.probe_out_of_memory = self.fault is not None and self.fault.kind == "out_of_memory"
        step.out_of_memory = self.probe_out_of_memory
        step.is_sampled = True
        if not self.probe_out_of_memory:
            self.events.append(None)
            sampled = SampledToken(0, 0.0, error=NOT_FINITE if self.is_broken else None)
            step.results = [ChunkResult([sampled])]

    def _too_large(self, step: PagedStep, where: str) -> bool:
        """Return whether memory runs out in ``where``, "launch" or "sample"; the step is then cancelled."""
        fault = self.fault
        if not fault or fault.kind != "out_of_memory":
            return False
        if where != ("launch" if fault.position * 10 % 1 < 0.6 else "sample"):
            return False
        tokens = sum(chunk.count for chunk in step.chunks)
        if self._limit is None:
            self._limit = int(fault.position * tokens)
        if tokens <= self._limit:
            return False
        self.ran_out_of_memory = True
        # After the first time, the engine releases memory and tries again.
        if len(step.rows) == 1 and (step.rows[0].id, step.rows[0].first) in self._cancelled:
            self.events.append(OutOfMemoryRow(step.rows[0]))
        self._cancel(step)
        return True

    def _cancel(self, step: PagedStep) -> None:
        step.out_of_memory = True
        self._cancelled.update({(row.id, row.first): row.epoch for row in step.rows})

    def _write(self, step: PagedStep, count: int, nan_row: int | None) -> None:
        P = self.page_size
        for at, (chunk, state) in enumerate(zip(step.chunks[:count], step.states, strict=False)):
            first, end, tokens, pages = chunk.first, chunk.first + chunk.count, state.tokens, state.pages
            if chunk.drafts:
                tokens = [*tokens, *chunk.drafts]
            elif end > len(tokens):
                # With async scheduling only the device knows the last token.
                tokens = [*tokens, self._last_sampled[state]]
            entry = FIRST_ENTRY if first == 0 else self.pages[pages[(first - 1) // P]][(first - 1) % P]
            if at == nan_row or (self._has_nan_entries and NAN_ENTRY in self._read(state, first)):
                # In a real model, attention spreads it to all later positions.
                entry, self._has_nan_entries = NAN_ENTRY, True
            for position in range(first, end):
                entry = next_entry(entry, tokens[position], position)
                self.pages[pages[position // P]][position % P] = entry

    def _read(self, state: State, end: int) -> list[int]:
        """Return the entries of the first ``end`` positions; those of missing pages are read from the scratch page."""
        P = self.page_size
        pages = state.pages + [0] * (-(-end // P) - len(state.pages))
        entries: list[int] = []
        for page in pages:
            entries += self.pages[page]
        del entries[end:]
        return entries

    def _row_result(self, step: PagedStep, at: int) -> RowResult:
        row, result, pages = step.rows[at], step.results[at], list(step.states[at].pages)
        return RowResult(
            row,
            step.errors[at],
            resamples=any(sampled.resample for sampled in result.sampled),
            is_skipped=row.samples and not result.sampled,
            pages=pages,
            written_pages=pages[row.first // self.page_size :],
            num_tokens=sum(sampled.is_valid for sampled in result.sampled),
        )


class PagedStep:
    """A pending step, with the entries that its rows read and their results."""

    def __init__(self, executor: PagedExecutor, chunks: list[Chunk], states: list[State], num_decodes: int = 0) -> None:
        """num_decodes: how many of ``chunks`` were columns, as their results are."""
        self.chunks, self.states, self.num_decodes = chunks, states, num_decodes
        self.out_of_memory = False
        self.is_sampled = False
        self.engine_dies = False
        self.rows: list[Row] = []
        self.read: list[list[int]] = []
        self.errors: list[str | None] = []
        self.results: list[ChunkResult] = []
        self._executor = executor

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        return self._executor.collect(self)


def _with_columns(results: list[ChunkResult], num_decodes: int) -> StepResult:
    """The results of a step, those of its decodes in columns."""
    if not num_decodes:
        return StepResult(results)
    decodes = DecodeResults([], [])
    for row, result in enumerate(results[:num_decodes]):
        first = result.sampled[0] if result.sampled else SampledToken(0, 0.0, resample=True)
        decodes.tokens.append(first.token)
        decodes.logprobs.append(first.logprob)
        if not first.is_valid or first.ends:
            decodes.others[row] = result
        elif first.logprobs is not None:
            decodes.top = decodes.top or [None] * num_decodes
            decodes.top[row] = first.logprobs
    return StepResult(results[num_decodes:], decodes=decodes)


def _prompt_logprobs(chunk: Chunk, state: State, entries: list[int]) -> list[TokenLogprobs] | None:
    num_prompt = len(state.spec.prompt_token_ids)
    if state.spec.sampling.prompt_logprobs is None or chunk.first >= num_prompt:
        return None
    end = min(chunk.first + chunk.count + 1, num_prompt)
    return [prompt_logprob(entries[at - 1], state.tokens[at]) for at in range(chunk.first + 1, end)]


def _sampled(chunk: Chunk, state: State, entries: list[int]) -> list[SampledToken]:
    """Return the accepted draft tokens and the token after them."""
    sampled: list[SampledToken] = []
    for at, draft in enumerate([*chunk.drafts, None]):
        known = entries[: len(entries) - len(chunk.drafts) + at]
        if needs_all_candidates(known) and not chunk.resamples:
            return sampled or [SampledToken(0, math.nan, resample=True)]
        sampled.append(SampledToken(*next_token(known, state.spec, state.num_outputs + at)))
        if sampled[-1].token != draft:
            break
    return sampled


def _proposed(entries: list[int], token: int, spec: RequestSpec, num_outputs: int, count: int) -> list[int]:
    """Return ``count`` draft tokens after ``token``; one in five is wrong, and with it all that follow."""
    entries, drafts = list(entries), []
    for _ in range(count):
        entries.append(next_entry(entries[-1], token, len(entries)))
        token, _ = next_token(entries, spec, num_outputs + len(drafts))
        if hash((entries[-1], 31)) % 5 == 0:
            token = (token + 1) % VOCAB
        drafts.append(token)
    return drafts
