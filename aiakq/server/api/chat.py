"""The shape of /v1/chat/completions: messages, or pieces of them."""

from __future__ import annotations

from typing import Any

from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.outputs import Logprob
from aiakq.server.api.protocol import ChatRequest
from aiakq.server.api.responses import Answer, ChoiceState, by_rank, finite, plain_prompt_logprobs


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    request: ChatRequest

    def choice(self, state: ChoiceState, news: Delta) -> dict[str, Any]:
        message = {"role": self.service.response_role, "content": news.text, "refusal": None}
        entry = self._entry(state, news, "message", message)
        if self.request.prompt_logprobs is not None:
            entry["prompt_logprobs"] = plain_prompt_logprobs(news.prompt_logprobs)
        return entry

    def chunk_choices(self, state: ChoiceState, news: Delta) -> list[dict[str, Any]]:
        entries = []
        if not state.started:
            opening = {"role": self.service.response_role, "content": ""}
            entries.append({"index": state.index, "delta": opening, "logprobs": None, "finish_reason": None})
        entries.append(self._entry(state, news, "delta", {"content": news.text}))
        return entries

    def _entry(self, state: ChoiceState, news: Delta, key: str, message: dict[str, Any]) -> dict[str, Any]:
        first, state.started = not state.started, True
        entry: dict[str, Any] = {
            "index": state.index,
            key: message,
            "logprobs": self._logprobs(news),
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        if self.with_token_ids:
            entry["token_ids"] = news.token_ids
            if first:
                entry["prompt_token_ids"] = state.prompt.token_ids
        return entry

    def _logprobs(self, news: Delta) -> dict[str, Any] | None:
        """Per token its own log-probability and exactly ``top_logprobs`` alternatives; None unless asked for."""
        if not self.request.logprobs:
            return None
        content = []
        for token_id, position in zip(news.token_ids, news.logprobs or [], strict=True):
            entry = self._token(token_id, position[token_id])
            best = by_rank(position, self.request.top_logprobs or 0)
            entry["top_logprobs"] = [self._token(token, logprob) for token, logprob in best]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = self.token_text(token_id, logprob)
        return {"token": text, "logprob": finite(logprob.logprob), "bytes": list(text.encode())}
