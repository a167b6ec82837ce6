"""The rows of the benchmark: every engine with every kind of weights, and where its programs and files are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environments
import shape

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parents[1]
OUT = Path(os.environ.get("OUT", ROOT / "out" / "bench-cpu")).resolve()
#: Where `make quality` keeps the environments of other tools; vLLM's is one of them.
VENVS = ROOT / "out" / "peers"
# torchvision is built for CUDA and breaks the import with a CPU build of torch; text does not need it.
OPENVINO = environments.Environment(
    ("optimum-intel[openvino]==2.2.0", "openvino==2026.4.1", "nncf==3.4.0"), remove=("torchvision",)
)
LLAMA = OUT / "llama.cpp"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-mtmd-cli")

KINDS = {
    "w4": "4-bit weights",
    "w8": "8-bit weights",
    "w16": "Not quantized, computed in 16 bits",
    "w32": "Not quantized, computed in 32 bits",
}


@dataclass(frozen=True)
class Row:
    """One engine with one model.

    kind     a key of KINDS: rows of a kind compete.
    weights  a kind of shape.bytes_per_token, or a file under OUT.
    request  for the script, in addition to the model and the threads.
    """

    tool: str
    name: str
    kind: str
    weights: str
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.tool} {self.name}".lower()).strip("-")


OURS = [
    Row("aiakq", "W4A16 g128", "w4", "w4", {"model": "w4", "arguments": {}}),
    Row("aiakq", "W4A16 g128, exact", "w4", "w4", {"model": "w4", "arguments": {"cpu_math": "exact"}}),
    Row("aiakq", "W8A16", "w8", "w8", {"model": "w8", "arguments": {}}),
    Row("aiakq", "W8A8", "w8", "w8a8", {"model": "w8a8", "arguments": {}}),
    Row("aiakq", "bf16", "w16", "bfloat16", {"model": "source", "arguments": {"dtype": "bfloat16"}}),
    # Weights stay as they are stored, in bf16.
    Row("aiakq", "fp32", "w32", "bfloat16", {"model": "source", "arguments": {"dtype": "float32"}}),
]
PEERS = [
    Row("llama.cpp", "Q4_0", "w4", "gguf/Q4_0.gguf"),
    Row("llama.cpp", "Q8_0", "w8", "gguf/Q8_0.gguf"),
    Row("llama.cpp", "F16", "w16", "gguf/F16.gguf"),
    Row("vllm", "AWQ g128", "w4", "w4-awq", {"model": "w4-awq", "dtype": "bfloat16"}),
    Row("vllm", "W8A8", "w8", "w8a8", {"model": "w8a8", "dtype": "bfloat16"}),
    Row("vllm", "bf16", "w16", "bfloat16", {"model": "source", "dtype": "bfloat16"}),
    Row("vllm", "fp32", "w32", "float32", {"model": "source", "dtype": "float32"}),
    Row("openvino", "int4 g128", "w4", "openvino/int4/openvino_model.bin", {"bits": 4}),
    Row("openvino", "int8", "w8", "openvino/int8/openvino_model.bin", {"bits": 8}),
    Row("transformers", "bf16", "w16", "bfloat16", {"model": "source", "dtype": "bfloat16"}),
    Row("transformers", "fp32", "w32", "float32", {"model": "source", "dtype": "float32"}),
]


def rows() -> list[Row]:
    """Return the rows of aiakq and other engines; competing rows follow each other, as they are measured."""
    return sorted([*OURS, *PEERS], key=lambda row: list(KINDS).index(row.kind))


def words(row: Row, install: bool) -> tuple[list[str], dict[str, Any]] | str:
    """Return the command of a row's script and its request, or one sentence on why it cannot run.

    ``install`` creates missing environments, programs and converted models.
    """
    python, request = Path(sys.executable), dict(row.request)
    if row.tool == "llama.cpp":
        found = _llama(row, install)
        if isinstance(found, str):
            return found
        request |= found
    elif row.tool in ("vllm", "openvino"):
        place = python_of(row.tool, install)
        if isinstance(place, str):
            return place
        python = place
    if row.tool == "openvino":
        model = OUT / Path(row.weights).parent
        if not (OUT / row.weights).is_file():
            if not install:
                return "its model is not converted; --install does that"
            failed = _convert(python, row, model)
            if failed:
                return failed
        request["model"] = str(model)
    elif "model" in row.request:
        request["model"] = str(shape.folder(row.request["model"], OUT / "models"))
    script = SCRIPTS / f"speed_{row.tool.replace('.', '')}.py"
    return [str(python), str(script)], request


def python_of(tool: str, install: bool) -> Path | str:
    """The Python of a tool's environment."""
    environments.ENVIRONMENTS.setdefault("openvino", OPENVINO)
    made = (VENVS / f"{tool}-venv" / "installed.json").is_file()
    if not made and not install:
        return "not installed; --install does that"
    return environments.python_of(tool, VENVS)


def _convert(python: Path, row: Row, model: Path) -> str | None:
    model.parent.mkdir(parents=True, exist_ok=True)
    request = model.with_suffix(".request.json")
    source = str(shape.folder("source", OUT / "models"))
    request.write_text(json.dumps({"source": source, "model": str(model), "bits": row.request["bits"]}))
    command = [str(python), str(SCRIPTS / "speed_openvino.py"), "convert", str(request)]
    return logged(command, model.with_suffix(".log"))


def _llama(row: Row, install: bool) -> dict[str, Any] | str:
    """Programs and model file of llama.cpp."""
    programs = LLAMA / "build" / "bin"
    if not all((programs / name).is_file() for name in PROGRAMS):
        if not install:
            return "not built; --install does that"
        failed = build_llama()
        if failed:
            return failed
    source = llama_source()
    if source is None:
        return "its sources are gone; --install fetches them"
    file = OUT / row.weights
    whole = file.with_name("F16.gguf")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not whole.is_file():
        partial = whole.with_suffix(".partial")
        shape.write_gguf(shape.folder("source", OUT / "models"), partial, source / "gguf-py")
        partial.rename(whole)
    if not file.is_file():
        partial = file.with_suffix(".partial")
        failed = logged(
            [str(programs / "llama-quantize"), str(whole), str(partial), row.name], file.with_suffix(".log")
        )
        if failed:
            return failed
        partial.rename(file)
    version = source.parents[1].name.removeprefix("llama_cpp_python-")
    return {"model": str(file), "programs": str(programs), "version": version}


def llama_source() -> Path | None:
    """Return the sources of llama.cpp in the llama-cpp-python package."""
    found = sorted(LLAMA.glob("llama_cpp_python-*/vendor/llama.cpp"))
    return found[-1] if found else None


def build_llama() -> str | None:
    """Fetch the package's sources and build the programs for this machine."""
    LLAMA.mkdir(parents=True, exist_ok=True)
    log = LLAMA / "build.log"
    if llama_source() is None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        failed = logged([*pip, "--dest", str(LLAMA), "llama-cpp-python"], log)
        for archive in LLAMA.glob("*.tar.gz"):
            failed = failed or logged(["tar", "xzf", str(archive), "-C", str(LLAMA)], log)
        if failed:
            return failed
    off = [f"-D{name}=OFF" for name in ("BUILD_SHARED_LIBS", "LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES")]
    configure = ["cmake", "-S", str(llama_source()), "-B", str(LLAMA / "build"), "-DCMAKE_BUILD_TYPE=Release"]
    build = ["cmake", "--build", str(LLAMA / "build"), "-j", str(os.cpu_count()), "--target", *PROGRAMS]
    print(f"building llama.cpp (log: {log})", file=sys.stderr)
    return logged([*configure, "-DGGML_NATIVE=ON", *off], log) or logged(build, log)


def logged(command: list[str], log: Path) -> str | None:
    """Run a command with its output in a file; return None, or the last line if it fails."""
    try:
        with log.open("w") as out:
            code = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, env=environments.variables(), timeout=3 * 3600
            ).returncode
    except (OSError, subprocess.SubprocessError) as problem:
        return f"failed: {problem}"[:160]
    return f"failed: {last_word(log)}" if code else None


def last_word(log: Path) -> str:
    """Return the line of a log that describes a failure best."""
    text = re.sub(r"(?m)^\[rank\d+\]:", "", log.read_text(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    explained = [line for line in errors if ": " in line]
    return ((explained or errors or lines or ["no word"])[-1])[:160]
