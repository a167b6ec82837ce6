"""OfflineChecks: what ``LLM`` checks with the tokenizer before the engine gets a request: grammars and thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiakq.errors import error
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.protocol.grammar import not_enforceable
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.thought_budget import ThoughtBudget, check_end, configured_marks
from aiakq.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from aiakq.runtime.structured.compiler import GrammarCompiler

_PARAM = "thinking_token_budget"


class OfflineChecks:
    """Checks of requests.

    engine       engine that gets the requests; set when it is loaded.
    end_failure  why no grammar can be enforced with the end-of-sequence tokens of the model, or "".
    """

    engine: Engine
    end_failure: str = ""

    def __init__(self, tokenizer: Tokenizer, reasoning_config: Mapping[str, object] | None) -> None:
        """Raises ``bad_option`` for a wrong ``reasoning_config``."""
        self._tokenizer = tokenizer
        self._marks = configured_marks(reasoning_config)
        self._compiler: GrammarCompiler | None = None  # created for the first request that needs the vocabulary

    def attach(self, engine: Engine) -> None:
        """Check the requests of ``engine``; sets ``end_failure``."""
        self.engine, tokenizer, ends = engine, self._tokenizer, engine.limits.eos_token_ids
        if engine.limits.generates and tokenizer.has_text and not tokenizer.special_ids.issuperset(ends):
            from aiakq.runtime.structured.vocabulary import end_failure, vocabulary_of

            self.end_failure = end_failure(vocabulary_of(tokenizer), tokenizer, ends)

    def check_grammar(self, params: SamplingParams) -> None:
        """Raise ``grammar_not_enforceable`` for an invalid grammar, ``no_tokenizer`` for any without a tokenizer."""
        assert params.grammar is not None
        name = "structured_outputs" if params.guided_decoding is None else "guided_decoding"
        if self.end_failure:
            raise not_enforceable(name, self.end_failure)
        self._grammar_compiler().matcher(self.engine.limits.grammars.apply(params.grammar), param=name)

    def thought_budget(self, prompt_token_ids: list[int], params: SamplingParams) -> ThoughtBudget | None:
        """Return the budget of thoughts behind a prompt; None without one. Raises ``unsupported_parameter``."""
        if params.thinking_token_budget is None:
            return None
        marks, tokenizer = self._marks, self._tokenizer
        if marks is None:
            reason = "reasoning_config with reasoning_start_str and reasoning_end_str has to say what ends a thought"
            raise error("unsupported_parameter", param=_PARAM, reason=reason)
        if params.grammar is not None:
            reason = "structured output has no thought before it"
            raise error("unsupported_parameter", param=_PARAM, reason=reason)
        self._grammar_compiler()
        end_ids = tokenizer.encode(marks.end, add_special_tokens=False)
        spelled = b"".join(map(tokenizer.token_bytes, end_ids))
        eos_ids = () if params.ignore_eos else self.engine.limits.eos_token_ids
        if reason := check_end(marks, spelled, end_ids, eos_ids):
            raise error("unsupported_parameter", param=_PARAM, reason=reason)
        prompt = tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        return marks.budget(params.thinking_token_budget, end_ids, is_open=marks.are_open(prompt), anywhere=True)

    def _grammar_compiler(self) -> GrammarCompiler:
        """Return the compiler of grammars; the engine gets the vocabulary, too. Raises ``no_tokenizer``."""
        if self._compiler is None:
            if not self._tokenizer.has_text:
                raise error("no_tokenizer")
            from aiakq.runtime.structured.compiler import GrammarCompiler
            from aiakq.runtime.structured.vocabulary import vocabulary_of

            vocabulary = vocabulary_of(self._tokenizer)
            limits = self.engine.limits
            self._compiler = GrammarCompiler(vocabulary.resized(limits.vocab_size, limits.eos_token_ids))
            self.engine.set_vocabulary(vocabulary)
        return self._compiler
