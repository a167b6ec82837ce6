"""Run tests that failed once more, alone: only those that start processes, which can lose a race on a busy machine.

What fails elsewhere is an error at once, as is what fails alone too. Every test that passes here is named: its race is
to be mended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Tests of processes, sockets, signals and browsers; never those of numbers, formats or the engine.
MAY_RACE = (
    "tests/bench/", "tests/examples/", "tests/quantizers/workers/", "tests/runtime/distributed/", "tests/server/",
    "tests/system/", "tests/terminal/",
)  # fmt: skip


def main() -> int:
    path = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(path.read_text())) if path.is_file() else []
    errors = [name for name in failed if not name.startswith(MAY_RACE)]
    if errors or not failed:
        print("Failed:", *(errors or ["the run itself"]), sep="\n  ")
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", *failed], cwd=ROOT).returncode
    if not code:
        print("Failed once, passed alone; mend the race:", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main())
