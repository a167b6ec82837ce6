"""Load a real server with clients of which some misbehave, kill its engine now and then, and account for every request.

    python tests/server/load.py [--requests 20000] [--clients 64] [--misbehaving 0.15] [--kills 5] [--seed 0]
                                [-tp 2] [-pp 1] [-dp 2]

With several engines or ranks, any of their processes is killed.

Every good client's answer must be the one that its request gets alone: a token that is lost, doubled or of another
request changes it. A request that an engine's death cuts, or that comes while there is none, is told so and sent again,
as clients do. At the end the counters must add up to what was sent, every page must be free, nothing be left open, and
the server's memory must not have grown. One line of JSON on standard output says what was found; the exit code is 1 if
anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import hostile_cases  # noqa: E402
import psutil  # noqa: E402
from hostile_cases.requests import BODY_LIMIT, COMPLETIONS, ask  # noqa: E402
from load_requests import VARIANTS, answers_alone, variants  # noqa: E402
from raw_http import MODEL, PATIENCE, linger, metrics, num_series, read_answer, read_until, slowly, state  # noqa: E402

from aiakq.server.background import RunningServer, start_in_background  # noqa: E402

#: What is told to a request that an engine's death touched: it is sent again.
AGAIN = frozenset({"engine_restarted", "engine_restarting", "overloaded"})
#: Megabytes of memory that may be added per ten thousand requests, once it is warm.
MOST_GROWTH = 1.0
WAYS = ("leaves", "resets", "stalls", "reads slowly", "sends garbage", "asks too much", "is aborted", "sends half")


@dataclass
class Findings:
    """What a run found. ``counted`` are requests to generate whose arrival the server must have counted."""

    broken: list[str] = field(default_factory=list)
    answered: int = 0
    again: collections.Counter[str] = field(default_factory=collections.Counter)
    misbehaved: collections.Counter[str] = field(default_factory=collections.Counter)
    ids: set[str] = field(default_factory=set)
    good: int = 0
    surely: int = 0
    perhaps: int = 0
    complete: int = 0
    perhaps_complete: int = 0
    recovery: list[float] = field(default_factory=list)
    memory: list[tuple[int, float, float]] = field(default_factory=list)

    def found(self, line: str) -> None:
        self.broken.append(line)
        if len(self.broken) <= 50:
            print(line, file=sys.stderr, flush=True)


class Load:
    """One run."""

    def __init__(self, asked: argparse.Namespace, server: RunningServer) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.asked, self.server = asked, server
        self.requests = variants()
        self.alone = answers_alone(self.requests)
        self.findings = Findings()
        self.numbers = itertools.count()
        self.at_work = 0
        self.draw = random.Random(f"{asked.seed} kills")
        self.num_kills = 0
        self.go = asyncio.Event()
        self.go.set()

    async def run(self) -> dict[str, Any]:
        before = state(self.server.process.pid) | {"series": num_series(await metrics(self.address))}
        began = time.monotonic()
        watch = asyncio.create_task(self.watch())
        await asyncio.gather(*(self.client() for _ in range(self.asked.clients)))
        watch.cancel()
        seconds = time.monotonic() - began
        await self.account(before)
        return self.told(seconds)

    # --- clients

    async def client(self) -> None:
        while (number := next(self.numbers)) < self.asked.requests:
            await self.go.wait()
            self.at_work += 1
            try:
                draw = random.Random(f"{self.asked.seed}/{number}")
                if draw.random() < self.asked.misbehaving:
                    await self.misbehave(number, draw)
                else:
                    self.findings.good += 1
                    await self.behave(number, draw.randrange(VARIANTS), draw.random() < 0.6)
            except Exception as failure:  # whatever it is, it is a finding
                self.findings.found(f"request {number}: {type(failure).__name__} {failure}")
            finally:
                self.at_work -= 1

    async def behave(self, number: int, which: int, streamed: bool, pause: float = 0.0) -> None:
        """Ask until there is an answer; it must be the right one."""
        deadline = time.monotonic() + 3 * PATIENCE
        request = self.requests[which] | {"stream": streamed, "return_token_ids": True}
        while True:
            failure, choices = await self.ask(number, request, pause)
            if failure is None:
                break
            if failure["code"] not in AGAIN or time.monotonic() > deadline:
                self.findings.found(f"request {number}: {failure}")
                return
            self.findings.again[failure["code"]] += 1
            await asyncio.sleep(1.0)
        self.findings.answered += 1
        if choices != self.alone[which]:
            self.findings.found(f"request {number} got {choices} and not {self.alone[which]}")

    async def ask(self, number: int, request: dict[str, Any], pause: float) -> tuple[dict[str, Any] | None, Any]:
        """(error, None), or (None, choices)."""
        self.findings.surely += 1
        reader, writer = await self.connect()
        try:
            writer.write(ask(COMPLETIONS, request))
            if pause:
                answer = await slowly(reader, pause)
            else:
                answer = await asyncio.wait_for(read_answer(reader), 2 * PATIENCE)
        finally:
            writer.close()
        if answer.status != 200:
            return json.loads(answer.body)["error"], None
        if not request["stream"]:
            whole = json.loads(answer.body)
            self.note(number, whole["id"])
            self.findings.complete += 1
            return None, [self.choice(one) for one in whole["choices"]]
        *events, last, nothing = answer.body.decode().split("\n\n")
        if nothing:
            raise ValueError(f"a stream ends with {nothing[:80]!r}")
        if last != "data: [DONE]":
            return json.loads(last.removeprefix("data: "))["error"], None
        self.findings.complete += 1
        return None, self.joined(number, [json.loads(event.removeprefix("data: ")) for event in events])

    def joined(self, number: int, events: list[dict[str, Any]]) -> list[tuple[str, tuple[int, ...], str | None]]:
        """The choices that the events of a stream make."""
        if len({event["id"] for event in events}) != 1:
            raise ValueError("a stream has events of several answers")
        self.note(number, events[0]["id"])
        choices: dict[int, dict[str, Any]] = {}
        for event in events:
            for part in event["choices"]:
                whole = choices.setdefault(part["index"], {"text": "", "token_ids": [], "finish_reason": None})
                if whole["finish_reason"] is not None:
                    raise ValueError("a choice goes on after its end")
                whole["text"] += part["text"]
                whole["token_ids"] += part["token_ids"]
                whole["finish_reason"] = part["finish_reason"]
        return [self.choice(choices[index]) for index in sorted(choices)]

    def choice(self, one: dict[str, Any]) -> tuple[str, tuple[int, ...], str | None]:
        return one["text"], tuple(one["token_ids"]), one["finish_reason"]

    def note(self, number: int, id: str) -> None:
        if id in self.findings.ids:
            self.findings.found(f"request {number}: another one had the id {id}")
        self.findings.ids.add(id)

    async def misbehave(self, number: int, draw: random.Random) -> None:
        way = draw.choice(WAYS)
        findings = self.findings
        findings.misbehaved[way] += 1
        if way == "reads slowly":
            # Slow, and still its answer is the right one.
            await self.behave(number, draw.randrange(VARIANTS), True, pause=0.02)
            return
        reader, writer = await self.connect()
        try:
            if way == "sends garbage":
                await self.garbage(writer, reader, draw)
            elif way == "asks too much":
                findings.surely += 1
                size = draw.choice(
                    [{"prompt": "word " * 3000}, {"max_tokens": 5000}, {"n": 129}, {"prompt": ["a"] * 500}]
                )
                writer.write(ask(COMPLETIONS, {"prompt": "a"} | size))
                answer = await asyncio.wait_for(read_answer(reader), 2 * PATIENCE)
                if answer.status not in (400, 503):
                    findings.found(f"request {number}: {size!r:.40} was answered {answer.status}")
            elif way == "sends half":
                sent = ask(COMPLETIONS, self.requests[number % VARIANTS])
                writer.write(sent[: draw.randrange(len(sent))])
                findings.perhaps += 1
                await asyncio.sleep(draw.random() * 0.1)
            else:
                await self.long_one(number, way, reader, writer, draw)
        except (ConnectionError, EOFError):
            pass  # it had it coming
        finally:
            if way == "resets":
                linger(writer, 0)
            writer.transport.abort()

    async def garbage(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, draw: random.Random) -> None:
        while True:
            case = hostile_cases.case(self.asked.seed, draw.randrange(10**9))
            if not case.slow and case.leave == "reads":
                break
        self.findings.perhaps += 20  # a pipeline of requests, some of them to generate
        self.findings.perhaps_complete += 20
        for piece in case.pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1 << 16), 5)

    async def long_one(
        self, number: int, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: random.Random
    ) -> None:
        """A long answer that nobody waits for to its end."""
        findings = self.findings
        findings.surely += 1
        streamed = way == "is aborted" or draw.random() < 0.5
        request = {
            "prompt": "A long story",
            "max_tokens": 600,
            "ignore_eos": True,
            "stream": streamed,
            "n": draw.choice([1, 2]),
        }
        writer.write(ask(COMPLETIONS, request))
        if way == "stalls":
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(draw.random() * 1.5)
        elif way != "is aborted":
            await asyncio.sleep(draw.random() * 0.3)
        else:
            await asyncio.wait_for(read_until(reader, b"\r\n\r\n"), 2 * PATIENCE)
            first = await asyncio.wait_for(read_until(reader, b"\n\n"), 2 * PATIENCE)
            if b'"id":"' not in first:
                return  # refused, for want of an engine
            id = first.split(b'"id":"')[1].split(b'"')[0].decode()
            other, sender = await self.connect()
            sender.write(ask("/abort_requests", {"request_ids": [id]}))
            told = json.loads((await asyncio.wait_for(read_answer(other), PATIENCE)).body)
            sender.close()
            rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 2 * PATIENCE)
            if told == {"aborted": 1} and b'"code":"aborted"' not in rest:
                findings.found(f"request {number} was aborted and not told so: {rest[-300:]!r}")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, limit=1 << 22)
        linger(writer, 1)
        return reader, writer

    # --- the server

    async def watch(self) -> None:
        """Kill the engine at even distances, and look at the memory when nothing runs."""
        total, kills = self.asked.requests, self.asked.kills
        # The memory is looked at after the last of them: an engine that is replaced begins anew.
        kill_at = [int(total * 0.5 * (turn + 1) / (kills + 1)) for turn in range(kills)]
        look_at = [int(total * part) for part in (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)]
        while kill_at or look_at:
            await asyncio.sleep(0.05)
            done = self.findings.good + self.findings.misbehaved.total()
            if kill_at and done >= kill_at[0]:
                kill_at.pop(0)
                await self.kill_engine()
            elif look_at and not kill_at and done >= look_at[0]:
                look_at.pop(0)
                self.go.clear()
                await self.idle()
                self.findings.memory.append((done, self.rss(), self.rss(engine=True)))
                self.go.set()
                print(
                    f"{done} requests, {len(self.findings.broken)} broken, memory {self.rss()} MB",
                    file=sys.stderr,
                    flush=True,
                )

    async def idle(self) -> None:
        while self.at_work:
            await asyncio.sleep(0.05)
        while (await metrics(self.address))["vllm:num_requests_running"]:
            await asyncio.sleep(0.05)

    def workers(self) -> list[int]:
        """The processes of engines and ranks, in the order in which they started."""
        found = []
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("engine_process" in word or "rank_process" in word for word in process.cmdline()):
                    found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]

    def engines_started(self) -> int:
        """Engines that have been ready."""
        return sum(event.engine_pid is not None for event in self.server.events)

    def engine_pid(self) -> int:
        return [event.engine_pid for event in self.server.events if event.engine_pid is not None][-1]

    def rss(self, engine: bool = False) -> float:
        return state(self.engine_pid() if engine else self.server.process.pid)["rss_mb"]

    async def kill_engine(self) -> None:
        workers, started, killed = self.workers(), self.engines_started(), time.monotonic()
        os.kill(self.draw.choice(workers), signal.SIGKILL)
        self.num_kills += 1
        while self.engines_started() == started:
            if time.monotonic() > killed + 4 * PATIENCE:
                self.findings.found("no engine came after one that was killed")
                return
            await asyncio.sleep(0.05)
        self.findings.recovery.append(round(time.monotonic() - killed, 1))

    async def account(self, before: dict[str, Any]) -> None:
        """What must be true when everybody has gone."""
        findings = self.findings
        deadline = time.monotonic() + PATIENCE
        while True:
            now, after = await metrics(self.address), state(self.server.process.pid)
            received = now["vllm:request_total"]
            success, failed = now["vllm:request_process_success_total"], now["vllm:request_process_fail_total"]
            rest = {
                "every page is back": now["vllm:kv_cache_usage_perc"] == 0,
                "nothing runs or waits": now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0,
                "every request has ended once": received == success + failed,
                "no file is left open": after["files"] <= before["files"] + 2,
                "no thread is left": after["threads"] <= before["threads"] + 8,
            }
            if all(rest.values()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        rest["every good request was answered once"] = (
            findings.answered == findings.good + findings.misbehaved["reads slowly"]
        )
        rest["as many came as were sent"] = findings.surely <= received <= findings.surely + findings.perhaps
        left = findings.surely - findings.complete + findings.perhaps_complete
        rest["as many succeeded as were answered"] = findings.complete <= success <= findings.complete + left
        rest["engines were started again as often as they ended"] = now["aiakq:engine_restarts_total"] == self.num_kills
        rest["metrics have as many series as before"] = num_series(now) == before["series"]
        rest["nothing failed in the server itself"] = not any(
            "Traceback" in event.message for event in self.server.events
        )
        for name, good in rest.items():
            if not good:
                findings.found(
                    f"not so: {name} ({before} -> {after}; {received=} {success=} {failed=} {vars_of(findings)})"
                )
        # A few requests say nothing about ten thousand.
        if self.asked.requests >= 10_000 and self.growth() > MOST_GROWTH:
            findings.found(f"the server's memory grows: {findings.memory}")

    def growth(self, engine: bool = False) -> float:
        """Megabytes per ten thousand requests: the median of the slopes between any two looks (Theil and Sen's)."""
        looks = [(done, memory[engine]) for done, *memory in self.findings.memory]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(looks, 2) if b[0] > a[0]]
        return 10_000 * statistics.median(slopes) if slopes else 0.0

    def told(self, seconds: float) -> dict[str, Any]:
        findings = self.findings
        return {
            "requests": findings.good + findings.misbehaved.total(),
            "seconds": round(seconds, 1),
            "answered": findings.answered,
            "sent_again": dict(findings.again),
            "misbehaved": dict(findings.misbehaved),
            "kills": len(findings.recovery),
            "recovery_s": findings.recovery,
            "growth_mb_per_10k": {"server": round(self.growth(), 2), "engine": round(self.growth(engine=True), 2)},
            "memory_mb": findings.memory,
            "broken": len(findings.broken),
            "first_broken": findings.broken[:20],
        }


def vars_of(findings: Findings) -> dict[str, Any]:
    return {
        name: value for name, value in vars(findings).items() if isinstance(value, (int, float, collections.Counter))
    }


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--misbehaving", type=float, default=0.15, help="part of the requests")
    parser.add_argument("--kills", type=int, default=5, help="times the engine is killed")
    parser.add_argument("--seed", type=int, default=0)
    for flag in ("-tp", "-pp", "-dp"):
        parser.add_argument(flag, type=int, default=1, help="as for serve")
    asked = parser.parse_args()
    arguments = {
        "model": str(MODEL),
        "served_model_name": ["tinybooks"],
        "dtype": "float32",
        "num_gpu_blocks_override": 2049,
        "max_body_bytes": BODY_LIMIT,
        "max_connections_per_address": 1000,
        "enable_admin_routes": True,
        "max_engine_restarts": asked.kills + 1,
        "max_queue_seconds": 10 * PATIENCE,
        "tensor_parallel_size": asked.tp,
        "pipeline_parallel_size": asked.pp,
        "data_parallel_size": asked.dp,
    }
    server = await asyncio.to_thread(start_in_background, arguments, None, 4 * PATIENCE)
    load = Load(asked, server)
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
