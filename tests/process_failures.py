"""Fails tests whose processes fail unnoticed: with a traceback of ours, or by an end after which they are replaced.

A server starts its processes again when they end, so that a bug in one of them may cost its clients only time. This
plug-in looks at the standard error of the tests' processes, at what servers report and at what is logged. Tests in
which processes are made to fail have the marker ``process_failures``.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from aiakq.server.background import RunningServer

MARKER = "process_failures"

_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error"
#: A line of a traceback, or of what ``faulthandler`` prints, with a place in our code.
_OURS = re.compile(rf'File "{re.escape(str(Path(__file__).parent.parent))}/(?:aiakq|kernels)/[^"\n]*", line \d+')
#: What servers log about processes that are replaced.
_REPLACED = re.compile(r"^.*(?:tokenizer's process is replaced|The engine is ready again).*$", re.MULTILINE)

#: Seconds after a test with the marker in which failures may still be those of its processes.
_GRACE = 2.0

_found: list[tuple[float, str]] = []  # with their times
_marked_until = 0.0


def failure_in(text: str) -> str:
    """Return the first failure of a process in its output or log, or ""."""
    for start in (_TRACEBACK, _FATAL):
        for part in text.split(start)[1:]:
            if _OURS.search(part):
                return start + part
    replaced = _REPLACED.search(text)
    return "" if replaced is None else replaced.group()


def note(text: str | bytes | None, when: float | None = None) -> None:
    """Keep the failure in ``text`` for the report of the current test; ``when`` it was at the earliest, now if None."""
    if text:
        failure = failure_in(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
        if failure:
            _found.append((time.monotonic() if when is None else when, failure))


def watch_processes() -> None:
    """Look at the events of servers in the background, and at all standard error that tests read."""
    on_report, communicate = RunningServer._on_report, subprocess.Popen.communicate
    readouterr = pytest.CaptureFixture.readouterr

    def reported(self: RunningServer, report: Any) -> None:
        event = report.event
        if event.kind == "engine_dead":
            _found.append((time.monotonic(), f"engine_dead: {event.message}"))
        elif event.kind == "log":
            note(event.message)
        on_report(self, report)

    def communicated(self: Any, *args: Any, **options: Any) -> Any:
        output = communicate(self, *args, **options)
        note(output[1])
        return output

    def captured(self: Any) -> Any:
        output = readouterr(self)
        note(output.err)
        return output

    RunningServer._on_report = reported  # type: ignore[method-assign]
    subprocess.Popen.communicate = communicated  # type: ignore[method-assign]
    pytest.CaptureFixture.readouterr = captured  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}: processes of the test fail; else tracebacks of them fail it")
    watch_processes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Fail a phase of a test that passed while a process failed."""
    report = yield
    for title, text in report.sections:
        if title.endswith(call.when) and "stdout" not in title:
            note(text, time.monotonic() - call.duration)
    global _marked_until
    found = [failure for when, failure in _found if when > _marked_until]
    _found.clear()
    if item.get_closest_marker(MARKER):
        _marked_until = time.monotonic() + _GRACE
    elif found and report.passed:
        report.outcome = "failed"
        report.longrepr = f"a process failed, and the test did not notice:\n{found[0]}"
    return report
