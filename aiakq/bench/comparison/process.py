"""SideProcess: start and control the worker process that measures one side of ``bench ab``."""

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
    """Worker process of one side. The constructor starts it, ``ready`` waits until it has loaded the model.

    Use it as a context manager, which kills the process on exit.

    load     batch_size, input_len and output_len.
    timeout  maximum seconds for each response.
    library  native library to load instead of the side's own, or None.
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
        """Wait until the model is loaded and return the worker's first line. Raises ``side_failed``."""
        facts = self._receive()
        if "error" in facts:
            raise error("side_failed", side=self._side.label, reason=facts["error"].rstrip("."))
        return facts

    def measure(self, seed: int) -> dict[str, Any]:
        """Measure one batch; see ``worker.measure`` for the result. Raises ``side_failed``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"seed": seed}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure() from None
        return self._receive()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Killed without a clean shutdown, which is slow with torch loaded; the worker has no state to save.
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    pass

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise error("side_failed", side=self._side.label, reason=f"no response within {self._timeout:g} s")
                chunk = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not chunk:
                    raise self._failure()
                self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        response: dict[str, object] = json.loads(line)
        return response

    def _failure(self) -> Exception:
        """Wait for the exited process and return a ``side_failed`` error with its last line of output."""
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return error("side_failed", side=self._side.label, reason=lines[-1][:300] if lines else f"exit code {code}")
