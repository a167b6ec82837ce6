"""Structured output in an executor: masks from grammars, and ends of thoughts whose budget is used up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.logits_modifier import Modifier
from aiakq.runtime.executor.penalties import OccurredTokens, Penalties
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.models.interface import Model
from aiakq.runtime.protocol.command import PrepareGrammar, UseVocabulary
from aiakq.runtime.protocol.step import GRAMMAR_FAILED
from aiakq.runtime.structured.thought_tracker import SpelledBudget, ThoughtTracker

if TYPE_CHECKING:
    from aiakq.runtime.structured.compiler import GrammarCompiler

#: A difference of logits that leaves no probability for the lower one.
_FAR_AHEAD = 1e4


class StructuredPart:
    """The ``ExecutorPart`` of an executor that samples.

    compiler  of grammars; None until the vocabulary is announced.
    """

    def __init__(self) -> None:
        self.compiler: GrammarCompiler | None = None

    def handlers(self) -> Mapping[type, Callable[[Any], object]]:
        """See ``ExecutorPart``."""
        return {UseVocabulary: self._use_vocabulary, PrepareGrammar: self._prepare}

    def start(self, sequence: SequenceState) -> None:
        """See ``ExecutorPart``."""
        spec, compiler = sequence.spec, self.compiler
        if spec.thought is not None and compiler is not None:
            spelled = SpelledBudget(spec.thought, compiler.vocabulary)
            sequence.modifier = BudgetedModifier(sequence, spelled)
        if spec.grammar is not None:
            if compiler is None:
                sequence.failure = GRAMMAR_FAILED
            else:
                outputs = sequence.token_ids[sequence.num_prompt :]
                sequence.masks = (*sequence.masks, compiler.matcher_or_failed(spec.grammar, outputs))

    def _use_vocabulary(self, command: UseVocabulary) -> None:
        from aiakq.runtime.structured.compiler import GrammarCompiler  # imported late: many engines never need it

        self.compiler = GrammarCompiler(command.vocabulary)

    def _prepare(self, preparation: PrepareGrammar) -> Future[Any] | None:
        return None if self.compiler is None else self.compiler.prepare(preparation.grammar)


def new_part(config: EngineConfig, model: Model, samples: bool) -> StructuredPart | None:
    """Return the part of structured output in an executor; None where nothing is sampled."""
    return StructuredPart() if samples else None


class BudgetedModifier:
    """A modifier that also ends thoughts whose budget is used up: it leaves only the token that has to come next.

    Where the model would end the message, behind a call for example, it may do so.
    """

    def __init__(self, sequence: SequenceState, spelled: SpelledBudget) -> None:
        self._others: Modifier = sequence.modifier
        self.calls_functions, self.is_idle = self._others.calls_functions, False
        self.penalties: Penalties | None = None
        self._spec = sequence.spec
        self._num_prompt = self._num_followed = sequence.num_prompt
        self._token_ids = sequence.token_ids  # to which the outputs of later steps are appended
        self._tracker = ThoughtTracker(spelled)

    def modifies(self, position: int, drafts: list[int]) -> bool:
        """See ``Modifier``."""
        return self._others.modifies(position, drafts) or self._followed(drafts).forced is not None

    def apply(self, logits: Tensor, token_ids: list[int], drafts: list[int]) -> OccurredTokens | None:
        """See ``Modifier``; logits [V]."""
        tracker = self._followed(drafts)
        num_outputs = len(token_ids) + len(drafts) - self._num_prompt
        forced, may_end = tracker.forced, not tracker.is_ending and num_outputs >= self._spec.sampling.min_tokens
        best = int(logits.argmax()) if forced is not None and may_end else None
        penalized = None
        if forced is None or self.calls_functions:
            penalized = self._others.apply(logits, token_ids, drafts)
        if forced is None:
            return penalized
        logits.fill_(float("-inf"))
        logits[forced] = 0.0
        if best in self._spec.eos_token_ids:
            logits[best] = _FAR_AHEAD  # a grammar may forbid it, and leaves the other
        return None

    def _followed(self, drafts: list[int]) -> ThoughtTracker:
        """The tracker behind ``drafts``."""
        tracker = self._tracker
        if tracker.is_done:
            return tracker
        for token in self._token_ids[self._num_followed :]:
            tracker.add(token)
        self._num_followed = len(self._token_ids)
        if drafts:
            tracker = tracker.copy()
            for token in drafts:
                tracker.add(token)
        return tracker
