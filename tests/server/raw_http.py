"""HTTP over bare sockets for hostile.py and load.py, and what the server they test tells and holds."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile_cases.requests import head

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tinybooks"
#: Seconds for anything that has no promised time; more than enough on a busy machine.
PATIENCE = 120.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def read_answer(reader: asyncio.StreamReader, with_body: bool = True) -> Answer:
    """One HTTP answer. Raises EOFError or ValueError when it is none."""
    while True:
        head = await read_until(reader, b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) [\w -]*", first)
        if match is None:
            raise ValueError(f"no status line: {first[:80]!r}")
        if match[1] != "100":
            break
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if not with_body:
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size = int((await read_until(reader, b"\r\n"))[:-2], 16)
            chunk = await reader.readexactly(size + 2)
            if size == 0:
                break
            body += chunk[:-2]
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return Answer(int(match[1]), headers, body)


async def read_until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    try:
        return await reader.readuntil(end)
    except asyncio.IncompleteReadError as failure:
        raise EOFError(f"after {failure.partial[:60]!r}") from None


async def slowly(reader: asyncio.StreamReader, pause: float) -> Answer:
    """``read_answer`` piece by piece, with pauses."""
    taken = asyncio.StreamReader(limit=1 << 22)

    async def take() -> None:
        while piece := await reader.read(512):
            taken.feed_data(piece)
            await asyncio.sleep(pause)
        taken.feed_eof()

    taking = asyncio.create_task(take())
    try:
        return await asyncio.wait_for(read_answer(taken), 4 * PATIENCE)
    finally:
        taking.cancel()


def linger(writer: asyncio.StreamWriter, on: int) -> None:
    """Whether closing resets the connection: a hundred thousand need not wait for their ends."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))


async def metrics(address: tuple[str, int]) -> dict[str, float]:
    """Samples of /metrics that have no labels of their own, added over the engines."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
    try:
        writer.write(head("GET", "/metrics"))
        answer = await asyncio.wait_for(read_answer(reader), PATIENCE)
    finally:
        writer.close()
    lines = [line.rpartition(" ") for line in answer.body.decode().splitlines() if not line.startswith("#")]
    found: dict[str, float] = defaultdict(float)
    for name, _, value in lines:
        found[re.sub(r'\{engine="\d+",model_name="[^"]*"\}', "", name)] += float(value)
    return dict(found)


def num_series(found: dict[str, float]) -> int:
    """Series of /metrics that are there from the start: those of HTTP answers come with the first of their kind."""
    return sum(not name.startswith("http_requests_total") for name in found)


def state(pid: int) -> dict[str, Any]:
    """What a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    number = {name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads")}  # type: ignore[index]
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"rss_mb": round(number["VmRSS"] / 1024, 1), "threads": number["Threads"], "files": files}
