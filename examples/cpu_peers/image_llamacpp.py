"""Measure the time from a chat with an image to its first token, with llama.cpp's llama-mtmd-cli."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """``image_llamacpp.py REQUEST RESULT``: the request has ``model`` and ``encoder`` (GGUF files), ``images``,
    ``text``, ``threads`` and ``programs``. Each image is read by a process of its own, after its warm-up.
    """
    request = json.loads(Path(sys.argv[1]).read_text())
    result = {"first_token": [_first_token(request, file) for file in request["images"][1:]]}
    Path(sys.argv[2]).write_text(json.dumps(result))


def _first_token(request: dict[str, Any], image: str) -> float:
    """Seconds from the end of loading until the prompt is computed, of which the first token is then chosen."""
    words = [str(Path(request["programs"]) / "llama-mtmd-cli"), "-m", request["model"], "--mmproj", request["encoder"]]
    words += ["--image", image, "-p", request["text"], "-n", "0", "-t", str(request["threads"]), "--temp", "0"]
    words += ["-c", "2048", "-b", "2048", "-ub", "2048", "--jinja"]
    loaded, lines = None, []
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.decode(errors="replace").strip())
            if ": loading model: " in lines[-1]:  # printed when it is loaded
                loaded = time.perf_counter()
        ended = time.perf_counter()
    if process.returncode or loaded is None:
        raise RuntimeError(f"llama-mtmd-cli: {next(filter(None, reversed(lines)), 'no word')}")
    return ended - loaded


if __name__ == "__main__":
    main()
