"""Check what docs/operations.md says about an image: size, user, read-only root, limits, drain. Needs podman or docker.

python examples/deploy/check_image.py aiakq:cpu --model examples/tinybooks
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

#: Bytes of the CPU image, uncompressed.
MAX_BYTES = 10**9
#: The container runs without privileges, with another user id, little memory and one processor.
LIMITS = (
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges"),
    *("--user", "54321:0", "--memory", "2g", "--cpus", "1"),
    *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"),
)


def main() -> None:
    """Run every check; exits with code 1 and the reason at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", default="podman", help="command with options, like 'podman --runtime runc'")
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    options = parser.parse_args()
    engine = shlex.split(options.engine)
    [image] = json.loads(run(*engine, "image", "inspect", options.image))
    size = image["Size"]
    require(size < options.max_bytes, f"the image has {size / 1e6:.0f} MB")
    require(image["Config"]["User"] not in ("", "root", "0"), "the image runs as root")
    seconds, threads, code = serve(engine, options.image, options.model)
    require(threads == "cpu, 1 threads", f"under --cpus 1 it computes with: {threads}")
    require(code == "0", f"after SIGTERM the exit code is {code}")
    found = {"bytes": size, "user": image["Config"]["User"], "seconds_to_ready": round(seconds, 1), "device": threads}
    sys.stdout.write(json.dumps(found) + "\n")


def serve(engine: list[str], image: str, model: Path) -> tuple[float, str, str]:
    """Serve ``model`` and send a request; return seconds until ready, the device, and the exit code after SIGTERM."""
    name = f"aiakq-{uuid.uuid4().hex[:8]}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "api_key")
        key.write_text("secret\n")
        os.chmod(folder, 0o755)
        mounts = ["-v", f"{model.resolve()}:/model:ro", "-v", f"{key}:/run/secrets/api_key:ro"]
        where = ["--network", "host", "-e", f"AIAKQ_PORT={port}", "-e", "AIAKQ_HOST=127.0.0.1"]
        began = time.monotonic()
        run(*engine, "run", "-d", "--name", name, *LIMITS, *where, *mounts, image)
        try:
            url = f"http://127.0.0.1:{port}"
            while status(f"{url}/ready") != 200:
                require(time.monotonic() - began < 120, "it is not ready: " + run(*engine, "logs", name))
                time.sleep(0.2)
            seconds = time.monotonic() - began
            require(status(f"{url}/live") == 200, "/live does not answer")
            body = json.dumps({"prompt": "Once", "max_tokens": 4}).encode()
            require(status(f"{url}/v1/completions", body) == 401, "it answers without a key")
            require(status(f"{url}/v1/completions", body, "secret") == 200, "it does not answer with the key")
            lines = [json.loads(line) for line in logs(engine, name)]
            device = next(line["facts"]["device"] for line in lines if line["event"] == "ready")
            run(*engine, "stop", "-t", "40", name)
            return seconds, device, run(*engine, "inspect", name, "--format", "{{.State.ExitCode}}").strip()
        finally:
            subprocess.run([*engine, "rm", "-f", name], capture_output=True)


def status(url: str, body: bytes | None = None, key: str = "") -> int:
    """Return the status of a request; 0 if there is no server."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code
    except OSError:
        return 0


def logs(engine: list[str], name: str) -> list[str]:
    """The lines of JSON that the container wrote."""
    done = subprocess.run([*engine, "logs", name], capture_output=True, text=True)
    return [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("{")]


def run(*words: str) -> str:
    """The output of a command; ends this program if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    require(done.returncode == 0, f"{' '.join(words[:3])}: {done.stderr.strip()}")
    return done.stdout


def require(condition: bool, reason: str) -> None:
    """End with ``reason`` unless ``condition`` holds."""
    if not condition:
        raise SystemExit(f"check_image: {reason}")


if __name__ == "__main__":
    main()
