"""What completions and chat answers have in common: choices, usage, log-probabilities, the two AIAK fields.

Every choice carries ``sentence_length``, the characters of its generated text, and ``cum_log_probs``, the sum of the
log-probabilities of its generated tokens (raw, before temperature and penalties); with a single choice both are also
found beside ``choices``. In a stream they come with the chunk that carries the finish_reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.outputs import Logprob, PositionLogprobs
from aiakq.server.api.protocol import GenerationRequest
from aiakq.server.api.request_stream import Prompt, merged
from aiakq.server.api.service import Service
from aiakq.server.http.streaming import News

#: JSON has no infinity; OpenAI's value for "as good as impossible".
LOWEST_LOGPROB = -9999.0


@dataclass
class ChoiceState:
    """One choice so far. ``shown`` counts the characters that text offsets start from: the echoed prompt's too."""

    index: int
    prompt: Prompt
    started: bool = False
    finished: str | None = None
    num_tokens: int = 0
    num_cached: int = 0
    text_length: int = 0
    shown: int = 0


class Answer:
    """Builds the answer of one request, whole or in chunks. Completions and chat fill in the shape of a choice."""

    id_prefix = ""
    object_name = ""
    chunk_name = ""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
    ) -> None:
        self.service = service
        self.request = request
        self.params = params
        self.prompts = prompts
        # Where there is no tokenizer, ids are all there is.
        self.with_token_ids = bool(request.return_token_ids) or not service.tokenizer.has_text
        self.ids_for_tokens = bool(request.return_tokens_as_token_ids) or not service.tokenizer.has_text
        self.id = self.id_prefix + request_id
        self.created = int(time.time())
        self.states = [ChoiceState(index, prompts[index // params.n]) for index in range(len(prompts) * params.n)]

    # --- what the two kinds of answers fill in

    def choice(self, state: ChoiceState, news: Delta) -> dict[str, Any]:
        """One entry of ``choices`` in a whole answer; ``news`` is everything."""
        raise NotImplementedError

    def chunk_choices(self, state: ChoiceState, news: Delta) -> list[dict[str, Any]]:
        """Entries of ``choices`` in a stream, one per chunk."""
        raise NotImplementedError

    # --- whole answers

    async def whole(self, news: AsyncIterator[News]) -> dict[str, Any]:
        """Wait for everything and build the answer."""
        everything: dict[int, Delta] = {}
        async for batch in news:
            for prompt_index, delta in batch:
                index = prompt_index * self.params.n + delta.index
                everything[index] = merged(everything[index], delta) if index in everything else delta
        choices = []
        for state in self.states:
            delta = everything[state.index]
            self._count(state, delta)
            choices.append(self.choice(state, delta) | self._ending(state, delta))
        answer = self._head(self.object_name) | {"choices": choices, "usage": self.usage()}
        if len(choices) == 1:
            answer |= self._ending(self.states[0], everything[0])
        return answer

    # --- streams

    def chunks(self, news: News) -> list[dict[str, Any]]:
        """The chunks that tell ``news``."""
        chunks = []
        for prompt_index, delta in news:
            state = self.states[prompt_index * self.params.n + delta.index]
            self._count(state, delta)
            entries = self.chunk_choices(state, delta)
            ending = self._ending(state, delta) if delta.finish_reason is not None else {}
            entries[-1] |= ending
            for at, entry in enumerate(entries):
                chunk = self._head(self.chunk_name) | {"choices": [entry]}
                if self.request.with_continuous_usage:
                    chunk["usage"] = self.usage()
                elif self.request.with_usage:
                    chunk["usage"] = None
                if len(self.states) == 1 and at == len(entries) - 1:
                    chunk |= ending
                chunks.append(chunk)
        return chunks

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk with the token counts, if it was asked for."""
        if not self.request.with_usage:
            return []
        return [self._head(self.chunk_name) | {"choices": [], "usage": self.usage()}]

    # --- parts

    @property
    def reason(self) -> str:
        """Why the request ended, for the metrics: "length" if any of its choices was cut."""
        return "length" if any(state.finished == "length" for state in self.states) else "stop"

    def usage(self) -> dict[str, Any]:
        """Token counts so far. A prompt counts once, whatever n."""
        prompt = sum(len(one.token_ids) for one in self.prompts)
        completion = sum(state.num_tokens for state in self.states)
        cached = sum(state.num_cached for state in self.states[:: self.params.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def token_text(self, token_id: int, entry: Logprob | None = None) -> str:
        """A token as log-probability lists name it."""
        if self.ids_for_tokens:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self.service.token_text(token_id)

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.service.names[0],
            "system_fingerprint": self.service.fingerprint,
        }

    def _count(self, state: ChoiceState, delta: Delta) -> None:
        state.num_tokens += len(delta.token_ids)
        state.num_cached = max(state.num_cached, delta.num_cached_tokens)
        state.text_length += len(delta.text)
        state.finished = delta.finish_reason or state.finished

    def _ending(self, state: ChoiceState, delta: Delta) -> dict[str, Any]:
        """The two AIAK fields."""
        return {"sentence_length": state.text_length, "cum_log_probs": finite(delta.cumulative_logprob)}


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def by_rank(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely tokens of a position, best first."""
    ranked = [(token, entry) for token, entry in position.items() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def plain_prompt_logprobs(positions: list[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: per prompt position token id -> log-probability, rank and text; the first is null."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in positions
    ]
