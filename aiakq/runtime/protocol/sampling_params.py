"""SamplingParams: how the tokens of a request are sampled. Names and defaults follow vLLM. Does not import torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

from aiakq.errors import error
from aiakq.runtime.protocol.extra_args import MAX_EXTRA_ARGS, MAX_EXTRA_NAME, checked_extra_args
from aiakq.runtime.protocol.grammar import Grammar, grammar_of
from aiakq.runtime.protocol.repetition import REPETITION_FIELDS, checked_repetition
from aiakq.runtime.protocol.token_bias import MAX_LOGIT_BIAS, TOKEN_KEY, Bias, checked_bias
from aiakq.runtime.protocol.unicode_text import well_formed

#: Temperatures below this are greedy, since dividing logits by them would overflow (see docs/serving.md).
GREEDY_BELOW = 1e-5

#: Called with (output ids, logits [V]) or (prompt ids, output ids, logits [V]); returns logits.
LogitsProcessor = Callable[..., Any]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 128
#: Maximum number of token ids whose log-probabilities are returned per position.
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True)
class Parameter:
    """Declaration of a sampling parameter, besides its type and default.

    help           description in one sentence.
    minimum        lower bound; ``exclusive`` if it is not allowed itself.
    maximum        upper bound.
    allowed        description of the bounds for error messages.
    schema         JSON Schema keywords for values that are not numbers, by JSON type.
    limited_by     bound that depends on the loaded model: "max_tokens", "logprobs" or "token_id".
    only_local     whether only ``LLM`` accepts it, and HTTP requests do not.
    http_maximum   upper bound of HTTP requests, if that is lower.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    allowed: str = ""
    exclusive: bool = False
    schema: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    limited_by: str = ""
    only_local: bool = False
    http_maximum: int | None = None


def _param(default: Any, help: str, **declared: Any) -> Any:
    """Return a dataclass field with its ``Parameter``."""
    return field(default=default, metadata={"parameter": Parameter(help, **declared)})


def _count(default: int | None, help: str, minimum: int, maximum: int, allowed: str, limited_by: str = "") -> Any:
    return _param(default, help, minimum=minimum, maximum=maximum, allowed=allowed, limited_by=limited_by)


_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_LOGPROBS = (-1, 2**31, "0 or more, or -1 for the whole vocabulary", "logprobs")


@dataclass
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names, defaults and semantics.

    The fields are the single declaration of these parameters: their validation, the fields of HTTP requests, the
    OpenAPI document and docs/routes.md are derived from them.
    """

    n: int = _param(
        1, "Sequences returned for the prompt.", minimum=1, maximum=2**31, allowed="1 or more", http_maximum=128
    )
    best_of: int | None = _param(
        None,
        "Sequences generated, of which the n with the highest cumulative log-probability are returned.",
        minimum=1,
        maximum=2**31,
        allowed="1 or more",
        http_maximum=128,
    )
    presence_penalty: float = _param(
        0.0,
        "Subtracted once from the logit of every token already generated.",
        minimum=-2.0,
        maximum=2.0,
        allowed="-2 to 2",
    )
    frequency_penalty: float = _param(
        0.0,
        "Subtracted from the logit of a token for each time it was generated.",
        minimum=-2.0,
        maximum=2.0,
        allowed="-2 to 2",
    )
    repetition_penalty: float = _param(
        1.0,
        "Divides the logits of tokens in the prompt and the output; multiplies negative ones.",
        minimum=0.0,
        maximum=1e4,
        exclusive=True,
        allowed="above 0",
    )
    temperature: float = _param(1.0, "0 is greedy.", minimum=0.0, maximum=1e4, allowed="0 or more")
    top_p: float = _param(
        1.0,
        "Keep the smallest set of tokens whose probability reaches this.",
        minimum=0.0,
        maximum=1.0,
        exclusive=True,
        allowed="above 0, at most 1",
    )
    top_k: int = _count(0, "Keep this many of the most likely tokens.", -1, 2**31, "-1 or 0 (off), or 1 and more")
    min_p: float = _param(
        0.0,
        "Keep tokens whose probability is at least this fraction of the highest.",
        minimum=0.0,
        maximum=1.0,
        allowed="0 to 1",
    )
    seed: int | None = _count(
        None,
        "Makes the output reproducible, whatever else is in the batch. Random if not given, or -1.",
        -(2**63),
        2**63 - 1,
        "a 64-bit integer",
    )
    stop: str | list[str] | None = _param(
        None,
        "Strings that end the text. They are only returned with include_stop_str_in_output.",
        schema={"string": _TEXT, "array": {"maxItems": MAX_STOP_STRINGS, "items": _TEXT}},
    )
    stop_token_ids: list[int] | None = _param(
        None,
        "Token ids that end the text.",
        schema={"array": {"maxItems": MAX_STOP_TOKEN_IDS}},
        limited_by="token_id",
    )
    include_stop_str_in_output: bool = _param(False, "Return the stop string that ended the text.")
    ignore_eos: bool = _param(False, "Continue past the model's end-of-sequence token.")
    max_tokens: int | None = _count(
        16,
        "Tokens to generate at most. None: up to the end of the context. 0: only score the prompt.",
        0,
        2**31,
        "0 or more",
        "max_tokens",
    )
    min_tokens: int = _count(0, "Tokens to generate before the text may end.", 0, 2**31, "0 or more")
    logprobs: int | None = _count(
        None, "Return this many of the most likely tokens per position, beside the chosen one.", *_LOGPROBS
    )
    prompt_logprobs: int | None = _count(
        None, "Return this many of the most likely tokens per position of the prompt; the first has none.", *_LOGPROBS
    )
    detokenize: bool = _param(True, "Whether to generate text, not only token ids.", only_local=True)
    skip_special_tokens: bool = _param(True, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = _param(
        True, "Put spaces between special tokens; only for tokenizers written in Python."
    )
    logit_bias: dict[int, Bias] | None = _param(
        None,
        "Token id -> value added to its logit, clamped to -100..100, or false to exclude it; also a list of pairs.",
        schema={"object": {"maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": TOKEN_KEY.pattern}}},
    )
    allowed_token_ids: list[int] | None = _param(
        None, "Only these token ids may be generated.", schema={"array": {"minItems": 1}}, limited_by="token_id"
    )
    bad_words: list[str] | None = _param(
        None,
        "Texts that may not be generated, at the beginning or after a space.",
        schema={"array": {"maxItems": MAX_BAD_WORDS, "items": {**_TEXT, "pattern": r"\S"}}},
    )
    logits_processors: list[LogitsProcessor] | None = _param(
        None, "Functions over the logits, see ``LogitsProcessor``; applied first.", only_local=True
    )
    truncate_prompt_tokens: int | None = _param(
        None,
        "Keep this many tokens of the prompt, at most the context; -1: as many as leave room for max_tokens.",
        minimum=-1,
        maximum=2**31,
        allowed="1 or more, or -1 for what fits",
        schema={"integer": {"not": {"const": 0}}},
    )
    truncation_side: str | None = _param(
        None,
        "Which side truncate_prompt_tokens cuts: left keeps the end of the prompt, right its beginning.",
        schema={"string": {"enum": ["left", "right"]}},
    )
    logprob_token_ids: list[int] | None = _param(
        None,
        "Return the log-probabilities of these token ids per position, instead of the most likely ones.",
        schema={"array": {"minItems": 1, "maxItems": MAX_LOGPROB_TOKEN_IDS}},
        limited_by="token_id",
    )
    repetition_detection: dict[str, int] | None = _param(
        None,
        "Ends the text when its last tokens repeat a pattern of min_pattern_size (1 if not given) to max_pattern_size "
        "tokens min_count times.",
        schema={"object": {"propertyNames": {"enum": list(REPETITION_FIELDS)}}},
    )
    thinking_token_budget: int | None = _count(
        None,
        "Tokens of a thought, behind its start mark, after which it is ended. None or -1: no limit.",
        -1,
        2**31,
        "0 or more, or -1 for no limit",
    )
    extra_args: dict[str, Any] | None = _param(
        None,
        "Values for extensions by name: numbers, strings, booleans or lists of them. Without an extension that reads "
        "them they have no effect.",
        schema={"object": {"maxProperties": MAX_EXTRA_ARGS, "propertyNames": {"maxLength": MAX_EXTRA_NAME}}},
    )
    guided_decoding: object = _param(None, "Older name of structured_outputs: a GuidedDecodingParams.", only_local=True)
    structured_outputs: object = _param(
        None, "What the text has to match: a StructuredOutputsParams, or a dict with its fields.", only_local=True
    )
    stop_strings: tuple[str, ...] = field(init=False, default=())
    grammar: Grammar | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_types()
        self.stop, self.bad_words = _well_formed(self.stop), _well_formed(self.bad_words)
        self._check_stops()
        self._check_words()
        self._check_grammar()
        if any(not callable(each) for each in self.logits_processors or ()):
            raise error("invalid_type", param="logits_processors", reason="a list of functions is expected")
        self.repetition_detection = checked_repetition(self.repetition_detection)
        if self.truncation_side not in (None, "left", "right"):
            value = str(self.truncation_side)[:64]
            raise error("value_out_of_range", param="truncation_side", value=value, allowed="left or right")
        if self.truncate_prompt_tokens == 0:
            raise error(
                "value_out_of_range", param="truncate_prompt_tokens", value=0, allowed="1 or more, or -1 for what fits"
            )
        if self.num_sequences < self.n:
            raise error("value_out_of_range", param="best_of", value=self.best_of, allowed=f"at least n, {self.n}")
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise error(
                "value_out_of_range",
                param="min_tokens",
                value=self.min_tokens,
                allowed=f"at most max_tokens, {self.max_tokens}",
            )
        if self.logit_bias is not None:
            self.logit_bias = checked_bias(self.logit_bias)
        if self.extra_args is not None:
            self.extra_args = checked_extra_args(self.extra_args)
        self._check_ids()

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

    def _check_numbers(self) -> None:
        for name, parameter, expected, optional in _numbers():
            if (value := getattr(self, name)) is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, expected):
                kind = "an integer" if expected is int else "a number"
                raise error("invalid_type", param=name, reason=f"{kind} is expected, not {value!r:.64}")
            assert (low := parameter.minimum) is not None and (high := parameter.maximum) is not None
            above = value > low if parameter.exclusive else value >= low
            # Written such that NaN fails, since every comparison with it is false.
            if not (above and value <= high):
                allowed = f"at most {int(high)}" if value > max(high, 1e4) else parameter.allowed
                raise error("value_out_of_range", param=name, value=value, allowed=allowed)
            if expected is not int:
                setattr(self, name, float(value))

    def _check_types(self) -> None:
        """Raise ``invalid_type`` for a switch that is no boolean, and for a single value in place of a list."""
        for name in _SWITCHES:
            if getattr(self, name) not in (True, False):
                raise error(
                    "invalid_type", param=name, reason=f"a boolean is expected, not {getattr(self, name)!r:.64}"
                )
        for name, (kinds, expected) in _COLLECTIONS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise error("invalid_type", param=name, reason=f"{expected} is expected, not {value!r:.64}")

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stops) > MAX_STOP_STRINGS:
            raise error(
                "value_out_of_range",
                param="stop",
                value=f"{len(stops)} strings",
                allowed=f"at most {MAX_STOP_STRINGS}",
            )
        for text in stops:
            if not isinstance(text, str):
                raise error("invalid_type", param="stop", reason="strings are expected")
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise error(
                    "value_out_of_range",
                    param="stop",
                    value=text[:64],
                    allowed=f"strings of 1 to {MAX_STOP_CHARS} characters",
                )
        if stops and not self.detokenize:
            raise error("unsupported_parameter", param="stop", reason="it needs detokenize=True")
        self.stop_strings = tuple(stops)

    def _check_grammar(self) -> None:
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise error("unsupported_parameter", param="guided_decoding", reason="structured_outputs is given too")
        name = "structured_outputs" if self.guided_decoding is None else "guided_decoding"
        self.grammar = grammar_of(name, getattr(self, name))

    def _check_ids(self) -> None:
        """Replace ``allowed_token_ids`` by its sorted distinct ids, and ``stop_token_ids`` by its distinct ids."""
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = list(_distinct_ids("logprob_token_ids", self.logprob_token_ids))
            if not 1 <= len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS:
                given, allowed = f"{len(self.logprob_token_ids)} ids", f"1 to {MAX_LOGPROB_TOKEN_IDS}"
                raise error("value_out_of_range", param="logprob_token_ids", value=given, allowed=allowed)
            if self.logprobs is None:
                self.logprobs = 0
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = sorted(_distinct_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise error("value_out_of_range", param="allowed_token_ids", value=[], allowed="at least one id")
        if self.stop_token_ids is not None:
            self.stop_token_ids = list(_distinct_ids("stop_token_ids", self.stop_token_ids))
            if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
                given, allowed = f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}"
                raise error("value_out_of_range", param="stop_token_ids", value=given, allowed=allowed)

    def _check_words(self) -> None:
        words = self.bad_words or []
        if len(words) > MAX_BAD_WORDS:
            allowed = f"at most {MAX_BAD_WORDS}"
            raise error("value_out_of_range", param="bad_words", value=f"{len(words)} words", allowed=allowed)
        for word in words:
            if not isinstance(word, str):
                raise error("invalid_type", param="bad_words", reason="strings are expected")
            if not word.strip() or len(word) > MAX_STOP_CHARS:
                allowed = f"words of 1 to {MAX_STOP_CHARS} characters"
                raise error("value_out_of_range", param="bad_words", value=word[:64], allowed=allowed)


def allowed_values(name: str) -> str:
    """Return the valid values of a numeric parameter, in words."""
    type_, parameter = parameters()[name]
    kind = "an integer" if type_ is int else "a number"
    return f"{kind}: {parameter.allowed}"


def _well_formed(texts: object) -> Any:
    """Return a string or a list of strings with U+FFFD for lone surrogates; anything else unchanged."""
    if isinstance(texts, str):
        return well_formed(texts)
    return list(map(_well_formed, texts)) if isinstance(texts, (list, tuple)) else texts


def _distinct_ids(param: str, ids: list[int]) -> dict[int, None]:
    """Return the distinct ``ids`` in order. Raises ``invalid_type`` for anything but a list of integers."""
    if not isinstance(ids, (list, tuple)):
        raise error("invalid_type", param=param, reason=f"a list of token ids is expected, not {ids!r:.64}")
    if not set(map(type, ids)) <= {int}:
        wrong = next(token for token in ids if type(token) is not int)
        raise error("invalid_type", param=param, reason=f"token ids are integers, not {wrong!r:.64}")
    return dict.fromkeys(ids)


def parameters() -> dict[str, tuple[Any, Parameter]]:
    """Return name -> (type, declaration) of every sampling parameter."""
    types = get_type_hints(SamplingParams)
    declared = [each for each in fields(SamplingParams) if "parameter" in each.metadata]
    return {each.name: (types[each.name], each.metadata["parameter"]) for each in declared}


@functools.cache
def _numbers() -> tuple[tuple[str, Parameter, Any, bool], ...]:
    """Return (name, declaration, type, whether None is allowed) of the numeric parameters, floats first."""
    numbers = []
    for name, (type_, parameter) in parameters().items():
        if parameter.minimum is not None:
            expected = (int, float) if type_ is float else int
            numbers.append((name, parameter, expected, type(None) in get_args(type_)))
    return tuple(sorted(numbers, key=lambda number: number[2] is int))


#: Names of the parameters that are on or off.
_SWITCHES = tuple(name for name, (type_, _) in parameters().items() if type_ is bool)
#: Parameters with several values -> their types, and how these are called in errors.
_COLLECTIONS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "stop": ((str, list, tuple), "a string or a list of strings"),
    "bad_words": ((list, tuple), "a list of strings"),
    "logit_bias": ((dict, list), "a dict from token ids to biases, or a list of pairs,"),
    "logits_processors": ((list, tuple), "a list of functions"),
}
