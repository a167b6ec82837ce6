"""GrammarCompiler: from grammars to matchers. The only module that imports llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from aiakq.errors import AiakqError
from aiakq.runtime.structured.grammars import WHITESPACE, Grammar, closed_schema, not_enforceable, references_alone
from aiakq.runtime.structured.matcher import GrammarMatcher
from aiakq.runtime.structured.structural_tags import quoted, tag_grammar
from aiakq.runtime.structured.vocabulary import Vocabulary
from aiakq.runtime.text.tokenizer import is_panic

#: The longest token that llguidance can hold; longer ones are never generated under a grammar.
MAX_TOKEN_BYTES = 1000
#: The cache of compiled grammars: maximum characters of their texts, and maximum number.
CACHE_CHARS, CACHE_GRAMMARS = 4 << 20, 256
#: Maximum items of a parser in one step: a grammar that needs more fails, instead of slowing down others.
STEP_MAX_ITEMS = 1000


class _Tokens:
    """A vocabulary, with the attributes that llguidance reads.

    greedy  splits a text into the longest tokens, from left to right.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    greedy: Callable[[str], list[int]]

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [token if len(token) <= MAX_TOKEN_BYTES else b"" for token in vocabulary.tokens]
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self._split = vocabulary.splitter()

    def __call__(self, text: str) -> list[int]:
        """The tokens of a forced text, split as the model's own tokenizer does."""
        ids = self._split(text)
        whole = b"".join(self.tokens[id] for id in ids if id < len(self.tokens))
        return ids if whole == text.encode() else self.greedy(text)


class GrammarCompiler:
    """Compiles grammars for one vocabulary and caches them (LRU). Thread-safe.

    num_words  32-bit words of a mask.

    Raises ``grammar_not_enforceable`` for a vocabulary that llguidance cannot take.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self.num_words = -(-len(vocabulary.tokens) // 32)
        self._library = llguidance
        self._special_ids = {vocabulary.tokens[id].decode(errors="replace"): id for id in vocabulary.special_ids}
        self._end_ids = vocabulary.eos_ids
        tokens = _Tokens(vocabulary)
        try:
            self._tokenizer = llguidance.LLTokenizer(
                cast(Any, tokens), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_ids
            )
        except BaseException as problem:  # Rust can panic
            if not isinstance(problem, Exception) and not is_panic(problem):
                raise
            reason = f"llguidance does not support its tokenizer: {problem}"
            raise not_enforceable("structured_outputs", reason) from problem
        tokens.greedy = self._tokenizer.greedy_tokenize
        self._limits = llguidance.LLParserLimits(step_max_items=STEP_MAX_ITEMS, verbose_errors=False)
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._preparing: dict[Grammar, Future[None]] = {}

    def prepare(self, grammar: Grammar) -> Future[None] | None:
        """Start compiling ``grammar`` in another thread; None if it is cached. ``matcher`` raises its failure."""
        with self._lock:
            if grammar in self._compiled:
                return None
            if grammar not in self._preparing:
                self._preparing[grammar] = self._thread.submit(self._prepare, grammar)
            return self._preparing[grammar]

    def _prepare(self, grammar: Grammar) -> None:
        try:
            self._keep(grammar, self._compile(grammar, ""))
        except AiakqError:
            pass
        finally:
            with self._lock:
                self._preparing.pop(grammar, None)

    def matcher(
        self, grammar: Grammar, outputs: Sequence[int] = (), param: str = "structured_outputs"
    ) -> GrammarMatcher:
        """A matcher of ``grammar`` after the tokens ``outputs``. Raises ``grammar_not_enforceable``."""
        with self._lock:
            prototype = self._compiled.get(grammar)
            if prototype is not None:
                self._compiled.move_to_end(grammar)
        if prototype is None:
            prototype = self._compile(grammar, param)
            self._keep(grammar, prototype)
        with self._lock:  # a matcher is not used by two threads at the same time
            matcher = GrammarMatcher(prototype.deep_copy(), self.num_words)
        for token in outputs:
            matcher.advance(token)
        return matcher

    def matcher_or_failed(self, grammar: Grammar, outputs: Sequence[int] = ()) -> GrammarMatcher:
        """Like ``matcher``; if the grammar cannot be enforced, a matcher with that failure."""
        try:
            return self.matcher(grammar, outputs)
        except AiakqError as problem:
            failed = GrammarMatcher(None, self.num_words)
            failed.failure = str(problem.fields["reason"])
            return failed

    def _compile(self, grammar: Grammar, param: str) -> Any:
        """A matcher in its initial state, whose first mask was computed: some grammars fail only there."""
        try:
            text = self._as_library(grammar)
            matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            failure = matcher.get_error()
        except AiakqError as problem:
            failure = str(problem.fields["reason"])
        except BaseException as problem:  # Rust can panic
            if not isinstance(problem, Exception) and not is_panic(problem):
                raise
            failure = str(problem) or type(problem).__name__
        if failure:
            raise not_enforceable(param, failure)
        return matcher

    def _keep(self, grammar: Grammar, prototype: Any) -> None:
        with self._lock:
            if grammar not in self._compiled:
                self._chars += len(grammar.text)
            self._compiled[grammar] = prototype
            while self._compiled and (self._chars > CACHE_CHARS or len(self._compiled) > CACHE_GRAMMARS):
                oldest, _ = self._compiled.popitem(last=False)
                self._chars -= len(oldest.text)

    def _as_library(self, grammar: Grammar) -> str:
        """``grammar`` in the language of llguidance."""
        text, make = grammar.text, self._library.LLMatcher
        if grammar.kind == "json":
            return make.grammar_from_json_schema(json_schema(grammar, json.loads(text)))
        if grammar.kind == "regex":
            return make.grammar_from_regex(text)
        if grammar.kind == "choice":
            choices = " | ".join(map(quoted, json.loads(text)))
            return make.grammar_from_lark(f"start: {choices}")
        if grammar.kind == "structural_tag":
            schema_of = partial(json_schema, grammar)
            return tag_grammar(json.loads(text), schema_of, self._special_ids, self._end_ids)
        from llguidance.gbnf_to_lark import any_to_lark

        return make.grammar_from_lark(any_to_lark(text))


def json_schema(grammar: Grammar, schema: Any) -> dict[str, Any]:
    """``schema`` with the options of ``grammar``, which a client cannot set in the schema itself."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    if grammar.whitespace == "":
        options = {**options, "whitespace_pattern": None, "whitespace_flexible": False}
    elif grammar.whitespace is not None:
        options["whitespace_pattern"] = grammar.whitespace
    schema = references_alone(schema)
    if grammar.closed:
        schema = closed_schema(schema)
    return {**schema, "x-guidance": options}
