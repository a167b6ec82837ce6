"""OutputProcessor: turns the engine's outputs into text and log-probabilities, and detects stop strings.

Both ``LLM`` and the server add requests with ``add`` and pass every TokenOutput to ``process``. A request for n
sequences becomes n engine requests, which share the pages of their prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from aiakq.errors import error
from aiakq.runtime.protocol.admission import admit, repeat
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import RequestTimes, TokenOutput
from aiakq.runtime.protocol.pooling_params import Pooled
from aiakq.runtime.protocol.request import Prompt, Request, RequestSpec
from aiakq.runtime.protocol.request_output import Logprob, PositionLogprobs
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import TokenLogprobs
from aiakq.runtime.text.detokenizer import Detokenizer
from aiakq.runtime.text.stop_strings import StopStrings
from aiakq.runtime.text.tokenizer import Tokenizer


@dataclass
class Delta:
    """The output of a step for one sequence of a request.

    text               new text; text that may be the start of a stop string is held back.
    cumulative_logprob sum of the log-probabilities of all tokens so far.
    finish_reason      with the last delta: "stop", "length", "repetition", "abort" or "error".
    stop_reason        the stop string or stop token id, or "repetition_detected"; None for an EOS token.
    pooled             the pooled prompt, with the last delta.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes | None = None
    error: str | None = None
    pooled: Pooled | None = None


class NamedPositions(Sequence[PositionLogprobs | None]):
    """The log-probabilities at ``positions``, by token id. Created lazily, since there may be millions of tokens."""

    def __init__(
        self, positions: Sequence[TokenLogprobs | None], name: Callable[[TokenLogprobs], PositionLogprobs]
    ) -> None:
        self._positions = positions
        self._name = name

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return NamedPositions(self._positions[index], self._name)
        position = self._positions[index]
        return None if position is None else self._name(position)


class _Stream:
    """The text of one sequence, truncated at stop strings."""

    def __init__(
        self,
        request_id: str,
        index: int,
        spec: RequestSpec,
        params: SamplingParams,
        tokenizer: Tokenizer,
        kept_special_tokens: frozenset[int],
        hidden: Mapping[str, int],
    ) -> None:
        """hidden: texts of special tokens that are left out of the text, and their ids."""
        self.request_id = request_id
        self.index = index
        self.spec = spec
        self.params = params
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        include = params.include_stop_str_in_output
        self.stops = StopStrings(params.stop_strings, hidden, include) if params.stop_strings else None
        self.detokenizer = (
            Detokenizer(
                tokenizer,
                spec.prompt_token_ids,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
                kept_special_tokens,
            )
            if params.detokenize
            else None
        )

    def take(self, token: int, hide: bool) -> tuple[str, str | None]:
        """Add a token; return the released text and a completed stop string. ``hide`` drops the token's own text."""
        self.num_tokens += 1
        if self.detokenizer is None or hide:
            return "", None
        text = self.detokenizer.push(token)
        if self.stops is None:
            return text, None
        return self._release(self.stops, text + self.stops.markers[token] if token in self.stops.markers else text)

    def finish(self) -> tuple[str, str | None]:
        """Return the remaining text, and a stop string that the last bytes complete."""
        if self.detokenizer is None:
            return "", None
        text = self.detokenizer.flush()
        if self.stops is None:
            return text, None
        text, stop = self._release(self.stops, text)
        return (text, stop) if stop is not None else (text + self.stops.rest(), None)

    def _release(self, stops: StopStrings, new: str) -> tuple[str, str | None]:
        return stops.add(new, may_stop=self.num_tokens > self.params.min_tokens)


class OutputProcessor:
    """The unfinished requests of one frontend, from admission to their last text."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._streams: dict[str, _Stream] = {}

    @functools.cached_property
    def _special_texts(self) -> dict[str, int]:
        """Special tokens by their text."""
        return {self.tokenizer.token_text(id): id for id in self.tokenizer.special_ids}

    def add(self, prompt_id: str, prompt: Prompt, request: Request, key: str = "") -> list[RequestSpec]:
        """Validate and register one prompt of a request; return its sequences for the engine.

        key  unique id of the request; ``prompt_id`` if not given, for a request with one prompt.
        Raises what ``admit`` raises, and ``unsupported_parameter`` for parameters that need a tokenizer if there is
        none.
        """
        params, kept = request.params, request.kept_special_tokens
        if not self.tokenizer.has_text:
            if params.bad_words:
                raise error("unsupported_parameter", param="bad_words", reason="there is no tokenizer")
            params = replace(params, detokenize=False)
        words = request.bad_words
        if words is None:
            words = bad_word_ids(self.tokenizer, params.bad_words or ())
        first = admit(
            f"{prompt_id}/0",
            prompt.token_ids,
            params,
            self.limits,
            0,
            words,
            request.options,
            request.within_context,
            prompt.media,
        )
        if prompt.second_text or prompt.num_unread:
            first = msgspec.structs.replace(first, second_text=prompt.second_text, num_unread=prompt.num_unread)
        thought = prompt.thought
        if thought is not None and thought.max_tokens < first.max_tokens:  # else it is never used up
            first = msgspec.structs.replace(first, thought=thought)
        if len(request.prompts) * params.num_sequences > 1:
            first = msgspec.structs.replace(first, group=key or prompt_id)
        specs = [first, *(repeat(first, f"{prompt_id}/{index}", index) for index in range(1, params.num_sequences))]
        hidden: dict[str, int] = {}
        if params.stop_strings and params.skip_special_tokens:
            hidden = {text: id for text, id in self._special_texts.items() if id not in kept}
        for index, spec in enumerate(specs):
            self._streams[spec.request_id] = _Stream(prompt_id, index, spec, params, self.tokenizer, kept, hidden)
        return specs

    def cancel(self, request_id: str) -> list[str]:
        """Unregister a request; return the engine's request ids to abort."""
        ids = [id for id, stream in self._streams.items() if stream.request_id == request_id]
        for id in ids:
            del self._streams[id]
        return ids

    def process(self, output: TokenOutput) -> tuple[list[Delta], list[str]]:
        """Turn an engine output into deltas; also return the engine's request ids to abort because of a stop string.

        Outputs of cancelled requests are dropped.
        """
        stream = self._streams.get(output.request_id)
        if stream is None:
            return [], []
        delta = Delta(
            request_id=stream.request_id,
            index=stream.index,
            num_cached_tokens=output.num_cached_tokens,
            num_preemptions=output.num_preemptions,
            times=output.times,
            error=output.error,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            pooled=output.pooled,
        )
        stop = self._take_tokens(stream, output, delta)
        if stop is None and output.finish_reason is not None:
            text, stop = stream.finish()
            delta.text += text
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        delta.cumulative_logprob = stream.cumulative_logprob
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = NamedPositions(
                output.prompt_logprobs, functools.partial(self._named, stream=stream)
            )
        aborts = []
        if delta.finish_reason is not None:
            del self._streams[output.request_id]
            if output.finish_reason is None:
                aborts.append(output.request_id)
        return [delta], aborts

    def _take_tokens(self, stream: _Stream, output: TokenOutput, delta: Delta) -> str | None:
        """Add the new tokens to ``delta`` up to a stop string; return the stop string, if any."""
        last = len(output.token_ids) - 1
        for index, token in enumerate(output.token_ids):
            stream.cumulative_logprob += output.token_logprobs[index]
            delta.token_ids.append(token)
            if output.logprobs is not None:
                delta.logprobs = (delta.logprobs or []) + [self._named(output.logprobs[index], stream)]
            # A stop token is not part of the text; EOS is a special token and skipped anyway.
            # The last token of a grammar is part of the text.
            ends = index == last and output.finish_reason == "stop" and self._is_end(token, stream.params)
            text, stop = stream.take(token, hide=ends and not stream.params.include_stop_str_in_output)
            delta.text += text
            if stop is not None:
                return stop
        return None

    def _is_end(self, token: int, params: SamplingParams) -> bool:
        return token in self.limits.eos_token_ids or token in (params.stop_token_ids or ())

    def _named(self, position: TokenLogprobs, stream: _Stream) -> PositionLogprobs:
        """Return the log-probabilities at a position by token id, the sampled token first."""
        named: PositionLogprobs = {}
        for index, (token, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
            if token not in named:
                text = self.tokenizer.token_text(token) if stream.params.detokenize else None
                rank = position.chosen_rank if index == 0 else index if position.is_ranked else None
                named[token] = Logprob(logprob, rank, text)
        return named


def bad_word_texts(words: Iterable[str]) -> list[str]:
    """Return the texts to forbid: each of ``words`` without and with a leading space."""
    return [text for word in words for text in (word.lstrip(), " " + word.lstrip())]


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Return the token ids of ``words`` without a leading space, and with one if they differ."""
    return distinct_lists(tokenizer.encode(text, add_special_tokens=False) for text in bad_word_texts(words))


def distinct_lists(lists: Iterable[list[int]]) -> list[list[int]]:
    """Return the distinct lists that are not empty."""
    return [list(each) for each in dict.fromkeys(map(tuple, lists)) if each]


def check_truncation(params: SamplingParams, limits: ModelLimits) -> None:
    """Raise ``value_out_of_range`` if ``truncate_prompt_tokens`` keeps more than the context holds."""
    keep = params.truncate_prompt_tokens
    longest = limits.longest
    if keep is not None and keep > longest:
        allowed = f"at most {longest}, the context, or -1 for what fits"
        raise error("value_out_of_range", param="truncate_prompt_tokens", value=keep, allowed=allowed)


def truncated(prompt_token_ids: list[int], params: SamplingParams, limits: ModelLimits) -> list[int]:
    """Return the part of a prompt that ``truncate_prompt_tokens`` keeps. Raises as ``check_truncation``."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return prompt_token_ids
    check_truncation(params, limits)
    if keep == -1:
        num_new = 1 if params.max_tokens is None else params.max_tokens
        keep = max(1, limits.longest - num_new)
    return prompt_token_ids[:keep] if params.truncation_side == "right" else prompt_token_ids[-keep:]
