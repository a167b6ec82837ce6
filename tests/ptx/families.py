"""Runs the product's self-test (kernels/triton/self_test.py) on the emulator and prints the results as JSON lines.

``python tests/ptx/families.py 80 [FAMILY...]``. In a process of its own, because the one of the tests has Triton's
interpreter.

--random N   runs blocks, and warps between barriers, in an order made from N.
--truncate   cuts off the sums of tensor cores instead of rounding them.
--inexact    lets approximations be off by as much as they may be.
--carried    puts back the recurrence that carries where the tokens of a state begin, which Triton compiles wrongly.
--racing     puts back the GPTQ sweep whose warps read what one of them has already replaced.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptx import device, inputs
from ptx.program import RunOptions

from aiakq.kernels.triton import gptq_kernel, recurrence_kernel, self_test

_BARRIER = """            # All warps load the old values, and one of them stores the new ones.
            tl.debug_barrier()
"""
_LOADED = "begin = tl.load(saves_ptr + 3 * number - 2, mask=number > first, other=-1) + 1"


def changed(module: ModuleType, folder: str, *changes: tuple[str, str]) -> ModuleType:
    """Return a module with parts of its text replaced."""
    text = Path(str(module.__file__)).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = Path(folder, f"{module.__name__.rpartition('.')[2]}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("changed_" + path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def put_back_carried(folder: str) -> None:
    """Replace the recurrence's kernel by the one that Triton compiles wrongly."""
    loop = "    for number in range(first, last + 1):\n"
    old = changed(
        recurrence_kernel, folder, (_LOADED, "pass"), (loop, f"    begin = 0\n{loop}"),
        ("        row = tl.load(saves_ptr", "        begin = end\n        row = tl.load(saves_ptr"),
    )  # fmt: skip
    recurrence_kernel.recurrence_kernel = old.recurrence_kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, choices=device.SHARED)
    parser.add_argument("family", nargs="*", type=inputs.family, default=list(self_test.FAMILIES))
    parser.add_argument("--random", type=int, default=0)
    for change in ("truncate", "inexact", "carried", "racing"):
        parser.add_argument(f"--{change}", action="store_true")
    given = parser.parse_args()
    emulation = device.install(given.arch)
    emulation.options = RunOptions(given.random, given.truncate, given.inexact)
    with tempfile.TemporaryDirectory() as folder:
        if given.carried:
            put_back_carried(folder)
        if given.racing:
            gptq_kernel.round_kernel = changed(gptq_kernel, folder, (_BARRIER, "")).round_kernel
        for family in given.family:
            steps, seconds = emulation.steps, emulation.seconds
            started = time.process_time()
            verdict = inputs.examine(family)
            result = {
                "family": family, "failure": verdict.failure, "error": verdict.error, "details": verdict.details,
                "steps": emulation.steps - steps, "emulated": round(emulation.seconds - seconds, 2),
                "seconds": round(time.process_time() - started, 2),
            }  # fmt: skip
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
