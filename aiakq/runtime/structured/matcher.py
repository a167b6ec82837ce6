"""GrammarMatcher: which tokens the grammar of one sequence allows next. A row mask of the executor."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from aiakq.runtime.protocol.step import GRAMMAR_FAILED, NOT_FINITE, SampledToken
from aiakq.runtime.structured.compiled import CompiledGrammar
from aiakq.runtime.structured.refusals import reason_of
from aiakq.runtime.text.tokenizer import is_panic

_UNCOUNTED = CompiledGrammar(None)


class GrammarMatcher:
    """The state of a grammar after the tokens of one sequence.

    failure      why the grammar can no longer be enforced, so that the sequence has to fail; None while it can.
    is_finished  whether the text is complete and cannot continue.
    """

    def __init__(self, matcher: Any, num_words: int, compiled: CompiledGrammar | None = None) -> None:
        """compiled: the grammar, which stays in memory."""
        self.failure: str | None = None
        self.num_words = num_words
        self.is_finished = matcher is not None and matcher.is_stopped()
        self._matcher = matcher
        self._compiled = compiled or _UNCOUNTED

    def fill_mask(self, address: int) -> None:
        """Write the bits of the tokens allowed next to ``num_words`` int32 at ``address``; all are 0 after a failure.

        Bit t % 32 of word t // 32 is that of token t.
        """
        if self.failure is None:
            began = time.perf_counter()
            try:
                self._matcher.unsafe_compute_mask_ptr(address, 4 * self.num_words)
            except BaseException as problem:
                self._fail(problem)
            else:
                if self._matcher.is_error():
                    self._fail_in_library()
            self._compiled.count_mask(1e6 * (time.perf_counter() - began))
        if self.failure is not None:
            ctypes.memset(address, 0, 4 * self.num_words)

    def after(self, draft: int) -> GrammarMatcher:
        """A copy of this matcher, advanced by the draft token ``draft``. It has failed if the grammar forbids the token
        or ends with it: no token can be sampled after it.
        """
        ahead = GrammarMatcher(
            None if self.failure is not None else self._matcher.deep_copy(), self.num_words, self._compiled
        )
        ahead.failure = self.failure
        ahead.advance(draft)
        if ahead.is_finished:
            ahead.failure = "the text is complete"
        return ahead

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """Up to ``max_tokens`` tokens of the text that the grammar forces next, split by the tokenizer; none after a
        failure.
        """
        if not max_tokens or self.failure is not None or self.is_finished:
            return []
        try:
            return list(self._matcher.compute_ff_tokens()[:max_tokens])
        except BaseException as problem:
            self._fail(problem)
            return []

    def follow(self, sampled: SampledToken) -> None:
        """Advance by what was sampled; note there if the text is complete with it, or the grammar has failed."""
        if sampled.error == NOT_FINITE:
            return
        if sampled.is_valid:
            self.advance(sampled.token)
            sampled.ends = self.is_finished
        if self.failure is not None:
            sampled.error = GRAMMAR_FAILED

    def advance(self, token: int) -> None:
        """Advance by ``token``. Does nothing after the end of the text."""
        if self.failure is None and not self.is_finished:
            matcher = self._matcher
            try:
                matcher.consume_token(token)
            except BaseException as problem:
                self._fail(problem)
            else:
                # In its error state the library allows end-of-sequence: the text would look complete.
                if matcher.is_error():
                    self._fail_in_library()
                else:
                    self.is_finished = matcher.is_stopped()

    def _fail(self, problem: BaseException) -> None:
        """Record ``problem``, which the library raised; re-raises it unless it is about the grammar."""
        if not isinstance(problem, Exception) and not is_panic(problem):
            raise problem
        self.failure = reason_of(str(problem)) or type(problem).__name__

    def _fail_in_library(self) -> None:
        self.failure = reason_of(self._matcher.get_error()) or "unknown"
