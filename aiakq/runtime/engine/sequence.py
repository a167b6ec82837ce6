"""Sequence: one request inside the engine, from waiting to finished. Scheduled: its part of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiakq.runtime.engine.messages import RequestSpec, RequestTimes, TokenLogprobs
from aiakq.runtime.engine.pages import page_hash, root_hash


@dataclass(eq=False)
class Sequence:
    """A request's tokens, its pages, and how far its keys and values are computed.

    token_ids       prompt, then generated tokens, as far as the host knows them.
    num_coming      tokens after them that launched steps bring.
    num_computed    tokens whose keys and values are in ``pages``, or will be when what is launched has run.
    pages           KV pages in order; covers at least num_computed tokens.
    launched        its part of the last step it had one in.
    draws_from_all  whether its tokens are drawn among the whole vocabulary sorted: the sampler's usual candidates
                    were not enough once.
    hashes          of the full pages' tokens, as far as computed by ``page_hashes``.
    order           its place among others: (priority, number of arrival), smallest first.
    """

    spec: RequestSpec
    times: RequestTimes
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    order: tuple[int, int] = (0, 0)
    num_coming: int = 0
    num_computed: int = 0
    launched: Scheduled | None = None
    draws_from_all: bool = False
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_cached: int | None = None
    num_preemptions: int = 0
    prompt_done: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.stop_ids = frozenset(self.spec.stop_token_ids)
        self.eos_ids = frozenset(self.spec.eos_token_ids)

    @property
    def id(self) -> str:
        return self.spec.request_id

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens whose keys and values are not computed yet; the last one's never are."""
        last = self.num_prompt + max(self.spec.max_tokens - 1, 0)
        return min(len(self.token_ids) + self.num_coming, last) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.spec.prompt_logprobs is not None

    def page_hashes(self, page_size: int, count: int) -> list[bytes]:
        """Chained hashes of the first ``count`` full pages; computed once each."""
        while len(self.hashes) < count:
            at = len(self.hashes) * page_size
            parent = self.hashes[-1] if self.hashes else root_hash(self.spec.cache_salt)
            self.hashes.append(page_hash(parent, self.token_ids[at : at + page_size]))
        return self.hashes[:count]

    def reset(self) -> list[int]:
        """Forget everything computed, for a preemption; returns the pages to release."""
        assert self.num_coming == 0, "what is launched writes into the pages"
        pages, self.pages = self.pages, []
        self.num_computed = 0
        self.num_published = 0
        self.num_preemptions += 1
        return pages

    def drop_launched(self) -> None:
        """Let nothing come of what is launched for this sequence."""
        if self.launched is not None:
            self.launched.dropped = True
        self.num_coming = 0

    def draw_again(self) -> None:
        """Run the last token once more, and draw the next among all: the candidates were not enough."""
        self.drop_launched()
        self.num_computed = len(self.token_ids) - 1
        self.draws_from_all = True

    def finish_reason(self, token: int) -> tuple[str | None, int | None]:
        """Whether the sequence ends with ``token`` just appended: (finish_reason, stop_reason)."""
        if self.num_outputs >= self.spec.min_tokens:
            if token in self.eos_ids:
                return "stop", None
            if token in self.stop_ids:
                return "stop", token
        if self.num_outputs >= self.spec.max_tokens:
            return "length", None
        return None, None


@dataclass(eq=False)
class Scheduled:
    """``count`` tokens of ``sequence`` to run in a step, from number ``first`` on.

    completes  whether that reaches its last token, so that the next one can be sampled.
    dropped    whether nobody waits for the result any more.
    """

    sequence: Sequence
    first: int
    count: int
    completes: bool
    dropped: bool = False

    @staticmethod
    def of(sequence: Sequence, count: int) -> Scheduled:
        """The next ``count`` tokens."""
        return Scheduled(sequence, sequence.num_computed, count, count == sequence.num_missing)

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def draws(self) -> bool:
        """Whether a token is sampled."""
        return self.completes and self.sequence.spec.max_tokens > 0
