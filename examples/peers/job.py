"""What the scripts beside this one share: a request comes in as JSON, what the work took goes out as JSON.

Each script runs in the virtual environment of the tool it drives, so this file needs nothing but Python and torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(packages: tuple[str, ...], quantize: Callable[[dict[str, Any]], None]) -> None:
    """``script.py REQUEST RESULT``: do what the request file says and write what it took to the result file.

    The request has ``model`` and ``output`` (folders), ``calibration`` (a JSON file of lists of token ids), ``threads``
    and whatever the tool can be told. ``quantize`` loads, calibrates, quantizes and saves; that is the time measured,
    so the tool's own imports belong before. Peak memory is the most this process ever had resident.
    """
    import torch

    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    began = time.monotonic()
    quantize(request)
    seconds = time.monotonic() - began
    versions = {name: importlib.metadata.version(name) for name in packages}
    result = {"seconds": seconds, "peak_memory": peak_memory(), "versions": versions}
    Path(sys.argv[2]).write_text(json.dumps(result))


def calibration(request: dict[str, Any]) -> list[list[int]]:
    """The token ids to calibrate on, one list per sample."""
    return json.loads(Path(request["calibration"]).read_text())


def peak_memory() -> int:
    """The largest resident size this process has had, in bytes, from the kernel's accounts."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
