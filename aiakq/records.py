"""Result records of benchmarks and evaluations: metrics, model, environment and command. One JSON document each."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import aiakq
from aiakq.errors import error

#: Raised when a key changes its meaning or goes away; new keys do not raise it.
SCHEMA_VERSION = 1
#: Maximum size of a file with a result.
MAX_RESULT_BYTES = 1 << 28


@dataclass(frozen=True)
class Record:
    """One benchmark result.

    kind         latency, throughput, serve, kernels or eval.
    seed         repeats the run: prompts, arrival times.
    config       what was asked for, every option with the value used.
    metrics      what was measured; the keys stand at the top level of the document.
    environment  see ``environment``.
    warnings     sentences a reader must see before trusting the numbers.
    """

    kind: str
    seed: int
    config: Mapping[str, object]
    metrics: Mapping[str, Any]
    environment: Mapping[str, object]
    warnings: tuple[str, ...] = ()
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def document(self) -> dict[str, Any]:
        """The record as JSON values. A number that is not finite becomes None, or its name as a string in config."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "date": self.date,
            "seed": self.seed,
            **{key: finite(value) for key, value in self.metrics.items()},
            "warnings": list(self.warnings),
            "config": finite(self.config, by_name=True),
            "environment": finite(self.environment),
        }


def finite(value: object, by_name: bool = False) -> Any:
    """``value`` for JSON: lists, objects with string keys, paths as text, and numbers that are not finite as None.

    ``by_name`` keeps the latter as "inf" or "nan", for settings, where None would say something else.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if by_name else None
    if isinstance(value, Mapping):
        return {str(key): finite(item, by_name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, by_name) for item in value]
    return value


def to_json(document: Mapping[str, object]) -> str:
    """JSON text of a document, with a newline at the end. A NaN in it is our own bug and raises ValueError."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(document: Mapping[str, object], path: Path) -> None:
    """Write a document so that ``path`` holds the old content or all of the new. Raises ``output_failed``."""
    text = to_json(document)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is private by default; the result gets what the user's umask gives any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as problem:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise error("output_failed", path=path, reason=problem.strerror or problem) from None


def environment(device: str | None = None, threads: int | None = None) -> dict[str, object]:
    """What a number depends on besides the options. ``device`` is cpu or cuda; None where nothing ran in here."""
    return {
        "aiakq": aiakq.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "device": device,
        "device_name": _device_name(device),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        **_machine(),
    }


def load_average() -> float | None:
    """Processes that ran or waited to run, on the average of the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _machine() -> dict[str, object]:
    """Memory, limits of the container, and what else the speed of a machine depends on; None where it does not say."""
    from aiakq.system.cgroups import processor_limit

    return {
        "memory_bytes": _total_memory(),
        "cpu_limit": processor_limit(),
        "cpu_governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_max_khz": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"),
        "numa_nodes": _first_line("/sys/devices/system/node/online"),
        "nvidia_driver": _first_line("/sys/module/nvidia/version"),
    }


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: str | None) -> str | None:
    if device is None:
        return None
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of a source checkout, with ``-dirty`` when files differ from it; None for an installed package."""
    root = Path(aiakq.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--match=", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
