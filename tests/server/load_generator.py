"""Load a server with clients, some of which misbehave, kill its engine several times, and account for every request.

    python tests/server/load_generator.py [--requests 20000] [--clients 64] [--misbehaving 0.15] [--kills 5]
                                          [--seed 0] [-tp 2] [-pp 1] [-dp 2]

With several engines or ranks, any of their processes is killed.

Every response to a well-behaved client must equal that of the request run alone: a token that is lost, duplicated or of
another request changes it. A request that fails because an engine ended, or because there is none, is retried, as
clients do. At the end the counters must equal the requests sent, all pages must be free, no files or threads left open,
and the server's memory must not have grown. The results are one line of JSON; the exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import hostile_cases  # noqa: E402
import psutil  # noqa: E402
from hostile_cases.requests import BODY_LIMIT, COMPLETIONS, post_json  # noqa: E402
from load_findings import Findings  # noqa: E402
from load_requests import NUM_REQUESTS, expected_outputs, requests  # noqa: E402
from raw_http import MODEL, TIMEOUT, linger, metrics, num_series, read_response, read_slowly, read_until, state  # noqa: E402

from aiakq.server.background import RunningServer, start_in_background  # noqa: E402

#: Codes of errors after which a request is retried.
RETRIED = frozenset({"engine_restarted", "engine_restarting", "overloaded"})
#: Megabytes by which memory may grow per ten thousand requests, after a warm-up.
MAX_GROWTH = 1.0
#: How clients misbehave.
MISBEHAVIOURS = (
    *("disconnects", "resets", "stalls", "reads slowly"),
    *("sends garbage", "exceeds limits", "is aborted", "sends half"),
)


class LoadGenerator:
    """One run.

    num_active  clients with a request; none starts while ``may_start`` is not set.
    """

    def __init__(self, args: argparse.Namespace, server: RunningServer) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.args, self.server = args, server
        self.requests = requests()
        self.expected = expected_outputs(self.requests)
        self.findings = Findings()
        self.numbers = itertools.count()
        self.num_active = 0
        self.rng = random.Random(f"{args.seed} kills")
        self.num_kills = 0
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def run(self) -> dict[str, Any]:
        before = state(self.server.process.pid) | {"series": num_series(await metrics(self.address))}
        began = time.monotonic()
        watch = asyncio.create_task(self.watch())
        await asyncio.gather(*(self.client() for _ in range(self.args.clients)))
        watch.cancel()
        seconds = time.monotonic() - began
        await self.account(before)
        return self.findings.report(seconds)

    # --- clients

    async def client(self) -> None:
        while (number := next(self.numbers)) < self.args.requests:
            await self.may_start.wait()
            self.num_active += 1
            try:
                rng = random.Random(f"{self.args.seed}/{number}")
                if rng.random() < self.args.misbehaving:
                    await self.misbehave(number, rng)
                else:
                    self.findings.num_good += 1
                    await self.complete(number, rng.randrange(NUM_REQUESTS), rng.random() < 0.6)
            except Exception as failure:  # any exception is a failure of the run
                self.findings.fail(f"request {number}: {type(failure).__name__} {failure}")
            finally:
                self.num_active -= 1

    async def complete(self, number: int, which: int, streamed: bool, pause: float = 0.0) -> None:
        """Send a request until it has a response, and compare that with the expected one."""
        deadline = time.monotonic() + 3 * TIMEOUT
        request = self.requests[which] | {"stream": streamed, "return_token_ids": True}
        while True:
            failure, choices = await self.send(number, request, pause)
            if failure is None:
                break
            if failure["code"] not in RETRIED or time.monotonic() > deadline:
                self.findings.fail(f"request {number}: {failure}")
                return
            self.findings.retries[failure["code"]] += 1
            await asyncio.sleep(1.0)
        self.findings.num_answered += 1
        if choices != self.expected[which]:
            self.findings.fail(f"request {number} got {choices} and not {self.expected[which]}")

    async def send(self, number: int, request: dict[str, Any], pause: float) -> tuple[dict[str, Any] | None, Any]:
        """Send a request once; return (error, None) or (None, choices)."""
        self.findings.min_received += 1
        reader, writer = await self.connect()
        try:
            writer.write(post_json(COMPLETIONS, request))
            if pause:
                answer = await read_slowly(reader, pause)
            else:
                answer = await asyncio.wait_for(read_response(reader), 2 * TIMEOUT)
        finally:
            writer.close()
        if answer.status != 200:
            return json.loads(answer.body)["error"], None
        if not request["stream"]:
            whole = json.loads(answer.body)
            self.note(number, whole["id"])
            self.findings.min_succeeded += 1
            return None, [self.choice(one) for one in whole["choices"]]
        *events, last, nothing = answer.body.decode().split("\n\n")
        if nothing:
            raise ValueError(f"a stream ends with {nothing[:80]!r}")
        if last != "data: [DONE]":
            return json.loads(last.removeprefix("data: "))["error"], None
        self.findings.min_succeeded += 1
        return None, self.joined(number, [json.loads(event.removeprefix("data: ")) for event in events])

    def joined(self, number: int, events: list[dict[str, Any]]) -> list[tuple[str, tuple[int, ...], str | None]]:
        """Return the choices of a streamed response."""
        if len({event["id"] for event in events}) != 1:
            raise ValueError("a stream has events of several responses")
        self.note(number, events[0]["id"])
        choices: dict[int, dict[str, Any]] = {}
        for event in events:
            for part in event["choices"]:
                whole = choices.setdefault(part["index"], {"text": "", "token_ids": [], "finish_reason": None})
                if whole["finish_reason"] is not None:
                    raise ValueError("a choice continues after its finish reason")
                whole["text"] += part["text"]
                whole["token_ids"] += part["token_ids"]
                whole["finish_reason"] = part["finish_reason"]
        return [self.choice(choices[index]) for index in sorted(choices)]

    def choice(self, one: dict[str, Any]) -> tuple[str, tuple[int, ...], str | None]:
        return one["text"], tuple(one["token_ids"]), one["finish_reason"]

    def note(self, number: int, id: str) -> None:
        if id in self.findings.ids:
            self.findings.fail(f"request {number}: its id {id} is not unique")
        self.findings.ids.add(id)

    async def misbehave(self, number: int, rng: random.Random) -> None:
        how = rng.choice(MISBEHAVIOURS)
        findings = self.findings
        findings.misbehaved[how] += 1
        if how == "reads slowly":
            # Its response must still be the expected one.
            await self.complete(number, rng.randrange(NUM_REQUESTS), True, pause=0.02)
            return
        reader, writer = await self.connect()
        try:
            if how == "sends garbage":
                await self.send_garbage(writer, reader, rng)
            elif how == "exceeds limits":
                findings.min_received += 1
                size = rng.choice(
                    [{"prompt": "word " * 3000}, {"max_tokens": 5000}, {"n": 129}, {"prompt": ["a"] * 500}]
                )
                writer.write(post_json(COMPLETIONS, {"prompt": "a"} | size))
                answer = await asyncio.wait_for(read_response(reader), 2 * TIMEOUT)
                if answer.status not in (400, 503):
                    findings.fail(f"request {number}: {size!r:.40} was answered {answer.status}")
            elif how == "sends half":
                sent = post_json(COMPLETIONS, self.requests[number % NUM_REQUESTS])
                writer.write(sent[: rng.randrange(len(sent))])
                findings.maybe_received += 1
                await asyncio.sleep(rng.random() * 0.1)
            else:
                await self.abandon(number, how, reader, writer, rng)
        except (ConnectionError, EOFError):
            pass  # the server may close the connection
        finally:
            if how == "resets":
                linger(writer, 0)
            writer.transport.abort()

    async def send_garbage(
        self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, rng: random.Random
    ) -> None:
        while True:
            case = hostile_cases.case(self.args.seed, rng.randrange(10**9))
            if not case.slow and case.leave == "reads":
                break
        self.findings.maybe_received += 20  # it may be a pipeline of requests
        self.findings.maybe_succeeded += 20
        for piece in case.pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1 << 16), 5)

    async def abandon(
        self, number: int, how: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
    ) -> None:
        """Start a long generation and do not read it to its end."""
        findings = self.findings
        findings.min_received += 1
        streamed = how == "is aborted" or rng.random() < 0.5
        request = {
            "prompt": "A long story",
            "max_tokens": 600,
            "ignore_eos": True,
            "stream": streamed,
            "n": rng.choice([1, 2]),
        }
        writer.write(post_json(COMPLETIONS, request))
        if how == "stalls":
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(rng.random() * 1.5)
        elif how != "is aborted":
            await asyncio.sleep(rng.random() * 0.3)
        else:
            await asyncio.wait_for(read_until(reader, b"\r\n\r\n"), 2 * TIMEOUT)
            first = await asyncio.wait_for(read_until(reader, b"\n\n"), 2 * TIMEOUT)
            if b'"id":"' not in first:
                return  # there is no engine
            id = first.split(b'"id":"')[1].split(b'"')[0].decode()
            other, sender = await self.connect()
            sender.write(post_json("/abort_requests", {"request_ids": [id]}))
            aborted = json.loads((await asyncio.wait_for(read_response(other), TIMEOUT)).body)
            sender.close()
            rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 2 * TIMEOUT)
            if aborted == {"aborted": 1} and b'"code":"aborted"' not in rest:
                findings.fail(f"request {number} was aborted and has no error: {rest[-300:]!r}")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, limit=1 << 22)
        linger(writer, 1)
        return reader, writer

    # --- the server

    async def watch(self) -> None:
        """Kill the engine at even intervals, then measure memory while nothing runs."""
        total, kills = self.args.requests, self.args.kills
        # Memory is measured after the last kill, because a new engine starts with less.
        kill_at = [int(total * 0.5 * (turn + 1) / (kills + 1)) for turn in range(kills)]
        measure_at = [int(total * part) for part in (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)]
        while kill_at or measure_at:
            await asyncio.sleep(0.05)
            done = self.findings.num_good + self.findings.misbehaved.total()
            if kill_at and done >= kill_at[0]:
                kill_at.pop(0)
                await self.kill_engine()
            elif measure_at and not kill_at and done >= measure_at[0]:
                measure_at.pop(0)
                self.may_start.clear()
                await self.idle()
                self.findings.memory.append((done, self.rss(), self.rss(engine=True)))
                self.may_start.set()
                print(
                    f"{done} requests, {len(self.findings.failures)} failures, memory {self.rss()} MB",
                    file=sys.stderr,
                    flush=True,
                )

    async def idle(self) -> None:
        while self.num_active:
            await asyncio.sleep(0.05)
        while (await metrics(self.address))["vllm:num_requests_running"]:
            await asyncio.sleep(0.05)

    def workers(self) -> list[int]:
        """Return the processes of engines and ranks in the order in which they started."""
        found = []
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("engine_process" in word or "rank_process" in word for word in process.cmdline()):
                    found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]

    def num_engines_started(self) -> int:
        """Return how many engines have been ready."""
        return sum(event.engine_pid is not None for event in self.server.events)

    def engine_pid(self) -> int:
        return [event.engine_pid for event in self.server.events if event.engine_pid is not None][-1]

    def rss(self, engine: bool = False) -> float:
        return state(self.engine_pid() if engine else self.server.process.pid)["rss_mb"]

    async def kill_engine(self) -> None:
        workers, started, killed = self.workers(), self.num_engines_started(), time.monotonic()
        os.kill(self.rng.choice(workers), signal.SIGKILL)
        self.num_kills += 1
        while self.num_engines_started() == started:
            if time.monotonic() > killed + 4 * TIMEOUT:
                self.findings.fail("no engine started after one was killed")
                return
            await asyncio.sleep(0.05)
        self.findings.recovery.append(round(time.monotonic() - killed, 1))

    async def account(self, before: dict[str, Any]) -> None:
        """Check the server after all clients are done."""
        findings = self.findings
        deadline = time.monotonic() + TIMEOUT
        while True:
            now, after = await metrics(self.address), state(self.server.process.pid)
            received = now["vllm:request_total"]
            success, failed = now["vllm:request_process_success_total"], now["vllm:request_process_fail_total"]
            checks = {
                "all pages are free": now["vllm:kv_cache_usage_perc"] == 0,
                "no request runs or waits": now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0,
                "every request is counted as ended once": received == success + failed,
                "no file is left open": after["files"] <= before["files"] + 2,
                "no thread is left running": after["threads"] <= before["threads"] + 8,
            }
            if all(checks.values()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        expected = findings.num_good + findings.misbehaved["reads slowly"]
        checks["every well-behaved request has one response"] = findings.num_answered == expected
        max_received = findings.min_received + findings.maybe_received
        checks["as many requests were received as sent"] = findings.min_received <= received <= max_received
        # Any request without a response that was read may have succeeded too.
        max_succeeded = findings.min_received + findings.maybe_succeeded
        checks["as many requests succeeded as have responses"] = findings.min_succeeded <= success <= max_succeeded
        checks["as many engines were restarted as killed"] = now["aiakq:engine_restarts_total"] == self.num_kills
        checks["/metrics has as many series as before"] = num_series(now) == before["series"]
        checks["the log has no traceback"] = not any("Traceback" in event.message for event in self.server.events)
        for name, passed in checks.items():
            if not passed:
                findings.fail(f"not true: {name} ({before} -> {after}; {received=} {success=} {failed=} {findings})")
        # Too few requests say nothing about growth.
        if self.args.requests >= 10_000 and findings.growth() > MAX_GROWTH:
            findings.fail(f"the server's memory grows: {findings.memory}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--misbehaving", type=float, default=0.15, help="fraction of the requests")
    parser.add_argument("--kills", type=int, default=5, help="times the engine is killed")
    parser.add_argument("--seed", type=int, default=0)
    for flag in ("-tp", "-pp", "-dp"):
        parser.add_argument(flag, type=int, default=1, help="as for serve")
    args = parser.parse_args()
    arguments = {
        "model": str(MODEL),
        "served_model_name": ["tinybooks"],
        "dtype": "float32",
        "num_gpu_blocks_override": 2049,
        "max_body_bytes": BODY_LIMIT,
        "max_connections_per_address": 1000,
        "enable_admin_routes": True,
        "max_engine_restarts": args.kills + 1,
        "max_queue_seconds": 10 * TIMEOUT,
        "tensor_parallel_size": args.tp,
        "pipeline_parallel_size": args.pp,
        "data_parallel_size": args.dp,
    }
    server = await asyncio.to_thread(start_in_background, arguments, None, 4 * TIMEOUT)
    load = LoadGenerator(args, server)
    workers = load.workers()
    try:
        found = await load.run()
        workers = load.workers()
    finally:
        code = await asyncio.to_thread(server.stop)
    if left := [pid for pid in workers if psutil.pid_exists(pid)]:
        found["broken"] += 1
        found["first_broken"].append(f"processes are left: {left}")
    if code:
        found["broken"] += 1
        found["first_broken"].append(f"the server ended with exit code {code}")
    print(json.dumps(found))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
