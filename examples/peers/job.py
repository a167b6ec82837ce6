"""Shared by the scripts in this folder: read a request as JSON, write time and memory as JSON.

Each script runs in the virtual environment of the tool it drives, so this file needs nothing but Python and torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(packages: tuple[str, ...], quantize: Callable[[dict[str, Any]], None]) -> None:
    """``script.py REQUEST RESULT``: do what the request file says and write time and memory to the result file.

    Processor seconds are those of all threads of this process and of the processes it waited for, on ``machine``.

    The request has ``model`` and ``output`` (folders), ``calibration`` (a JSON file of lists of token ids), ``threads``
    and options of the tool. ``quantize`` loads, calibrates, quantizes and saves, and is timed, so the tool's imports
    belong before it. Peak memory is the largest resident size of this process.
    """
    import torch

    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    began, processor = time.monotonic(), sum(os.times()[:4])
    quantize(request)
    cost = {"seconds": time.monotonic() - began, "processor_seconds": sum(os.times()[:4]) - processor}
    versions = {name: importlib.metadata.version(name) for name in packages}
    result = {**cost, "machine": machine(), "peak_memory": peak_memory(), "versions": versions}
    Path(sys.argv[2]).write_text(json.dumps(result))


def device() -> str:
    """The device that tools with a choice compute on: $PEERS_DEVICE, by default the CPU."""
    return os.environ.get("PEERS_DEVICE", "cpu")


def machine() -> str:
    """The processor, and the GPU if one is used."""
    import torch

    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    names = [model[1] if model else platform.machine()]
    names += [torch.cuda.get_device_name()] if device() != "cpu" else []
    return ", ".join(names)


def calibration(request: dict[str, Any]) -> list[list[int]]:
    """The token ids to calibrate on, one list per sample."""
    return json.loads(Path(request["calibration"]).read_text())


def peak_memory() -> int:
    """Return the largest resident size of this process in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
