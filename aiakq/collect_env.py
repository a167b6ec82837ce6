"""``aiakq collect-env``: what a bug report needs to say about the machine, the versions and the settings.

Nothing in here raises: what cannot be found is said in its place. Secrets are never shown, only whether they are set.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import aiakq
from aiakq import records
from aiakq.errors import one_line
from aiakq.system import cgroups
from aiakq.system.memory import free_host_memory
from aiakq.system.threads import available_threads
from aiakq.system.topology import cpu_nodes, cpu_shares
from aiakq.system.user_path import user_path

#: Distributions whose versions matter; those of the first line are always installed.
PACKAGES = (
    *("torch", "transformers", "safetensors", "tokenizers", "accelerate", "datasets", "msgspec"),
    *("numpy", "huggingface_hub", "triton", "ray", "compressed-tensors", "gptqmodel"),
)
#: What the names of variables begin with that change what is computed, with what, or where.
_PREFIXES = (
    *("AIAKQ_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "RAY_", "VLLM_"),
    *("HF_", "HUGGING", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_", "LD_", "MALLOC_", "PYTHON"),
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|HEADER", re.IGNORECASE)
#: User and password in an address, or a secret among its parameters.
_LOGIN = re.compile(r"(://)[^/@\s]+(?=@)|([?&][^=&\s]*(?:key|token|secret|pass)[^=&\s]*=)[^&\s]+", re.IGNORECASE)
_CGROUP = Path("/sys/fs/cgroup")
_GPU_QUERY = ("--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader")


def collect() -> dict[str, object]:
    """The whole document, as JSON values."""
    sections: dict[str, Callable[[], object]] = {
        "versions": _versions,
        "system": _system,
        "processor": _processor,
        "topology": topology,
        "memory": _memory,
        "kernels": _kernels,
        "gpus": _gpus,
        "environment": lambda: shown_variables(os.environ),
        "caches": lambda: _caches(os.environ),
    }
    return {"schema_version": 1, "kind": "collect-env", **{name: _found(make) for name, make in sections.items()}}


def text(document: Mapping[str, object]) -> str:
    """The document for people: a heading per section, a line per fact."""
    lines: list[str] = []
    for name, section in document.items():
        if name in ("schema_version", "kind"):
            continue
        lines += ["", name] if lines else [name]
        lines += _lines(section, "  ") or ["  none"]
    return "\n".join(lines) + "\n"


def _lines(value: object, indent: str) -> list[str]:
    if isinstance(value, Mapping):
        lines = []
        for key, item in value.items():
            below = _lines(item, indent + "  ") if isinstance(item, (Mapping, list)) else None
            lines += [f"{indent}{key}:", *below] if below else [f"{indent}{key}: {_said(item)}"]
        return lines
    if isinstance(value, list):
        return [line for item in value for line in _lines(item, indent)]
    return [f"{indent}{_said(value)}"]


def _said(value: object) -> str:
    if value is None or value in ({}, []):
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value).replace("\n", " ")


def _found(make: Callable[[], object]) -> Any:
    """Return ``make()``, or the reason it failed, as text."""
    try:
        return make()
    except Exception as problem:
        return f"unknown ({one_line(problem)})"


# --- sections ---------------------------------------------------------------------------------------------------------


def _versions() -> dict[str, object]:
    versions = {
        "aiakq": aiakq.__version__,
        "commit": _found(lambda: records.environment()["commit"]),
        "python": sys.version.replace("\n", " "),
    }
    return versions | {name: _found(partial(_version, name)) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _system() -> dict[str, object]:
    release = _found(platform.freedesktop_os_release)
    return {
        "os": release.get("PRETTY_NAME") if isinstance(release, dict) else platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "container": _container(os.environ),
    }


def _container(environment: Mapping[str, str]) -> str:
    """The kind of container this process runs in, as far as its usual marks tell."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    return environment.get("container") or "none found"


def _processor() -> dict[str, object]:
    values: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    flags = set(values.get("flags", values.get("Features", "")).split())
    known = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimd", "sve")
    return {
        "model": values.get("model name") or platform.processor() or platform.machine(),
        "processors": os.cpu_count(),
        "instructions": " ".join(name for name in known if name in flags) or "unknown",
    }


def topology() -> dict[str, object]:
    """The NUMA nodes, the threads of a process, and the processors that ranks (``-tp``) would be bound to."""
    nodes = cpu_nodes()
    shares = {}
    for size in range(1, len(nodes) + 1):
        bound = cpu_shares(size)
        shares[f"{size} ranks" if size > 1 else "1 rank"] = (
            "; ".join(_ranges(share) for share in bound) if all(bound) else "not bound"
        )
    return {
        "allowed processors": _ranges(sorted(cpu for node in nodes for cpu in node)),
        "threads of a process": available_threads(),
        "nodes": {f"node {number}": _ranges(node) for number, node in enumerate(nodes)},
        "ranks": shares,
    }


def _ranges(numbers: list[int]) -> str:
    """A list like 0-3,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _memory() -> dict[str, object]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    within, processors = cgroups.available_memory(), cgroups.processor_limit()
    limits = {
        "available within the limits": None if within is None else _gigabytes(within),
        "processors within the limits": None if processors is None else f"{processors:g}",
        "memory.max": _read(_CGROUP / "memory.max") or _read(_CGROUP / "memory/memory.limit_in_bytes"),
        "memory.high": _read(_CGROUP / "memory.high"),
        "memory.swap.max": _read(_CGROUP / "memory.swap.max"),
        "cpu.max": _read(_CGROUP / "cpu.max"),
        "pids.max": _read(_CGROUP / "pids.max"),
    }
    return {
        "total": _gigabytes(total),
        "available": _gigabytes(free_host_memory()),
        "cgroup": {name: _limit(limit) for name, limit in limits.items() if limit} or "no limits found",
        "/dev/shm": _found(lambda: _gigabytes(shutil.disk_usage("/dev/shm").total)),
    }


def _limit(text: str) -> str:
    """A limit of a cgroup as it stands there; version 1 spells no limit as the largest number of pages."""
    word = text.strip()
    return "max" if word.isdigit() and int(word) >= 2**62 else word


def _kernels() -> dict[str, object]:
    from aiakq.kernels.cpu import library

    reason = library.unavailable()
    path = os.environ.get("AIAKQ_CPU_LIBRARY") or str(library.FILE)
    return {
        "native library": f"not used: {reason}" if reason else path,
        "instruction set": None if reason else library.load_library().isa,
    }


def _gpus() -> list[object]:
    """The GPUs as the driver names them, and what torch makes of them."""
    gpus: list[object] = []
    command = shutil.which("nvidia-smi")
    if command is not None:
        done = subprocess.run([command, *_GPU_QUERY], capture_output=True, text=True, timeout=10)
        gpus += [line.strip() for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines()]
    import torch

    built = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    if torch.cuda.is_available():
        gpus += [f"cuda:{number} {torch.cuda.get_device_name(number)}" for number in range(torch.cuda.device_count())]
    elif gpus:
        gpus.append("torch finds no GPU")
    return [*(gpus or ["none found"]), built]


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter. Of secrets only whether they are set; addresses without user and password."""
    variables = {}
    for name in sorted(environment):
        if name.startswith(_PREFIXES):
            value = environment[name]
            variables[name] = ("set" if value else "empty") if _SECRET.search(name) else _LOGIN.sub(r"\1\2...", value)
    return variables


def _caches(environment: Mapping[str, str]) -> dict[str, str]:
    home = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    places = {
        "models": environment.get("HF_HUB_CACHE") or f"{home}/hub",
        "data sets": environment.get("HF_DATASETS_CACHE") or f"{home}/datasets",
        "Triton": environment.get("TRITON_CACHE_DIR") or "~/.triton/cache",
        "temporary files": environment.get("TMPDIR") or "/tmp",
    }
    return {name: _found(partial(_place, place)) for name, place in places.items()}


def _place(place: str) -> str:
    path = user_path(place)
    return f"{path} ({_gigabytes(shutil.disk_usage(path).free)} free)" if path.exists() else f"{path} (not there)"


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
