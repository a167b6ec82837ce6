"""HTTP client of ``bench serve``: streamed completions with a timestamp per chunk, and the server's own metrics."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aiakq.bench.workload import WorkloadRequest, vocab_size
from aiakq.errors import error
from aiakq.system.event_stream import EventReader

#: One line of the Prometheus text format: name, labels, value.
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

#: Prefixes of the metrics that ``server_counters`` reads.
_COUNTERS = ("vllm:prefix_cache_", "vllm:spec_decode_num_")
_POSITION = re.compile(r'position="(\d+)"')

#: Fields of a chat delta that carry generated tokens.
_TOKEN_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")


@dataclass
class Timing:
    """Timestamps of one request, in seconds of ``time.perf_counter``, and its result.

    scheduled      when it was due; ``sent`` is later if ``--max-concurrency`` delayed it, and 0 if it was never sent.
    token_times    arrival of every chunk of the response; the last chunk may carry only the finish reason.
    output_tokens  from the server's usage if ``counted``.
    error          one line, or None for a complete response, which has a finish reason and ends with [DONE].
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
        """Time to first token, in seconds."""
        return self.token_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency up to the last token, in seconds."""
        return self.token_times[-1] - self.sent

    @property
    def scheduled_e2el(self) -> float:
        """End-to-end latency from the scheduled time, in seconds, which includes the wait for a free slot."""
        return self.token_times[-1] - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a response of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gap in seconds before every chunk but the first."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True)
class ServedModel:
    """The served model, from ``/v1/models`` and ``/version``; None where the server reports nothing."""

    name: str
    vocab_size: int | None
    max_model_len: int | None
    server_version: str | None
    root: str | None = None


@dataclass(frozen=True)
class Endpoint:
    """The endpoint that requests are sent to, and the fields common to all of them.

    path   /v1/completions, or /v1/chat/completions with the prompt as a user message.
    extra  additional body fields, which override those set here.
    """

    path: str
    model: str
    ignore_eos: bool
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    def body(self, request: WorkloadRequest) -> dict[str, object]:
        """Return the JSON body of ``request``."""
        body: dict[str, object] = {
            "model": request.model or self.model,
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
    """Return a client without connection limits that ignores proxies of the environment, which would be measured."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def served_model(client: httpx.AsyncClient, name: str | None) -> ServedModel:
    """Return the served model ``name``, or the first one if it is None.

    Raises ``server_unreachable``, ``server_key``, ``no_answer`` and ``unknown_model``.
    """
    url = str(client.base_url).rstrip("/")
    try:
        answer = await client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise error("server_unreachable", url=url, reason=_one_line(problem)) from None
    if answer.status_code in (401, 403):
        sent = "rejects the API key that was sent" if "authorization" in client.headers else None
        raise error("server_key", url=url, problem=sent or "requires an API key, and none was sent")
    try:
        models = answer.json()["data"]
        names = [model["id"] for model in models]
    except (ValueError, KeyError, TypeError):
        reason = f"GET /v1/models has status {answer.status_code} and lists no models. Is {url} the address of an API?"
        raise error("no_answer", server=url, reason=reason) from None
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
    """Return the vocabulary size from the server's model folder, or None if it is not on this machine."""
    try:
        config = Path(root) / "config.json"
        return vocab_size(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


async def server_facts(client: httpx.AsyncClient) -> dict[str, str] | None:
    """Return the labels of ``aiakq:build_info`` (versions, model, device), or None if it is not an aiakq server."""
    try:
        answer = await client.get("/metrics")
    except httpx.HTTPError:
        return None
    found = re.search(r"^aiakq:build_info\{(.*)\} 1", answer.text, re.MULTILINE)
    return None if found is None else {key: value for key, value in _LABEL.findall(found[1]) if value}


async def server_counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the server's prefix-cache and speculation counters, without ``vllm:``; empty if it has none.

    Counters per draft position are named ``accepted.0``, ``accepted.1``, ...
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


async def complete(client: httpx.AsyncClient, endpoint: Endpoint, request: WorkloadRequest, timing: Timing) -> None:
    """Stream one greedy completion and fill in ``timing``. Failures are stored in ``timing.error``, not raised."""
    body = endpoint.body(request)
    stream_done = False
    timing.sent = time.perf_counter()
    try:
        async with client.stream("POST", endpoint.path, json=body) as response:
            if response.status_code != 200:
                timing.error = _http_error(response.status_code, await response.aread())
                return
            async for data in _events(response):
                now = time.perf_counter()
                if data == "[DONE]":
                    stream_done = True
                    break
                _record_event(json.loads(data), now, timing)
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as problem:
        timing.error = _one_line(problem)
    finally:
        timing.ended = time.perf_counter()
    if timing.error is None and not (stream_done and timing.finish_reason and timing.token_times):
        timing.error = "the stream ended before the response was complete"


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the ``data:`` fields of a server-sent event stream."""
    reader = EventReader()
    async for piece in response.aiter_bytes():
        for data in reader.feed(piece):
            yield data
    for data in reader.feed(b"\n"):
        yield data


def _record_event(event: dict[str, Any], now: float, timing: Timing) -> None:
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
        if delta is not None and not choice.get("finish_reason") and not any(delta.get(name) for name in _TOKEN_FIELDS):
            continue  # carries only the role
        # Chunks without text count: a token may be part of a character, or end of sequence.
        timing.token_times.append(now)
        timing.text += _text_of(delta) if delta is not None else choice.get("text") or ""
        timing.finish_reason = choice.get("finish_reason") or timing.finish_reason


def _text_of(delta: Mapping[str, Any]) -> str:
    """Return the text of a chat delta, including tool calls."""
    text = (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _http_error(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(json.loads(body))}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}"


def _message(event: dict[str, object]) -> str:
    problem = event["error"]
    return str(problem["message"] if isinstance(problem, dict) else problem)


def _one_line(problem: Exception) -> str:
    """Return an exception as one short line, or its type if it has no message, as some of httpx do."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text.rstrip(".")[:200]
