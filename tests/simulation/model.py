"""A model of a model, for the simulator: a paged memory, and answers that depend on everything read back from it.

What a position holds is a hash of what the position before holds, of its token and of its number, as keys and values
of a real model depend on the whole context. The next token is a hash of all positions, read through the page table.
So whatever is lost, stale, crossed or at a wrong position changes the answer, and the answer of a request alone is
known from its tokens (``Alone``), without pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aiakq.runtime.engine.engine import PROBE
from aiakq.runtime.engine.messages import NOTHING_LEFT, RequestSpec, TokenLogprobs
from aiakq.runtime.engine.sequence import Scheduled, Sequence
from aiakq.runtime.executor.runner import RunResult, sequence_pages
from aiakq.runtime.executor.sampler import NOT_FINITE, Sampled

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
    if outputs < spec.min_tokens and (token in spec.stop_token_ids or token in spec.eos_token_ids):
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
        if self.outputs >= spec.min_tokens:
            if token in spec.eos_token_ids:
                return token, logprob, "stop", None
            if token in spec.stop_token_ids:
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
    """A sequence's part of a launch."""

    id: str
    first: int
    count: int
    draws: bool
    preemptions: int
    epoch: int


@dataclass(frozen=True)
class Landed:
    """What became of a row: whether it ``failed``, with which words. written: the pages it wrote to, of ``pages``."""

    row: Row
    dropped: bool
    failed: str | None
    again: bool
    pages: list[int]
    written: list[int]


#: What the engine asked the model for and got, in order: rows to launch, rows of which it takes the results; or, with
#: None, whether anything is finite.
Event = list[Row] | list[Landed] | None


class PagedModel:
    """Stands in for the runner: the same calls, a memory of pages, faults on demand.

    fault    of what is launched next.
    epoch    a number of the caller, to know rows by.
    asked    rows of the first launch since ``begin``, whether or not they fitted into memory.
    events   since ``begin``.
    refused  ids of rows that did not fit into memory alone.
    broken   whether nothing is finite any more.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [[EMPTY] * page_size for _ in range(num_pages)]
        self.fault: Fault | None = None
        self.epoch = 0
        self.asked: list[Row] = []
        self.events: list[Event] = []
        self.refused: set[str] = set()
        self.broken = False
        self.poisoned = False
        self.sampled: dict[Sequence, int] = {}

    def begin(self, fault: Fault | None) -> None:
        """A step begins in which ``fault`` happens."""
        self.fault = fault
        self.asked, self.events, self.refused = [], [], set()
        self._limit: int | None = None
        self._ran_out = False
        self.silent = False

    def launch(self, items: list[Scheduled]) -> PagedFlight:
        """As ``Runner.launch``."""
        if items[0].sequence.id == PROBE:
            return self.probe(items[0])
        fault, epoch = self.fault, self.epoch
        rows = {
            item: Row(item.sequence.id, item.first, item.count, item.draws, item.sequence.num_preemptions, epoch)
            for item in items
        }
        self.asked = self.asked or list(rows.values())
        if self._too_large(items, "launch"):
            # Some of it was written before.
            self._write(items[: len(items) // 2], None)
            raise MemoryError
        launched = list(rows.values())
        self.events.append(launched)
        self.broken |= bool(fault and fault.kind == "broken")
        kind, place = (fault.kind, fault.place) if fault else ("", 0.0)
        at = int(place * len(items))
        self._write(items, items[at] if kind == "poison" else None)
        if kind == "dies" and place < 0.5:
            raise Died
        flight = PagedFlight(self, rows, launched, kind == "dies")
        for item in items:
            seen = self._read(sequence_pages(item.sequence, -(-item.end // self.page_size)), item.end)
            flight.seen[item] = seen
            chosen = item is items[at] and item.draws
            bad = kind == "all" or self.broken or (kind == "row" and chosen) or POISON in seen
            flight.failed[item] = NOT_FINITE if bad and item.draws else None
            if kind == "nothing" and chosen and not bad:
                flight.failed[item] = NOTHING_LEFT
        return flight

    def probe(self, item: Scheduled) -> PagedFlight:
        """The engine asks itself something; ``silent`` if there is no memory for that."""
        self.silent = self.fault is not None and self.fault.kind == "memory"
        if self.silent:
            raise MemoryError
        self.events.append(None)
        flight = PagedFlight(self, {}, [], False)
        flight.seen[item], flight.failed[item] = [START], NOT_FINITE if self.broken else None
        return flight

    def _too_large(self, items: list[Scheduled], where: str) -> bool:
        """Whether memory runs out in ``where``, "launch" or "sample"."""
        fault = self.fault
        if not fault or fault.kind != "memory" or where != ("launch" if fault.place * 10 % 1 < 0.6 else "sample"):
            return False
        tokens = sum(item.count for item in items)
        if self._limit is None:
            self._limit = int(fault.place * tokens)
        if tokens <= self._limit:
            return False
        # The first time, memory may be given back.
        if self._ran_out and len(items) == 1:
            self.refused.add(items[0].sequence.id)
        self._ran_out = True
        return True

    def clear(self, pages: list[int]) -> None:
        """As ``Runner.clear``."""
        for page in pages:
            self.pages[page] = [EMPTY] * self.page_size

    def release_memory(self) -> None:
        """As ``Runner.release_memory``: there is nothing to release."""

    def _write(self, items: list[Scheduled], poisoned: Scheduled | None) -> None:
        P = self.page_size
        for item in items:
            sequence, first = item.sequence, item.first
            tokens, pages = sequence.token_ids, sequence.pages
            if item.end > len(tokens):
                # The host does not know its last token yet; the device has it.
                tokens = [*tokens, self.sampled[sequence]]
            held = START if first == 0 else self.pages[pages[(first - 1) // P]][(first - 1) % P]
            if item is poisoned or (self.poisoned and POISON in self._read(pages, first)):
                # Later layers see the whole context.
                held, self.poisoned = POISON, True
            for at in range(first, item.end):
                held = entry(held, tokens[at], at)
                self.pages[pages[at // P]][at % P] = held

    def _read(self, table: list[int], end: int) -> list[int]:
        seen: list[int] = []
        for page in table:
            seen += self.pages[page]
        del seen[end:]
        return seen


class PagedFlight:
    """As ``Flight``: what a step read from the pages, and what is made of it."""

    def __init__(self, model: PagedModel, rows: dict[Scheduled, Row], launched: list[Row], dies: bool):
        self.items: list[Scheduled] = []
        self.seen: dict[Scheduled, list[int]] = {}
        self.failed: dict[Scheduled, str | None] = {}
        self._model = model
        self._rows, self._launched = rows, launched
        self._dies = dies
        self._results: list[RunResult] = []

    def sample(self, items: list[Scheduled]) -> bool:
        """As ``Flight.sample``."""
        if items[0].sequence.id != PROBE and self._model._too_large(items, "sample"):
            self._model.events = [one for one in self._model.events if one is not self._launched]
            raise MemoryError
        self.items = items
        self._model.sampled = {}
        for item in items:
            sequence, seen = item.sequence, self.seen[item]
            result = RunResult(None, self._prompt_logprobs(item, seen))
            self._results.append(result)
            if any(math.isnan(one.logprobs[0]) for one in result.prompt_logprobs or ()):
                self.failed[item] = NOT_FINITE
            if not item.draws:
                continue
            if self.failed[item]:
                result.sampled = Sampled(0, math.nan, error=self.failed[item])
            elif unsettled(seen) and not sequence.draws_from_all:
                result.sampled = Sampled(0, math.nan, again=True)
            else:
                result.sampled = Sampled(*choice(seen, sequence.spec, sequence.num_outputs))
            self._model.sampled[sequence] = result.sampled.token
        return True

    def results(self) -> list[RunResult]:
        """As ``Flight.results``."""
        if self._dies:
            raise Died
        if self.items[0].sequence.id != PROBE:
            self._model.events.append([self._landed(*one) for one in zip(self.items, self._results, strict=True)])
        return self._results

    def _landed(self, item: Scheduled, result: RunResult) -> Landed:
        pages = list(item.sequence.pages)
        again = bool(result.sampled and result.sampled.again)
        written = pages[item.first // self._model.page_size :]
        return Landed(self._rows[item], item.dropped, self.failed[item], again, pages, written)

    def _prompt_logprobs(self, item: Scheduled, seen: list[int]) -> list[TokenLogprobs] | None:
        sequence = item.sequence
        if sequence.spec.prompt_logprobs is None:
            return None
        end = min(item.end + 1, sequence.num_prompt)
        return [_scored(seen[at - 1], sequence.token_ids[at]) for at in range(item.first + 1, end)]
