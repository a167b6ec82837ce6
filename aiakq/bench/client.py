"""HTTP client of ``bench serve``: streamed completions with a time stamp per token, and the server's own metrics."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aiakq.bench.workload import Request, vocab_size
from aiakq.errors import error

#: One line of the Prometheus text format: name, labels, value.
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")

#: What is read of a server's metrics.
_COUNTERS = ("vllm:prefix_cache_", "vllm:spec_decode_num_")
_POSITION = re.compile(r'position="(\d+)"')

#: Fields of a piece of a chat answer that hold generated tokens.
_ANSWER = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")


@dataclass
class Timing:
    """The times of one request, in seconds of ``time.perf_counter``, and its result.

    scheduled      when it is due; ``sent`` is later if ``--max-concurrency`` delays it.
    token_times    arrival of every chunk of the response; the last one may hold only the end.
    output_tokens  as counted by the server; ``counted`` says whether it did.
    error          one line; None for a complete response: every choice finished and the stream ended with [DONE].
    """

    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.token_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency: up to the last token."""
        return self.token_times[-1] - self.sent

    @property
    def scheduled_e2el(self) -> float:
        """The same from the time at which it was due: what a user waits who does not know about slots."""
        return self.token_times[-1] - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gap before every chunk but the first."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True)
class ServedModel:
    """The served model, from ``/v1/models`` and ``/version``; None for what the server does not report."""

    name: str
    vocab_size: int | None
    max_model_len: int | None
    server_version: str | None
    root: str | None = None


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what every body holds besides the prompt.

    path   /v1/completions, or /v1/chat/completions with the prompt as a user's message.
    extra  further fields, which replace ours of the same name.
    """

    path: str
    model: str
    ignore_eos: bool
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON body of ``request``."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            body["messages"] = request.messages or [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra)


def open_client(base_url: str, api_key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """A client without limits of its own. Proxies from the environment are ignored: they would be measured too."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def served_model(client: httpx.AsyncClient, name: str | None) -> ServedModel:
    """The model ``name``, or the first that is served. Raises ``server_unreachable`` and ``unknown_model``."""
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        models = answer.json()["data"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as problem:
        raise error("server_unreachable", url=client.base_url, reason=_one_line(problem)) from None
    names = [model["id"] for model in models]
    chosen = next((model for model in models if name is None or model["id"] == name), None)
    if chosen is None:
        raise error("unknown_model", name=name, known=", ".join(names) or "nothing")
    size = chosen.get("vocab_size") or _local_vocab_size(chosen.get("root"))
    return ServedModel(
        chosen["id"], size, chosen.get("max_model_len"), await _server_version(client), chosen.get("root")
    )


async def _server_version(client: httpx.AsyncClient) -> str | None:
    try:
        version = (await client.get("/version")).json().get("version")
    except (httpx.HTTPError, ValueError, AttributeError):
        return None
    return version if isinstance(version, str) else None


def _local_vocab_size(root: Any) -> int | None:
    """The vocabulary of a server that names its model folder and runs on the same machine."""
    try:
        config = Path(root) / "config.json"
        return vocab_size(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


async def server_counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's counters of its prefix cache and of draft tokens since it started, without ``vllm:``; those of
    positions are ``accepted.0``, ``accepted.1``, ... Empty if not reported.
    """
    try:
        answer = await client.get("/metrics")
        answer.raise_for_status()
    except httpx.HTTPError:
        return {}
    totals: dict[str, float] = {}
    for line in answer.text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None and match["name"].startswith(_COUNTERS):
            position = _POSITION.search(line)
            name = match["name"].removeprefix("vllm:") if position is None else f"accepted.{position[1]}"
            totals[name] = totals.get(name, 0.0) + float(match["value"])
    return totals


async def complete(client: httpx.AsyncClient, endpoint: Endpoint, request: Request, timing: Timing) -> None:
    """Stream one greedy answer and fill ``timing``. A failure is written into it, not raised."""
    body = endpoint.body(request)
    complete_stream = False
    timing.sent = time.perf_counter()
    try:
        async with client.stream("POST", endpoint.path, json=body) as answer:
            if answer.status_code != 200:
                timing.error = _refusal(answer.status_code, await answer.aread())
                return
            async for data in _events(answer):
                now = time.perf_counter()
                if data == "[DONE]":
                    complete_stream = True
                    break
                _take(json.loads(data), now, timing)
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as problem:
        timing.error = _one_line(problem)
    finally:
        timing.ended = time.perf_counter()
    if timing.error is None and not (complete_stream and timing.finish_reason and timing.token_times):
        timing.error = "the stream ended before the answer was complete"


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    """The ``data:`` fields of a server-sent event stream."""
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def _take(event: dict[str, Any], now: float, timing: Timing) -> None:
    """Add one event of a completion stream to ``timing``."""
    if "error" in event:
        timing.error = _message(event)
        return
    if usage := event.get("usage"):
        timing.input_tokens = usage["prompt_tokens"]
        timing.output_tokens = usage["completion_tokens"]
        timing.counted = True
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if delta is not None and not choice.get("finish_reason") and not any(delta.get(name) for name in _ANSWER):
            continue  # the role, which comes before any token
        # Also without text: a token may end in the middle of a character, or be the end of the sequence.
        timing.token_times.append(now)
        timing.text += _text_of(delta) if delta is not None else choice.get("text") or ""
        timing.finish_reason = choice.get("finish_reason") or timing.finish_reason


def _text_of(delta: Mapping[str, Any]) -> str:
    """The text of a piece of a chat answer, calls of tools included."""
    text = (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(json.loads(body))}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}"


def _message(event: dict[str, Any]) -> str:
    problem = event["error"]
    return str(problem["message"] if isinstance(problem, dict) else problem)


def _one_line(problem: Exception) -> str:
    """An exception as one short line; httpx leaves some without any text."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text.rstrip(".")[:200]
