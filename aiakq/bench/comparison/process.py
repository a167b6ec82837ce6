"""SideProcess: the process that measures one side of ``bench ab``, seen from outside."""

from __future__ import annotations

import json
import selectors
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from aiakq.bench.comparison.sides import Side
from aiakq.errors import error

_WORKER = Path(__file__).with_name("worker.py")


class SideProcess:
    """Starts at once, and loads while others do; ``ready`` waits. Use as a context manager, which ends it.

    load     batch_size, input_len and output_len.
    timeout  seconds that an answer may take.
    library  a native library in place of the side's own.
    """

    def __init__(self, side: Side, load: dict[str, int], timeout: float, library: Path | None) -> None:
        self._side, self._timeout = side, timeout
        self._stderr = tempfile.TemporaryFile()
        settings = json.dumps({"engine": dict(side.engine), **load})
        self._process = subprocess.Popen(
            [side.interpreter, "-P", str(_WORKER), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=side.environment(library),
        )
        self._received = b""

    def ready(self) -> dict[str, Any]:
        """Wait until the model is loaded. Returns what the worker says of it. Raises ``side_failed``."""
        facts = self._answer()
        if "error" in facts:
            raise error("side_failed", side=self._side.label, reason=facts["error"].rstrip("."))
        return facts

    def measure(self, seed: int) -> dict[str, Any]:
        """Measure one batch. Raises ``side_failed``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"seed": seed}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure() from None
        return self._answer()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Killed, not asked: the end of an interpreter with torch in it takes a while, and nothing is left to do there.
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    pass

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise error("side_failed", side=self._side.label, reason=f"no answer within {self._timeout:g} s")
                piece = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not piece:
                    raise self._failure()
                self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> Exception:
        """Why the process ended: the last line it wrote."""
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return error("side_failed", side=self._side.label, reason=lines[-1][:300] if lines else f"exit code {code}")
