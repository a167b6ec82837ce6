"""GrammarCompiler: from grammars to matchers. The only module that imports llguidance."""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

import msgspec

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import WHITESPACE, Grammar, not_enforceable
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiled import CompiledGrammar, CompiledGrammars
from aiakq.runtime.structured.formats import text_before
from aiakq.runtime.structured.matcher import GrammarMatcher
from aiakq.runtime.structured.refusals import reason_of, refused_pattern
from aiakq.runtime.structured.structural_tags import choice_rules, tag_grammar
from aiakq.runtime.structured.thought_end import MarkedThought, ThoughtMatcher, calls_at_end
from aiakq.runtime.structured.vocabulary import splitter
from aiakq.runtime.text.tokenizer import is_panic
from aiakq.system.fair_queue import FairQueue

#: The longest token that llguidance can hold; longer ones are never generated under a grammar.
MAX_TOKEN_BYTES = 1000
#: Maximum items of a parser in one step: a grammar that needs more fails, instead of slowing down others.
STEP_MAX_ITEMS = 1000
#: Maximum states that a grammar adds while it is used, of about a kilobyte each.
MAX_LEXER_STATES = 1 << 15
#: Maximum number of characters of a schema whose first mask is enough of a test, and what it must not contain; and
#: maximum numbers of characters and of objects without alternatives.
_MAX_PLAIN, _MAX_PLAIN_SINGLE, _MAX_PLAIN_OBJECTS = 512, 8192, 48
_NOT_PLAIN = re.compile(r'"(?:pattern|depend|m(?:in|ax)[LIP]|mult|prefix|(?:one|all)Of"|(?:if|not)"|\$)')
#: Seconds after which a grammar that waits for memory is tried again: requests end without a notice.
_RETRY_SECONDS = 0.1


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
        self._ends = frozenset(vocabulary.eos_ids)
        self._split = splitter(vocabulary)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a forced text, split as the model's own tokenizer does."""
        ids = self._split(text)
        whole = b"".join(self.tokens[id] for id in ids if id < len(self.tokens))
        # An end-of-sequence token that is text for the tokenizer would end the text.
        return ids if whole == text.encode() and self._ends.isdisjoint(ids) else self.greedy(text)


class GrammarCompiler:
    """Compiles grammars for one vocabulary, for clients in turn, and keeps those used last. Thread-safe.

    vocabulary  what it was created for.
    num_words   32-bit words of a mask.
    compiled    the grammars in memory.

    Raises ``grammar_not_enforceable`` for a vocabulary that llguidance cannot take.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self.vocabulary = vocabulary
        self.num_words = -(-len(vocabulary.tokens) // 32)
        self._library = llguidance
        self._special_ids = {vocabulary.tokens[id].decode(errors="replace"): id for id in vocabulary.special_ids}
        self._end_ids = vocabulary.eos_ids
        self._tokens = vocabulary.tokens
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
        self._limits = llguidance.LLParserLimits(
            step_max_items=STEP_MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        self.compiled = CompiledGrammars()
        self._lock = threading.RLock()
        # Grammars may be released while any lock is held, also one of a thread pool.
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._queue: FairQueue[Grammar] = FairQueue()
        self._waiting: dict[Grammar, list[Future[CompiledGrammar | None]]] = {}
        self.compiled.on_release = partial(self._wake.put, True)

    def prepare(self, grammar: Grammar) -> Future[CompiledGrammar | None]:
        """Compile ``grammar`` in another thread when it is its client's turn, and when there is room for it.

        The result keeps it in memory; it is None if it cannot be enforced, which ``matcher`` raises. A job is dropped
        when all its futures are cancelled.
        """
        future: Future[CompiledGrammar | None] = Future()
        with self._lock:
            compiled = self.compiled.get(grammar)
            if compiled is not None:
                future.set_result(compiled)
                return future
            self._waiting.setdefault(grammar, []).append(future)
            self._queue.put(grammar.client, grammar)
            if self._thread is None:
                work = (weakref.ref(self), self._wake)
                self._thread = threading.Thread(target=_compile_all, args=work, name="grammars", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._wake.put, False).atexit = False
        self._wake.put(True)
        return future

    @property
    def has_waiting(self) -> bool:
        """Whether a grammar waits to be compiled."""
        return len(self._queue) > 0

    def compile_next(self) -> bool:
        """Compile the next grammar in the queue; return whether there was one that could be."""
        with self._lock:
            self._queue.discard(self._is_unwanted)
            turn = self._queue.pop(self.compiled.has_room)
            if turn is None:
                return False
            client, grammar = turn
            waiting = self._waiting.pop(grammar, [])
            futures = [future for future in waiting if future.set_running_or_notify_cancel()]
            compiled = self.compiled.get(grammar)
        if not futures:
            return True
        began = time.thread_time()
        if compiled is None:
            failure, prototype = self.try_compile(grammar)
            compiled = None if failure else self.compiled.add(grammar, prototype)
        with self._lock:
            self._queue.charge(client, time.thread_time() - began)
        for future in futures:
            future.set_result(compiled)
        return True

    def _is_unwanted(self, grammar: Grammar) -> bool:
        waiting = self._waiting.get(grammar, [])
        if all(future.cancelled() for future in waiting):
            self._waiting.pop(grammar, None)
            return True
        return False

    def matcher(
        self, grammar: Grammar, outputs: Sequence[int] = (), param: str = "structured_outputs"
    ) -> GrammarMatcher:
        """A matcher of ``grammar`` after the tokens ``outputs``. Raises ``grammar_not_enforceable``."""
        compiled = self.compiled.get(grammar)
        if compiled is None:
            failure, prototype = self.try_compile(grammar)
            if failure:
                raise not_enforceable(param, failure)
            compiled = self.compiled.add(grammar, prototype)
        with self._lock:  # a matcher is not used by two threads at the same time
            matcher = GrammarMatcher(compiled.prototype.deep_copy(), self.num_words, compiled)
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

    def try_compile(self, grammar: Grammar) -> tuple[str, Any]:
        """Compile ``grammar``: why it cannot be enforced, and a matcher in its initial state.

        The first masks are computed, because some grammars fail only there.
        """
        matcher = None
        try:
            text = self._as_library(grammar)
            matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
            failure = matcher.get_error() or self._probe(matcher, only_first=_is_plain(grammar))
            if not failure and grammar.kind == "structural_tag":
                matcher = self._with_thought_end(matcher, grammar)
        except AiakqError as problem:
            failure = str(problem.fields["reason"])
        except BaseException as problem:  # Rust can panic
            if not isinstance(problem, Exception) and not is_panic(problem):
                raise
            failure = str(problem) or type(problem).__name__
        return (self._reason(failure, grammar) if failure else ""), matcher

    def _reason(self, failure: str, grammar: Grammar) -> str:
        """``failure`` in one line, with the pattern in a JSON schema that is the cause."""
        if "regex" not in failure or grammar.kind not in ("json", "structural_tag"):
            return reason_of(failure)
        make = self._library.LLMatcher

        def failure_of(pattern: str) -> str:
            return str(make.validate_grammar(make.grammar_from_regex(pattern), limits=self._limits))

        return refused_pattern(schemas_in(grammar), failure_of) or reason_of(failure)

    def _with_thought_end(self, matcher: object, grammar: Grammar) -> Any:
        """``matcher``, which also lets the thought of ``grammar`` end with a call if it may."""
        if '"may_end_with_call": true' not in grammar.text:
            return matcher
        tags = json.loads(grammar.text)
        calls = calls_at_end(tags)
        if calls is None:
            return matcher
        schema_of = partial(json_schema, grammar)
        text = tag_grammar({"format": text_before(calls)}, schema_of, self._special_ids, self._end_ids)
        finder = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if finder.is_error():
            return matcher
        part = tags["format"]
        starts, ends = ([mark.encode() for mark in part[key]] for key in ("starts", "ends"))
        marks = MarkedThought(starts, ends, bool(part["is_open"]), self._tokens, self._end_ids)
        return ThoughtMatcher(matcher, finder, marks)

    def _probe(self, matcher: Any, only_first: bool = False) -> str:
        """The failure of the first mask, or of the one after a token that it allows; empty if there is none."""
        mask = matcher.compute_bitmask()
        if only_first or matcher.is_error() or matcher.is_stopped():  # the latter is slow
            return str(matcher.get_error())
        copy = matcher.deep_copy()
        if copy.consume_token(_first_token(mask)) and not copy.is_stopped():
            copy.compute_bitmask()
        return str(copy.get_error())

    def _as_library(self, grammar: Grammar) -> str:
        """``grammar`` in the language of llguidance."""
        text, make = grammar.text, self._library.LLMatcher
        if grammar.kind == "json":
            return make.grammar_from_json_schema(_written(json_schema(grammar, _read(text))))
        if grammar.kind == "regex":
            return make.grammar_from_regex(text)
        if grammar.kind == "choice":
            return make.grammar_from_lark("\n".join(choice_rules("start", json.loads(text))))
        if grammar.kind == "structural_tag":
            schema_of = partial(json_schema, grammar)
            return tag_grammar(json.loads(text), schema_of, self._special_ids, self._end_ids)
        from llguidance.gbnf_to_lark import any_to_lark

        return make.grammar_from_lark(any_to_lark(text))


def _read(text: str) -> object:
    """The value of JSON, in which numbers may be infinite."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return json.loads(text)


def _written(schema: dict[str, object]) -> str:
    """``schema``, which is clean and so has finite numbers only, as JSON."""
    return msgspec.json.encode(schema).decode()


def _is_plain(grammar: Grammar) -> bool:
    """Whether ``grammar`` is a small schema of plain keywords, whose later masks are within all limits."""
    return (
        grammar.kind == "json"
        and (len(grammar.text) <= _MAX_PLAIN or _is_single(grammar.text))
        and "\\" not in grammar.text
        and not _NOT_PLAIN.search(grammar.text)
    )


def _is_single(text: str) -> bool:
    return len(text) <= _MAX_PLAIN_SINGLE and text.count("{") <= _MAX_PLAIN_OBJECTS and '"anyOf"' not in text


def schemas_in(grammar: Grammar) -> list[object]:
    """The JSON schemas in ``grammar``: a schema, or a structural tag."""
    root = json.loads(grammar.text)
    if grammar.kind == "json":
        return [root]
    found: list[object] = []
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, dict) and value.get("type") == "json_schema":
            found.append(value.get("json_schema"))
        elif isinstance(value, (dict, list)):
            pending += reversed(list(value.values()) if isinstance(value, dict) else value)
    return found


def json_schema(grammar: Grammar, schema: object) -> dict[str, object]:
    """``schema`` with the options of ``grammar``, which a client cannot set in the schema itself."""
    options: dict[str, object] = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    if grammar.whitespace == "":
        options = {**options, "whitespace_pattern": None, "whitespace_flexible": False}
    elif grammar.whitespace is not None:
        options["whitespace_pattern"] = grammar.whitespace
    from aiakq.runtime.structured.schemas import clean_schema  # a third of this package, which most engines never need

    cleaned, _ = clean_schema(schema, closed=grammar.closed)
    return {**cleaned, "x-guidance": options}


def _compile_all(compiler: weakref.ref[GrammarCompiler], wake: SimpleQueue[bool]) -> None:
    """Compile what is waiting whenever ``wake`` says True, until it says False; retry what waits for memory."""
    goes_on = True
    while goes_on:
        is_waiting = False
        while (alive := compiler()) is not None and alive.compile_next():
            del alive
        if alive is not None:
            is_waiting = alive.has_waiting
        del alive
        try:
            goes_on = wake.get(timeout=_RETRY_SECONDS if is_waiting else None)
        except Empty:
            pass


def _first_token(mask: bytes) -> int:
    """The first token in a mask, which has one."""
    at = next(at for at, byte in enumerate(mask) if byte)
    return 8 * at + (mask[at] & -mask[at]).bit_length() - 1
