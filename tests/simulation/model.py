"""A model of a model, for the simulator: a paged memory, and answers that depend on everything read back from it.

What a position holds is a hash of what the position before holds, of its token and of its number, as keys and values
of a real model depend on the whole context. The next token is a hash of all positions, read through the page table.
So whatever is lost, stale, crossed or at a wrong position changes the answer, and the answer of a request alone is
known from its tokens (``Alone``), without pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aiakq.runtime.messages import RequestSpec, TokenLogprobs
from aiakq.runtime.runner import RunResult, sequence_pages
from aiakq.runtime.sampler import NOT_FINITE, Sampled
from aiakq.runtime.scheduler import Scheduled

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

    kind   "row": a row is not finite. "poison": what a sequence writes is not finite. "all": no row is finite.
           "memory": the step needs too much memory. "dies": the process ends.
    place  in 0 .. 1, which row, or how much.
    """

    kind: str
    place: float


def entry(before: int, token: int, position: int) -> int:
    """What ``position`` holds."""
    return POISON if before == POISON else hash((before, token, position))


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


@dataclass
class Ran:
    """What a call of ``PagedModel.run`` was asked for, and what it did to it.

    rows    (id, first position, count, whether a token is drawn, preemptions so far), in order.
    failed  of rows that were not finite: id -> its pages, and those of them it wrote to.
    """

    rows: list[tuple[str, int, int, bool, int]] = field(default_factory=list)
    failed: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)

    def fail(self, item: Scheduled, page_size: int) -> None:
        """Note that the row of ``item`` is not finite."""
        pages = list(item.sequence.pages)
        self.failed[item.sequence.id] = pages, pages[item.sequence.num_computed // page_size :]


class PagedModel:
    """Stands in for the runner: the same calls, a memory of pages, faults on demand.

    fault  of the next step; ``memory`` faults stay until they are taken away.
    calls  since the last look, which empties the list.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [[EMPTY] * page_size for _ in range(num_pages)]
        self.fault: Fault | None = None
        self.calls: list[Ran] = []
        self.cleared: list[int] = []
        self.limit: int | None = None
        self.poisoned = False

    def run(self, items: list[Scheduled]) -> list[RunResult]:
        """As ``Runner.run``."""
        ran = Ran()
        self.calls.append(ran)
        for item in items:
            drawn = item.completes and item.sequence.spec.max_tokens > 0
            sequence = item.sequence
            ran.rows.append((sequence.id, sequence.num_computed, item.count, drawn, sequence.num_preemptions))
        fault = self.fault
        kind = fault.kind if fault else ""
        if fault and kind == "memory":
            if self.limit is None:
                self.limit = int(fault.place * sum(item.count for item in items))
            if sum(item.count for item in items) > self.limit:
                # Some of it was written before.
                self._write(items[: len(items) // 2], None)
                raise MemoryError
        at = int(fault.place * len(items)) if fault and kind in ("row", "poison") else None
        self._write(items, at if kind == "poison" else None)
        if kind == "dies":
            raise Died
        results = []
        for index, item in enumerate(items):
            sequence, spec = item.sequence, item.sequence.spec
            end = sequence.num_computed + item.count
            seen = self._read(sequence_pages(sequence, -(-end // self.page_size)), end)
            result = RunResult(None, self._prompt_logprobs(item, seen))
            results.append(result)
            if any(math.isnan(one.logprobs[0]) for one in result.prompt_logprobs or ()):
                ran.fail(item, self.page_size)
            if not ran.rows[index][3]:
                continue
            if kind == "all" or index == at or POISON in seen:
                result.sampled = Sampled(0, math.nan, error=NOT_FINITE)
                ran.fail(item, self.page_size)
            else:
                token, logprob = choice(seen, spec, sequence.num_outputs)
                result.sampled = Sampled(token, logprob)
        return results

    def clear(self, pages: list[int]) -> None:
        """As ``Runner.clear``."""
        self.cleared += pages
        for page in pages:
            self.pages[page] = [EMPTY] * self.page_size

    def _write(self, items: list[Scheduled], poisoned: int | None) -> None:
        P = self.page_size
        for index, item in enumerate(items):
            sequence = item.sequence
            first = sequence.num_computed
            tokens, pages = sequence.token_ids, sequence.pages
            held = START if first == 0 else self.pages[pages[(first - 1) // P]][(first - 1) % P]
            if index == poisoned or (
                self.poisoned and POISON in self._read(sequence_pages(sequence, len(pages)), first)
            ):
                # Later layers see the whole context.
                held, self.poisoned = POISON, True
            for at in range(first, first + item.count):
                held = entry(held, tokens[at], at)
                self.pages[pages[at // P]][at % P] = held

    def _read(self, table: list[int], end: int) -> list[int]:
        seen: list[int] = []
        for page in table:
            seen += self.pages[page]
        del seen[end:]
        return seen

    def _prompt_logprobs(self, item: Scheduled, seen: list[int]) -> list[TokenLogprobs] | None:
        sequence = item.sequence
        if sequence.spec.prompt_logprobs is None:
            return None
        first = sequence.num_computed
        end = min(first + item.count + 1, sequence.num_prompt)
        return [_scored(seen[at - 1], sequence.token_ids[at]) for at in range(first + 1, end)]
