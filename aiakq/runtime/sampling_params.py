"""SamplingParams: how a request's next token is chosen. Names and defaults follow vLLM; no torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiakq.errors import error

#: Below this a temperature is greedy: dividing logits by it would overflow (documented in docs/serving.md).
GREEDY_BELOW = 1e-5

#: Called with (ids generated so far, logits [V]) or (prompt's ids, those, logits); returns logits.
LogitsProcessor = Callable[..., Any]

# (name, smallest, largest, smallest is allowed, allowed in words)
FLOAT_RANGES = (
    ("presence_penalty", -2.0, 2.0, True, "-2 to 2"),
    ("frequency_penalty", -2.0, 2.0, True, "-2 to 2"),
    ("repetition_penalty", 0.0, 1e4, False, "above 0"),
    ("temperature", 0.0, 1e4, True, "0 or more"),
    ("top_p", 0.0, 1.0, False, "above 0, at most 1"),
    ("min_p", 0.0, 1.0, True, "0 to 1"),
)
COUNT_RANGES = (
    ("n", 1, 16, "1 to 16"),
    ("best_of", 1, 16, "1 to 16"),
    ("min_tokens", 0, 2**31, "0 or more"),
    ("max_tokens", 0, 2**31, "0 or more"),
    ("top_k", -1, 2**31, "-1 or 0 (off), or 1 and more"),
    ("logprobs", -1, 2**31, "0 or more, or -1 for the whole vocabulary"),
    ("prompt_logprobs", -1, 2**31, "0 or more, or -1 for the whole vocabulary"),
    ("truncate_prompt_tokens", -1, 2**31, "1 or more, or -1 for what fits"),
    ("seed", -(2**63), 2**63 - 1, "a 64-bit integer"),
)
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
#: A token id as a key of JSON: as it is written, so that no two keys name one token.
TOKEN_KEY = re.compile(r"^(0|-?[1-9][0-9]{0,39})$")
_OPTIONAL = frozenset({"max_tokens", "best_of", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "seed"})
_GUIDED = "guided decoding is not built yet"


@dataclass
class SamplingParams:
    """Sampling settings of one request; vLLM's names, defaults and meaning.

    n                    sequences returned for the prompt.
    best_of              sequences generated; the n with the highest cumulative log-probability are returned.
    presence_penalty     subtracted once from the logit of every token already generated.
    frequency_penalty    subtracted per occurrence of a token already generated.
    repetition_penalty   divides (or multiplies, if negative) the logits of tokens in the prompt and output.
    temperature          0 is greedy.
    top_p, top_k, min_p  keep the smallest set reaching top_p; the top_k best; those above min_p of the best.
    seed                 gives the same tokens whatever else is in the batch; None draws one per request.
    stop                 strings that end the text; returned only with ``include_stop_str_in_output``.
    stop_token_ids       ids that end the text.
    ignore_eos           go on past the model's own end-of-sequence token.
    max_tokens           None means: up to the end of the context. 0 only scores the prompt.
    min_tokens           end tokens are masked until so many were generated.
    logprobs             return this many most likely tokens per position, beside the chosen one.
    prompt_logprobs      the same for the prompt; the first position has none.
    logit_bias           token id -> value added to its logit, -100..100.
    detokenize           whether there is text at all.
    skip_special_tokens  whether special tokens are left out of the text.
    spaces_between_special_tokens  where they are not; only tokenizers in Python know the difference.
    allowed_token_ids    only these ids may be generated.
    bad_words            texts whose tokens may not follow each other, with a space before them or without.
    logits_processors    functions over the logits, see ``LogitsProcessor``; applied first. Only for ``LLM``.
    truncate_prompt_tokens  keep so many tokens of the prompt's end; -1: as many as leave room for max_tokens.
    guided_decoding, structured_outputs  refused.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[LogitsProcessor] | None = None
    truncate_prompt_tokens: int | None = None
    guided_decoding: Any = None
    structured_outputs: Any = None
    stop_strings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        self._check_words()
        for name in ("guided_decoding", "structured_outputs"):
            if getattr(self, name) is not None:
                raise error("unsupported_parameter", param=name, reason=_GUIDED)
        if any(not callable(each) for each in self.logits_processors or ()):
            raise error("invalid_type", param="logits_processors", reason="functions are expected")
        if self.truncate_prompt_tokens == 0:
            raise error(
                "value_out_of_range", param="truncate_prompt_tokens", value=0, allowed="1 or more, or -1 for what fits"
            )
        if self.num_sequences < self.n:
            raise error("value_out_of_range", param="best_of", value=self.best_of, allowed=f"at least n, {self.n}")
        if self.seed == -1:
            self.seed = None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise error(
                "value_out_of_range",
                param="min_tokens",
                value=self.min_tokens,
                allowed=f"at most max_tokens, {self.max_tokens}",
            )
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise error("value_out_of_range", param="allowed_token_ids", value=[], allowed="at least one id")

    @property
    def num_sequences(self) -> int:
        """Sequences to generate, of which n are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Like the constructor, but None means the default; for callers that pass optional fields through."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def _check_numbers(self) -> None:
        for name, low, high, closed, allowed in FLOAT_RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise error("invalid_type", param=name, reason=f"a number is expected, not {value!r:.64}")
            # Written so that NaN fails: every comparison with it is False.
            if not ((low <= value if closed else low < value) and value <= high):
                raise error("value_out_of_range", param=name, value=value, allowed=allowed)
            setattr(self, name, float(value))
        for name, least, most, allowed in COUNT_RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise error("invalid_type", param=name, reason=f"an integer is expected, not {value!r:.64}")
            if not least <= value <= most:
                raise error("value_out_of_range", param=name, value=value, allowed=allowed)

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


def _checked_bias(bias: dict[Any, float]) -> dict[int, float]:
    """Integer keys (JSON gives strings), values clamped to -100..100 as the OpenAI API documents."""
    if len(bias) > MAX_LOGIT_BIAS:
        raise error(
            "value_out_of_range",
            param="logit_bias",
            value=f"{len(bias)} entries",
            allowed=f"at most {MAX_LOGIT_BIAS}",
        )
    checked: dict[int, float] = {}
    for key, value in bias.items():
        if not isinstance(key, int) and not (isinstance(key, str) and TOKEN_KEY.fullmatch(key)):
            raise error("invalid_type", param="logit_bias", reason=f"the key {str(key)[:64]!r} is no token id")
        token = int(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise error("invalid_type", param="logit_bias", reason=f"the value of {token} is no number")
        checked[token] = min(100.0, max(-100.0, float(value)))
    return checked
