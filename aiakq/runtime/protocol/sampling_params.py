"""SamplingParams: how the tokens of a request are sampled. Names and defaults follow vLLM. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from aiakq.constraints import Constraint, declarations
from aiakq.constraints import declare as _param
from aiakq.errors import error
from aiakq.runtime.protocol.extra_args import EXTRA_NAME, MAX_EXTRA_ARGS, checked_extra_args
from aiakq.runtime.protocol.grammar import Grammar, grammar_of
from aiakq.runtime.protocol.parameter import Checks, Parameter
from aiakq.runtime.protocol.repetition import REPETITION_FIELDS, checked_repetition
from aiakq.runtime.protocol.token_bias import MAX_LOGIT_BIAS, TOKEN_KEY, Bias, checked_bias
from aiakq.runtime.protocol.unicode_text import well_formed

#: Temperatures below this are greedy, since dividing logits by them would overflow (see docs/serving.md).
GREEDY_BELOW = 1e-5

#: Called with (output ids, logits [V]) or (prompt ids, output ids, logits [V]); returns logits.
LogitsProcessor = Callable[..., Any]

#: Maximum number of stop strings, of stop token ids, and of ids whose log-probabilities are returned per position.
MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_LOGPROB_TOKEN_IDS = 16, 128, 128
MAX_STOP_CHARS, MAX_BAD_WORDS = 256, 128

_TOKEN_ID = Constraint(type=int, words="a token id", limited_by="token_id")
_STOP = Constraint(type=str, least=1, most=MAX_STOP_CHARS, expected=f"strings of 1 to {MAX_STOP_CHARS} characters")
_WORD = replace(_STOP, pattern=r"\S", expected=f"words of 1 to {MAX_STOP_CHARS} characters")
_PENALTY: dict[str, Any] = {"low": -2.0, "high": 2.0, "expected": "-2 to 2"}
_WHOLE = "0 or more, or -1 for the whole vocabulary"
_LOGPROBS: dict[str, Any] = {"low": -1, "expected": _WHOLE, "limited_by": "logprobs"}
_NUMBER: dict[str, Any] = {"low": 1, "expected": "1 or more", "http_maximum": 128}


def _count(default: int | None, help: str, low: int = 0, expected: str = "0 or more", **settings: Any) -> Any:
    return _param(default, help, low=low, high=2**31, expected=expected, **settings)


def _switch(default: bool, help: str, **settings: Any) -> Any:
    """Numbers that equal True or False are accepted, as those of numpy."""
    return _param(default, help, also=(object,), choices=(True, False), words="a boolean", **settings)


def _list(help: str, words: str, **settings: Any) -> Any:
    return _param(None, help, also=(tuple,), words=words, **settings)


def _token_ids(help: str, **settings: Any) -> Any:
    return _list(help, "a list of token ids", entries=_TOKEN_ID, noun="ids", **settings)


@dataclass
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names, defaults and semantics.

    The fields are the single declaration of these parameters: their validation, the fields of HTTP requests, the
    OpenAPI document and docs/routes.md are derived from them.
    """

    n: int = _count(1, "Sequences returned for the prompt.", **_NUMBER)
    best_of: int | None = _count(
        None, "Sequences generated, of which the n with the highest cumulative log-probability are returned.", **_NUMBER
    )
    presence_penalty: float = _param(
        0.0, "Subtracted once from the logit of every token already generated.", **_PENALTY
    )
    frequency_penalty: float = _param(
        0.0, "Subtracted from the logit of a token for each time it was generated.", **_PENALTY
    )
    repetition_penalty: float = _param(
        1.0,
        "Divides the logits of tokens in the prompt and the output; multiplies negative ones.",
        above=0.0,
        high=10_000,
        expected="above 0",
    )
    temperature: float = _param(1.0, "0 is greedy.", low=0.0, high=10_000, expected="0 or more")
    top_p: float = _param(
        1.0,
        "Keep the smallest set of tokens whose probability reaches this.",
        above=0.0,
        high=1.0,
        expected="above 0, at most 1",
    )
    top_k: int = _count(0, "Keep this many of the most likely tokens.", -1, "-1 or 0 (off), or 1 and more")
    min_p: float = _param(
        0.0,
        "Keep tokens whose probability is at least this fraction of the highest.",
        low=0.0,
        high=1.0,
        expected="0 to 1",
    )
    seed: int | None = _param(
        None,
        "Makes the output reproducible, whatever else is in the batch. Random if not given, or -1.",
        low=-(2**63),
        high=2**63 - 1,
        expected="a 64-bit integer",
    )
    stop: str | list[str] | None = _param(
        None,
        "Strings that end the text. They are only returned with include_stop_str_in_output.",
        also=(list, tuple),
        words="a string or a list of strings",
        entries=_STOP,
        most=MAX_STOP_STRINGS,
        noun="strings",
    )
    stop_token_ids: list[int] | None = _token_ids("Token ids that end the text.", most=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = _switch(False, "Return the stop string that ended the text.")
    ignore_eos: bool = _switch(False, "Continue past the model's end-of-sequence token.")
    max_tokens: int | None = _count(
        16,
        "Tokens to generate at most. None: up to the end of the context. 0: only score the prompt.",
        limited_by="max_tokens",
    )
    min_tokens: int = _count(0, "Tokens to generate before the text may end.")
    logprobs: int | None = _count(
        None, "Return this many of the most likely tokens per position, beside the chosen one.", **_LOGPROBS
    )
    prompt_logprobs: int | None = _count(
        None, "Return this many of the most likely tokens per position of the prompt; the first has none.", **_LOGPROBS
    )
    detokenize: bool = _switch(True, "Whether to generate text, not only token ids.", only_local=True)
    skip_special_tokens: bool = _switch(True, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = _switch(
        True, "Put spaces between special tokens; only for tokenizers written in Python."
    )
    logit_bias: dict[int, Bias] | None = _param(
        None,
        "Token id -> value added to its logit, clamped to -100..100, or false to exclude it; also a list of pairs.",
        most=MAX_LOGIT_BIAS,
        names=Constraint(type=str, pattern=TOKEN_KEY.pattern),
    )
    allowed_token_ids: list[int] | None = _token_ids(
        "Only these token ids may be generated.", least=1, expected="at least one id"
    )
    bad_words: list[str] | None = _list(
        "Texts that may not be generated, at the beginning or after a space.",
        "a list of strings",
        entries=_WORD,
        most=MAX_BAD_WORDS,
        noun="words",
    )
    logits_processors: list[LogitsProcessor] | None = _list(
        "Functions over the logits, see ``LogitsProcessor``; applied first.", "a list of functions", only_local=True
    )
    truncate_prompt_tokens: int | None = _count(
        None,
        "Keep this many tokens of the prompt, at most the context; -1: as many as leave room for max_tokens.",
        -1,
        "1 or more, or -1 for what fits",
        excluded=(0,),
    )
    truncation_side: str | None = _param(
        None,
        "Which side truncate_prompt_tokens cuts: left keeps the end of the prompt, right its beginning.",
        choices=("left", "right"),
        expected="left or right",
    )
    logprob_token_ids: list[int] | None = _token_ids(
        "Return the log-probabilities of these token ids per position, instead of the most likely ones.",
        least=1,
        most=MAX_LOGPROB_TOKEN_IDS,
    )
    repetition_detection: dict[str, int] | None = _param(
        None,
        "Ends the text when its last tokens repeat a pattern of min_pattern_size (1 if not given) to max_pattern_size "
        "tokens min_count times.",
        names=Constraint(type=str, choices=REPETITION_FIELDS),
    )
    thinking_token_budget: int | None = _count(
        None,
        "Tokens of a thought, behind its start mark, after which it is ended. None or -1: no limit.",
        -1,
        "0 or more, or -1 for no limit",
    )
    extra_args: dict[str, Any] | None = _param(
        None,
        "Values for extensions by name: numbers, strings, booleans or lists of them. Without an extension that reads "
        "them they have no effect.",
        most=MAX_EXTRA_ARGS,
        noun="values",
        names=EXTRA_NAME,
    )
    guided_decoding: object = _param(None, "Older name of structured_outputs: a GuidedDecodingParams.", only_local=True)
    structured_outputs: object = _param(
        None, "What the text has to match: a StructuredOutputsParams, or a dict with its fields.", only_local=True
    )
    stop_strings: tuple[str, ...] = field(init=False, default=())
    grammar: Grammar | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.stop is not None:
            self.stop = _well_formed(self.stop)
        if self.bad_words is not None:
            self.bad_words = _well_formed(self.bad_words)
        if self.repetition_detection is not None:
            self.repetition_detection = checked_repetition(self.repetition_detection)
        if self.logit_bias is not None:
            self.logit_bias = checked_bias(self.logit_bias)
        _CHECKS.check(vars(self))
        for name in _FLOATS:
            setattr(self, name, float(getattr(self, name)))
        if not all(map(callable, self.logits_processors or ())):
            raise error("invalid_type", param="logits_processors", reason="a list of functions is expected")
        self._check_combinations()
        self._check_grammar()
        self.stop_strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self.seed = None if self.seed == -1 else self.seed
        self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        if self.extra_args is not None:
            self.extra_args = checked_extra_args(self.extra_args)
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = list(dict.fromkeys(self.logprob_token_ids))
            self.logprobs = 0 if self.logprobs is None else self.logprobs
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = sorted(dict.fromkeys(self.allowed_token_ids))
        if self.stop_token_ids is not None:
            self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))

    def as_record(self) -> SamplingParams:
        """Return the parameters without those that cannot be encoded, and without structured outputs."""
        if self.logits_processors or self.structured_outputs is not None or self.guided_decoding is not None:
            return replace(self, logits_processors=None, structured_outputs=None, guided_decoding=None)
        return self

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate, of which n are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Like the constructor, but None means the default, for callers with optional fields."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def _check_combinations(self) -> None:
        if self.stop and not self.detokenize:
            raise error("unsupported_parameter", param="stop", reason="it needs detokenize=True")
        if self.best_of is not None and self.best_of < self.n:
            raise error("value_out_of_range", param="best_of", value=self.best_of, allowed=f"at least n, {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens, {self.max_tokens}"
            raise error("value_out_of_range", param="min_tokens", value=self.min_tokens, allowed=allowed)

    def _check_grammar(self) -> None:
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise error("unsupported_parameter", param="guided_decoding", reason="structured_outputs is given too")
        name = "structured_outputs" if self.guided_decoding is None else "guided_decoding"
        self.grammar = grammar_of(name, getattr(self, name))


#: Every sampling parameter by its name.
PARAMETERS = declarations(SamplingParams, Parameter)
#: Those that functions of their own check.
_READ = ("logit_bias", "repetition_detection")
_CHECKS = Checks(
    {name: PARAMETERS[name] for name in PARAMETERS if name not in _READ and PARAMETERS[name].type is not object}
)
_FLOATS = tuple(name for name, parameter in PARAMETERS.items() if parameter.type is float)


def _well_formed(texts: object) -> Any:
    """Return a string or a list of strings with U+FFFD for lone surrogates; anything else unchanged."""
    if isinstance(texts, str):
        return well_formed(texts)
    return list(map(_well_formed, texts)) if isinstance(texts, (list, tuple)) else texts
