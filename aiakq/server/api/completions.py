"""The shape of /v1/completions: text, with token lists beside it when log-probabilities are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.outputs import PositionLogprobs
from aiakq.server.api.protocol import CompletionRequest
from aiakq.server.api.responses import Answer, ChoiceState, finite, plain_prompt_logprobs


class CompletionAnswer(Answer):
    """Answers of /v1/completions. With ``echo`` every choice begins with its prompt."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    request: CompletionRequest

    def choice(self, state: ChoiceState, news: Delta) -> dict[str, Any]:
        entry = self._entry(state, news)
        if self.request.prompt_logprobs is not None:
            entry["prompt_logprobs"] = plain_prompt_logprobs(news.prompt_logprobs)
        return entry

    def chunk_choices(self, state: ChoiceState, news: Delta) -> list[dict[str, Any]]:
        return [self._entry(state, news)]

    def _entry(self, state: ChoiceState, news: Delta) -> dict[str, Any]:
        """One entry of ``choices``, whole or one step's part of it."""
        first, state.started = not state.started, True
        echoed = self._prompt_text(state) if first and self.request.echo else ""
        entry: dict[str, Any] = {
            "index": state.index,
            "text": echoed + news.text,
            "logprobs": self._logprobs(state, news, with_prompt=bool(first and self.request.echo)),
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        if self.with_token_ids:
            entry["token_ids"] = news.token_ids
            if first:
                entry["prompt_token_ids"] = state.prompt.token_ids
        return entry

    def _prompt_text(self, state: ChoiceState) -> str:
        if state.prompt.text is not None:
            return state.prompt.text
        return self.service.tokenizer.decode(state.prompt.token_ids, self.params.skip_special_tokens)

    def _logprobs(self, state: ChoiceState, news: Delta, with_prompt: bool) -> dict[str, Any] | None:
        """OpenAI's four parallel lists; None unless asked for.

        A position of ``top_logprobs`` holds the chosen token and the most likely ones. Two tokens with the same text
        (halves of a character) share an entry; ``return_tokens_as_token_ids`` keeps them apart.
        """
        if self.request.logprobs is None:
            return None
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if with_prompt:
            positions = news.prompt_logprobs or [None] * len(state.prompt.token_ids)
            self._extend(lists, state, state.prompt.token_ids, positions)
        self._extend(lists, state, news.token_ids, news.logprobs or [])
        return lists

    def _extend(
        self,
        lists: dict[str, Any],
        state: ChoiceState,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
    ) -> None:
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = None if position is None else position[token_id]
            # Offsets count the tokens' own text, also where the answer shows them as ids.
            own = chosen.decoded_token if chosen is not None else None
            own = self.service.token_text(token_id) if own is None else own
            lists["tokens"].append(self.token_text(token_id, chosen))
            lists["token_logprobs"].append(None if chosen is None else finite(chosen.logprob))
            lists["text_offset"].append(state.shown)
            state.shown += len(own)
            lists["top_logprobs"].append(
                None
                if position is None
                else {self.token_text(token, entry): finite(entry.logprob) for token, entry in position.items()}
            )
