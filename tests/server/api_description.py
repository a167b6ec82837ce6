"""Generate valid and invalid requests from /openapi.json with schemathesis, and validate the responses against it.

    python tests/server/api_description.py [--count 20000] [--seed 0] [--schemathesis PROGRAM]

schemathesis has dependencies of its own; it is looked for on the path, and in an environment named by --schemathesis
(pip install schemathesis). Without it one line says so, and the exit code is 0. The exit code is 1 for an answer that
is 5xx, for one with a status, type or shape that the description does not name, for one to what it forbids that is not
a refusal, and for a server that is not there any more. One line of JSON says how many cases there were.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from aiakq.server.background import start_in_background

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tinybooks"
SERVED = {
    "model": str(MODEL),
    "served_model_name": ["tinybooks"],
    "dtype": "float32",
    "num_gpu_blocks_override": 1025,
    "enable_admin_routes": True,
}
#: Left out is that all of the described form is answered 200: how fields go together cannot be described.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
#: Random requests per route in a round, beside some two thousand systematic ones; then comes the next seed.
EXAMPLES = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000, help="cases at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program, if it is not on the path")
    args = parser.parse_args()
    program = shutil.which(args.schemathesis)
    if program is None:
        print("schemathesis is not installed (pip install schemathesis): nothing was tried", file=sys.stderr)
        return 0
    with start_in_background(SERVED, timeout=240) as server, tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"cases": 0, "rounds": 0, "failures": 0}
        began = time.monotonic()
        while found["cases"] < args.count and not found["failures"]:
            report = Path(folder) / f"{found['rounds']}.json"
            words = ["--seed", str(args.seed + found["rounds"]), "--workers", str(args.workers), "--no-shrink"]
            words += ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
            words += ["--report", "json", "--report-json-path", str(report), "--request-timeout", "300"]
            command = [program, "run", f"{server.url}/openapi.json", *words]
            code = subprocess.run(command, cwd=folder, stdout=sys.stderr).returncode
            results = json.loads(report.read_text()) if report.is_file() else {}
            cases = results.get("test_cases", {"generated": 0, "unique_failures": 1})
            found["rounds"] += 1
            found["cases"] += cases["generated"]
            found["failures"] += cases["unique_failures"] or code != 0
        found["seconds"] = round(time.monotonic() - began, 1)
        alive = httpx.get(f"{server.url}/health", timeout=60, trust_env=False).status_code == 200
        found["alive"] = alive
    print(json.dumps(found))
    return 0 if alive and not found["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
