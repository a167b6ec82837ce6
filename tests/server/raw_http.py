"""HTTP over plain sockets for hostile_inputs.py and load_generator.py, and the server's metrics and resources."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from hostile_cases.requests import head

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tinybooks"
#: Seconds for anything without a specified limit; more than enough on a busy machine.
TIMEOUT = 120.0


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


async def read_response(reader: asyncio.StreamReader, with_body: bool = True) -> Response:
    """Read one HTTP response; raise EOFError or ValueError if it is none."""
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
    return Response(int(match[1]), headers, body)


async def read_until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    try:
        return await reader.readuntil(end)
    except asyncio.IncompleteReadError as failure:
        raise EOFError(f"after {failure.partial[:60]!r}") from None


async def read_slowly(reader: asyncio.StreamReader, pause: float) -> Response:
    """Read a response like ``read_response``, in small pieces with pauses of ``pause`` seconds."""
    received = asyncio.StreamReader(limit=1 << 22)

    async def receive() -> None:
        while piece := await reader.read(512):
            received.feed_data(piece)
            await asyncio.sleep(pause)
        received.feed_eof()

    receiving = asyncio.create_task(receive())
    try:
        return await asyncio.wait_for(read_response(received), 4 * TIMEOUT)
    finally:
        receiving.cancel()


def linger(writer: asyncio.StreamWriter, on: int) -> None:
    """Set SO_LINGER to 0 seconds if ``on``: closing then resets the connection, which leaves none in TIME_WAIT."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))


async def metrics(address: tuple[str, int]) -> dict[str, float]:
    """Return the samples of /metrics, summed over the engines."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
    try:
        writer.write(head("GET", "/metrics"))
        answer = await asyncio.wait_for(read_response(reader), TIMEOUT)
    finally:
        writer.close()
    lines = [line.rpartition(" ") for line in answer.body.decode().splitlines() if not line.startswith("#")]
    found: dict[str, float] = defaultdict(float)
    for name, _, value in lines:
        found[re.sub(r'\{engine="\d+",model_name="[^"]*"\}', "", name)] += float(value)
    return dict(found)


def num_series(found: dict[str, float]) -> int:
    """Count the series of /metrics without those of HTTP responses, which appear with the first response of a kind."""
    return sum(not name.startswith("http_requests_") for name in found)


def state(pid: int) -> dict[str, Any]:
    """Return the memory, threads and open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    number = {name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "VmHWM", "Threads")}  # type: ignore[index]
    files = len(os.listdir(f"/proc/{pid}/fd"))
    memory = {"rss_mb": round(number["VmRSS"] / 1024, 1), "peak_mb": round(number["VmHWM"] / 1024, 1)}
    return {**memory, "threads": number["Threads"], "files": files}


def tree_mb(pid: int) -> float:
    """Return the memory of a process and of those that it started; shared pages count once."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(OSError):  # it has ended
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1])  # type: ignore[index]
    return round(total / 1024, 1)


def measured(pid: int) -> dict[str, Any]:
    """Return ``state``, and as ``all_mb`` the memory of the process and of those that it started."""
    return state(pid) | {"all_mb": tree_mb(pid)}
