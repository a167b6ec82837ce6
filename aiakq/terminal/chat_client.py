"""HTTP client of ``aiakq chat``, which streams answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import httpx

from aiakq.errors import AiakqError, error
from aiakq.system.event_stream import EventReader

#: Seconds to wait for a connection, and for the next piece of an answer.
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass
class Answer:
    """An answer, possibly still being streamed.

    tokens         its tokens and their log-probabilities, if requested.
    first, ended   seconds from sending the request to the first token and to the end; 0 before.
    stopped        whether the user stopped it.
    """

    model: str
    text: str = ""
    reasoning: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first: float = 0.0
    ended: float = 0.0
    stopped: bool = False

    def add(self, chunk: Mapping[str, Any], seconds: float) -> None:
        """Add one chunk of a stream, received after ``seconds``."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text, thought = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.text, self.reasoning = self.text + text, self.reasoning + thought
            if (text or thought) and not self.first:
                self.first = seconds
            for token in (choice.get("logprobs") or {}).get("content") or ():
                self.tokens.append((token["token"], token["logprob"]))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.ended = seconds

    @property
    def num_tokens(self) -> int | None:
        """Number of generated tokens, if the server reports it."""
        return self.usage.get("completion_tokens")

    @property
    def tokens_per_second(self) -> float | None:
        """Generation speed, excluding the first token."""
        between = self.ended - self.first
        return (self.num_tokens - 1) / between if self.num_tokens and self.num_tokens > 1 and between > 0 else None

    def document(self) -> dict[str, object]:
        """Return the answer as JSON values, for --json."""
        return {
            "model": self.model,
            "text": self.text,
            "reasoning": self.reasoning or None,
            "finish_reason": self.finish_reason,
            "usage": self.usage or None,
            "ttft_ms": 1000 * self.first,
            "seconds": self.ended,
            "tokens_per_second": self.tokens_per_second,
        }


class ChatServer:
    """An OpenAI-compatible server, and the selected model on it."""

    def __init__(self, url: str, api_key: str | None, model: str | None = None) -> None:
        """Raises ``server_unreachable``, ``no_answer`` and ``unknown_model``."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, trust_env=False)
        modalities = self._models()
        if model is not None and model not in modalities:
            raise error("unknown_model", name=model, known=", ".join(modalities) or "nothing")
        self.model = model or next(iter(modalities))
        self._modalities = modalities[self.model]

    def close(self) -> None:
        self._client.close()

    def check_reads_images(self, option: str) -> None:
        """Raise ``unsupported_parameter`` if the server says that the model reads no images; most say nothing."""
        if isinstance(self._modalities, list) and "image" not in self._modalities:
            raise error("unsupported_parameter", param=option, reason=f"{self.model} reads text only")

    def _models(self) -> dict[str, object]:
        """Return what each model reads by its name; None if the server does not say."""
        try:
            answer = self._client.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            raise self._unreachable(problem) from None
        self._check(answer)
        try:
            names = {str(card["id"]): card.get("input_modalities") for card in answer.json()["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            names = {}
        if not names:
            raise self._failed("it lists no model at /v1/models.")
        return names

    def ask(
        self, messages: Sequence[Mapping[str, object]], params: Mapping[str, object], logprobs: bool
    ) -> Iterator[Answer]:
        """Yield the growing answer after every chunk. Raises ``server_unreachable`` and ``no_answer``.

        Closing the iterator closes the connection, which makes the server stop generating.
        """
        body: dict[str, object] = {"model": self.model, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if logprobs:
            body["logprobs"] = True
        answer, began = Answer(self.model), time.perf_counter()
        try:
            request = self._client.stream("POST", f"{self.url}/v1/chat/completions", json=body | dict(params))
            with request as response:
                if response.status_code != 200:
                    response.read()
                self._check(response)
                for data in events(response.iter_bytes()):
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise self._failed(_message(chunk))
                    answer.add(chunk, time.perf_counter() - began)
                    yield answer
                    if answer.stopped:
                        return
        except httpx.RemoteProtocolError:
            raise self._failed("the connection ended in the middle of it.") from None
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            raise self._unreachable(problem) from None
        except ValueError:
            raise self._failed("it sent invalid JSON.") from None

    def _check(self, response: httpx.Response) -> None:
        """Raise ``request_refused`` with the server's message if it rejected the request."""
        if response.status_code == 200:
            return
        try:
            reason = _message(response.json())
        except ValueError:
            reason = f"status {response.status_code}."
        raise error("request_refused", server=self.url, reason=reason)

    def _failed(self, reason: str) -> AiakqError:
        return error("no_answer", server=self.url, reason=reason)

    def _unreachable(self, problem: Exception) -> AiakqError:
        reason = " ".join(str(problem).split()) or type(problem).__name__
        return error("server_unreachable", url=self.url, reason=reason.rstrip("."))


def events(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of server-sent events, up to [DONE]. Raises httpx.RemoteProtocolError if that is missing."""
    reader = EventReader()
    for data in (data for piece in chain(pieces, [b"\n"]) for data in reader.feed(piece)):
        if data == "[DONE]":
            return
        yield data
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


def _message(body: object) -> str:
    """Return the message in an error body."""
    detail = body.get("error") if isinstance(body, dict) else None
    message = detail.get("message") if isinstance(detail, dict) else None
    return message if isinstance(message, str) else json.dumps(body)


def common_tokens(one: Answer, two: Answer) -> int:
    """Return the number of leading tokens that two answers have in common."""
    count = 0
    for (first, _), (second, _) in zip(one.tokens, two.tokens, strict=False):
        if first != second:
            break
        count += 1
    return count
