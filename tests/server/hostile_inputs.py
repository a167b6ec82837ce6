"""Send hostile HTTP inputs to a server and compare every response with the expected one.

    python tests/server/hostile_inputs.py [--count 100000] [--seed 0] [--clients 32] [--only WORDS] [--first INDEX]

With --media image, audio or video they are media in requests to a tiny model that reads them. Meanwhile well-behaved
clients stream; their
output must equal that of an idle server. At the end the server must be healthy and idle, with all pages free, correct
counters, no files left open and no traceback in its log. The results are printed as one line of JSON; the exit code is
1 if a check failed. Repeat a case with --count 1 and the --seed and --first of the line that names it.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import hostile_cases  # noqa: E402
from hostile_cases.answers import compared  # noqa: E402
from hostile_cases.films import FILMS, good_watching  # noqa: E402
from hostile_cases.media import MEDIA, good_chat  # noqa: E402
from hostile_cases.media_bodies import BODIES  # noqa: E402
from hostile_cases.media_host import media_server  # noqa: E402
from hostile_cases.requests import BODY_LIMIT, CHAT, COMPLETIONS, TIMES, Case, head, post_json  # noqa: E402
from hostile_cases.sounds import SOUNDS, good_hearing  # noqa: E402
from raw_http import MODEL, TIMEOUT, linger, measured, metrics, num_series, read_response, tree_mb  # noqa: E402

from aiakq.server.background import RunningServer, start_in_background  # noqa: E402

#: The template of tinybooks, with tools.
CHAT_TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif -%}
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] or '' }}{{ m['tool_calls'] | tojson if m['tool_calls'] else '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SERVED = {
    "model": str(MODEL),
    "unknown_fields": "refuse",
    "served_model_name": ["tinybooks"],
    "dtype": "float32",
    "num_gpu_blocks_override": 1025,
    "max_body_bytes": BODY_LIMIT,
    "max_connections_per_address": 1000,
    "enable_auto_tool_choice": True,
    "chat_template": CHAT_TEMPLATE,
    **TIMES,
}
#: Well-behaved requests that run meanwhile: greedy and seeded, with log-probabilities, n > 1 and penalties.
GOOD = [
    {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60, "ignore_eos": True},
    {"prompt": "The sea was", "temperature": 0.9, "seed": 7, "max_tokens": 40, "logprobs": 3},
    {"prompt": "It is a truth", "temperature": 0.8, "top_p": 0.9, "seed": 11, "n": 3, "max_tokens": 25},
    {"prompt": [5, 99, 1000, 17], "temperature": 0, "max_tokens": 50, "repetition_penalty": 1.2, "ignore_eos": True},
]
GOOD_CLIENTS = 2
#: Kind of media -> families of its cases, and the well-behaved request with one.
BY_KIND = {
    "image": ({**MEDIA, **BODIES}, good_chat),
    "audio": (SOUNDS, good_hearing),
    "video": (FILMS, good_watching),
}
#: Memory that all processes may keep: caches of embeddings and pages, and heaps of the workers of the tokenizer.
KEPT_MB = 512


@dataclass
class Findings:
    """What a run found.

    failures  lines that name a case and its failed check.
    kinds     number of cases by family; ``statuses`` of responses by status.
    seconds   response times of fast cases.
    streams   number of streams of well-behaved clients.
    """

    failures: list[str] = field(default_factory=list)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: list[float] = field(default_factory=list)
    streams: int = 0


# --- one case ---------------------------------------------------------------------------------------------------------


async def try_case(address: tuple[str, int], case: Case, findings: Findings) -> str | None:
    """Send a case; return how a response differs from the expected one, or None."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    linger(writer, 1)
    sending = asyncio.create_task(send(writer, case))
    try:
        if case.leave == "reads":
            problem = await read_all(reader, writer, case, findings)
        elif case.leave == "reads some":
            problem = await read_some(reader, case, findings)
        else:
            await sending
            problem = await leave(reader, writer, case.leave)
        if not case.slow and case.leave == "reads":
            findings.seconds.append(time.perf_counter() - began)
        return problem
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()


async def send(writer: asyncio.StreamWriter, case: Case) -> None:
    """Send all pieces; the server may close the connection before."""
    with contextlib.suppress(ConnectionError):
        for piece in case.pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            else:
                await asyncio.sleep(piece)


async def read_all(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, case: Case, findings: Findings
) -> str | None:
    """Read the expected responses, and check whether the connection is closed or usable afterwards."""
    for number, expected in enumerate(case.answers):
        try:
            answer = await asyncio.wait_for(read_response(reader, expected.body), TIMEOUT)
        except TimeoutError:
            return f"response {number} did not come"
        except (ConnectionError, EOFError, ValueError) as failure:
            return f"response {number} ended early: {type(failure).__name__} {failure}"
        findings.statuses[str(answer.status)] += 1
        problem = compared(answer, expected)
        if problem:
            return f"response {number}: {problem}"
    if case.closed is True:
        try:
            rest = await asyncio.wait_for(reader.read(1 << 16), TIMEOUT)
        except TimeoutError:
            return "the connection stayed open"
        except ConnectionError:
            rest = b""
        return f"unexpected bytes: {rest[:100]!r}" if rest else None
    if case.closed is False:
        # The connection serves another request, and no bytes precede its response.
        writer.write(head("GET", "/version"))
        try:
            answer = await asyncio.wait_for(read_response(reader), TIMEOUT)
        except (TimeoutError, ConnectionError, EOFError, ValueError) as failure:
            return f"the connection is unusable afterwards: {type(failure).__name__} {failure}"
        if answer.status != 200 or set(json.loads(answer.body)) != {"version"}:
            return f"the next response is of another request: {answer.body[:100]!r}"
    return None


async def read_some(reader: asyncio.StreamReader, case: Case, findings: Findings) -> str | None:
    """Read what arrives within 0.3 s; it must be a valid response, if there is one."""
    try:
        answer = await asyncio.wait_for(read_response(reader), 0.3)
    except (TimeoutError, ConnectionError, EOFError):
        return None
    except ValueError as failure:
        return f"no valid response: {failure}"
    findings.statuses[str(answer.status)] += 1
    return compared(answer, case.answers[0])


async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: str) -> None:
    if how == "half-closes":
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(100), 0.2)
    elif how == "closes":
        linger(writer, 0)


# --- well-behaved clients ---------------------------------------------------------------------------------------------


async def stream(address: tuple[str, int], request: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return each choice of a streamed response; raise ValueError if the stream is incomplete."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    try:
        sent = request | {"stream": True, "return_token_ids": True}
        writer.write(post_json(CHAT if "messages" in request else COMPLETIONS, sent))
        async with asyncio.timeout(2 * TIMEOUT):  # wait_for of Python 3.11 may swallow a cancellation
            answer = await read_response(reader)
    finally:
        writer.close()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.body[:200]!r}")
    *events, last, nothing = answer.body.decode().split("\n\n")
    if (last, nothing) != ("data: [DONE]", ""):
        raise ValueError(f"the stream was cut: {last[:200]}")
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in json.loads(event.removeprefix("data: "))["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": []})
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content") or ""
            choice["token_ids"] += part.get("token_ids") or []
            if part["logprobs"]:
                choice["logprobs"] += part["logprobs"]["token_logprobs"]
            choice |= {name: part[name] for name in ("finish_reason", "cum_log_probs") if part.get(name) is not None}
    return choices


async def good_client(
    address: tuple[str, int],
    first: int,
    good: list[dict[str, Any]],
    expected: list[Any],
    findings: Findings,
    times: list[float],
) -> None:
    """Stream the well-behaved requests until this task is cancelled."""
    turn = first
    while True:
        turn += 1
        which = turn % len(good)
        began = time.perf_counter()
        try:
            found = await stream(address, good[which])
        except (OSError, EOFError, ValueError, TimeoutError) as failure:
            findings.failures.append(f"good stream {which}: {type(failure).__name__} {failure}")
            await asyncio.sleep(0.1)
            continue
        times.append(time.perf_counter() - began)
        findings.streams += 1
        if found != expected[which]:
            findings.failures.append(f"good stream {which} differs from the stream of an idle server")
        await asyncio.sleep(0.1)


# --- the run ----------------------------------------------------------------------------------------------------------


class HostileRun:
    """One run of cases beside well-behaved clients.

    slow  tasks of cases that take seconds, at most 128.
    """

    def __init__(self, args: argparse.Namespace, server: RunningServer) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.args, self.server = args, server
        self.findings = Findings()
        self.indices = iter(range(args.first, args.first + args.count))
        self.slow: set[asyncio.Task[None]] = set()
        self.slow_slots = asyncio.Semaphore(128)
        self.began = 0.0
        self.families, self.good = hostile_cases.FAMILIES, GOOD
        if args.media:
            self.families, good = BY_KIND[args.media]
            self.good = [*GOOD[:3], good()]

    async def run(self) -> dict[str, Any]:
        address, findings = self.address, self.findings
        expected = [await stream(address, request) for request in self.good]
        alone: list[float] = []
        for request in self.good * 3:
            began = time.perf_counter()
            await stream(address, request)
            alone.append(time.perf_counter() - began)
        before = measured(self.server.process.pid) | {"series": num_series(await metrics(address))}
        meanwhile: list[float] = []
        good = [
            asyncio.create_task(good_client(address, i, self.good, expected, findings, meanwhile))
            for i in range(GOOD_CLIENTS)
        ]
        self.began = time.monotonic()
        await asyncio.gather(*(self.client() for _ in range(self.args.clients)))
        await asyncio.gather(*self.slow)
        seconds = time.monotonic() - self.began
        for task in good:
            task.cancel()
        await asyncio.gather(*good, return_exceptions=True)
        after = await at_rest(self.server, address, before, findings)
        return {
            **self.report(seconds),
            "good_stream_ms": {
                name: round(1000 * quantile(sorted(found), 0.5), 1)
                for name, found in (("alone", alone), ("meanwhile", meanwhile))
                if found
            },
            "memory_mb": [{key: each[key] for key in each if key.endswith("_mb")} for each in (before, after)],
        }

    async def client(self) -> None:
        """Try cases until none are left."""
        for index in self.indices:
            # In a thread: large files take seconds, in which the other clients would be too slow for the server.
            case = await asyncio.to_thread(hostile_cases.case, self.args.seed, index, self.families)
            if self.args.only and not re.search(self.args.only, case.kind):
                continue
            if case.slow:
                await self.slow_slots.acquire()
                task = asyncio.create_task(self.try_slow(index, case))
                self.slow.add(task)
                task.add_done_callback(self.slow.discard)
            else:
                await self.try_one(index, case)
            done = self.findings.kinds.total()
            if done % 1000 == 0:
                seconds, rss = time.monotonic() - self.began, tree_mb(self.server.process.pid)
                line = f"{done} cases, {len(self.findings.failures)} failures, {seconds:.0f} s, {rss:.0f} MB"
                print(line, file=sys.stderr, flush=True)

    async def try_one(self, index: int, case: Case) -> None:
        findings = self.findings
        try:
            problem = await try_case(self.address, case, findings)
        except OSError as failure:
            problem = f"no connection: {failure}"
        findings.kinds[case.kind.partition(":")[0]] += 1
        if problem:
            line = f"--seed {self.args.seed} --first {index} ({case.kind}): {problem}"
            findings.failures.append(line)
            if len(findings.failures) <= 50:
                print(line, file=sys.stderr, flush=True)

    async def try_slow(self, index: int, case: Case) -> None:
        try:
            await self.try_one(index, case)
        finally:
            self.slow_slots.release()

    def report(self, seconds: float) -> dict[str, Any]:
        findings, times = self.findings, sorted(self.findings.seconds)
        return {
            "cases": findings.kinds.total(),
            "seed": self.args.seed,
            "seconds": round(seconds, 1),
            "broken": len(findings.failures),
            "first_broken": findings.failures[:20],
            "good_streams": findings.streams,
            "kinds": dict(sorted(findings.kinds.items())),
            "statuses": dict(sorted(findings.statuses.items())),
            "answer_ms": {f"p{at}": round(1000 * quantile(times, at / 100), 1) for at in (50, 99)} if times else None,
        }


async def at_rest(
    server: RunningServer, address: tuple[str, int], before: dict[str, Any], findings: Findings
) -> dict[str, Any]:
    """Wait until the server is idle and check that it holds no resources of past requests."""
    failures = findings.failures
    deadline = time.monotonic() + TIMEOUT
    while True:
        found, after = await metrics(address), measured(server.process.pid)
        idle = found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        ended = found["vllm:request_process_success_total"] + found["vllm:request_process_fail_total"]
        rest = {
            "sequences still run": idle,
            "pages are not free": found["vllm:kv_cache_usage_perc"] == 0,
            "requests are not counted as ended": found["vllm:request_total"] == ended,
            "files are left open": after["files"] <= before["files"] + 2,
            "threads are left": after["threads"] <= before["threads"] + 4 + (os.cpu_count() or 1),  # asyncio's pool
            "memory is kept": after["all_mb"] <= before["all_mb"] + KEPT_MB,
        }
        if all(rest.values()) or time.monotonic() > deadline:
            failures += [f"afterwards: {name} ({before} -> {after})" for name, good in rest.items() if not good]
            break
        await asyncio.sleep(0.1)
    if num_series(found) != before["series"]:
        failures.append(f"afterwards: {num_series(found)} series of metrics and not {before['series']}")
    if found["aiakq:engine_restarts_total"]:
        failures.append("afterwards: the engine was started again")
    if restarts := found["aiakq:tokenizer_restarts_total"]:
        failures.append(f"afterwards: processes of the tokenizer were replaced {restarts:g} times")
    reader, writer = await asyncio.open_connection(*address)
    writer.write(head("GET", "/health"))
    if (await read_response(reader)).status != 200:
        failures.append("afterwards: the server is not healthy")
    writer.close()
    own = [event.message for event in server.events if event.kind == "log" and "Traceback" in event.message]
    failures += [f"in the log: {line[-300:]}" for line in own]
    return after


def quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@contextlib.asynccontextmanager
async def served(arguments: dict[str, Any]) -> AsyncIterator[RunningServer]:
    server = await asyncio.to_thread(start_in_background, arguments, None, 240.0)
    try:
        yield server
    finally:
        code = await asyncio.to_thread(server.stop)
        if code:
            raise SystemExit(f"the server ended with exit code {code}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--clients", type=int, default=32, help="cases at a time, without the slow ones")
    parser.add_argument("--only", default="", help="only cases whose kind matches this regular expression")
    parser.add_argument("--parser", default="hermes", help="--tool-call-parser of the server")
    parser.add_argument("--media", choices=list(BY_KIND), help="hostile media instead of other requests")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        arguments = media_server(stack, args.media) if args.media else SERVED
        async with served(arguments | {"tool_call_parser": args.parser}) as server:
            found = await HostileRun(args, server).run()
    print(json.dumps(found))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
