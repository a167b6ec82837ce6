"""GrammarMethods: the part of ``LLM`` that prepares structured outputs and budgets of thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.errors import error
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.vocabulary import Vocabulary
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.thought_budget import ThoughtBudget, ThoughtMarks, check_end, configured_marks


class GrammarMethods:
    """Checks what constrains the text of a request, before it is added to the engine."""

    tokenizer: Tokenizer
    engine: Engine
    _compiler: GrammarCompiler | None = None  # created for the first request with a grammar or a budget
    _thought_marks: ThoughtMarks | None = None

    def _configure_thoughts(self, config: Mapping[str, Any] | None) -> None:
        """Set the marks of thoughts. Raises ``bad_option``."""
        self._thought_marks = configured_marks(config)

    def _check_grammar(self, params: SamplingParams) -> None:
        """Raise ``grammar_not_enforceable`` for an invalid grammar, ``no_tokenizer`` for any without a tokenizer."""
        assert params.grammar is not None
        name = "structured_outputs" if params.guided_decoding is None else "guided_decoding"
        self._grammar_compiler().matcher(self.engine.limits.grammars.apply(params.grammar), param=name)

    def _grammar_compiler(self) -> GrammarCompiler:
        """The compiler of grammars; the engine gets the vocabulary, too. Raises ``no_tokenizer``."""
        if self._compiler is None:
            if not self.tokenizer.has_text:
                raise error("no_tokenizer")
            vocabulary = Vocabulary.of(self.tokenizer)
            limits = self.engine.limits
            self._compiler = GrammarCompiler(vocabulary.resized(limits.vocab_size, limits.eos_token_ids))
            self.engine.set_vocabulary(vocabulary)
        return self._compiler

    def _thought(self, prompt_token_ids: list[int], params: SamplingParams) -> ThoughtBudget:
        """The budget of thoughts behind a prompt. Raises ``unsupported_parameter`` and ``no_tokenizer``."""
        marks, tokenizer = self._thought_marks, self.tokenizer
        assert params.thinking_token_budget is not None
        reason = ""
        if marks is None:
            reason = "reasoning_config with reasoning_start_str and reasoning_end_str has to say what ends a thought"
        elif params.grammar is not None:
            reason = "structured output has no thought before it"
        else:
            self._grammar_compiler()
            end_ids = tokenizer.encode(marks.end, add_special_tokens=False)
            eos_ids = () if params.ignore_eos else self.engine.limits.eos_token_ids
            reason = check_end(marks, b"".join(map(tokenizer.token_bytes, end_ids)), end_ids, eos_ids)
        if marks is None or reason:
            raise error("unsupported_parameter", param="thinking_token_budget", reason=reason)
        prompt = tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        return marks.budget(params.thinking_token_budget, end_ids, is_open=marks.are_open(prompt), anywhere=True)
