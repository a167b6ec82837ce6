"""Print the requirements of ``aiakq serve`` from pyproject.toml, for the Containerfile. Standard library only."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

#: Only quantizing and evaluating with data sets of the hub need these.
NOT_FOR_SERVING = {"accelerate", "datasets"}


def main() -> None:
    """Write one requirement per line to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--file", type=Path, default=Path("pyproject.toml"))
    options = parser.parse_args()
    project = tomllib.loads(options.file.read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["traces"]]
    if options.device == "gpu":
        needed += project["optional-dependencies"]["gpu"]
    for requirement in needed:
        if re.split(r"[^A-Za-z0-9_-]", requirement)[0] not in NOT_FOR_SERVING:
            sys.stdout.write(requirement + "\n")


if __name__ == "__main__":
    main()
