"""Compile the kernels of the self-test for GPUs that are not present, into Triton's cache.

At each start on a GPU the self-test runs. Unless Triton's cache has them, about forty kernels are compiled for it, one
after another. ``python -m aiakq.kernels.triton.precompile`` needs neither a GPU nor a C compiler; an image runs it when
it is built, with the TRITON_CACHE_DIR that it has when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from aiakq.kernels.triton import configs, self_test

#: Architecture -> multiprocessors of its usual GPU, which decide how sums are split: A100, L40S, H100 and H200.
PROCESSORS = {80: 108, 89: 142, 90: 132}


class AbsentGpu:
    """A driver for Triton whose GPU can be compiled for, but not used."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> object:
        """Return what Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where tensors are."""
        return torch.device("cpu")


def compile_for(arch: int, families: list[str]) -> int:
    """Compile the kernels of ``families`` for ``arch``, in a process of its own; return how many there are."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: set[str] = set()

    def compile_only(function: JITFunction, grid: object) -> object:
        def launch(*arguments: object, **options: object) -> None:
            kernels.add(function.warmup(*arguments, grid=grid, **options).hash)

        return launch

    JITFunction.__getitem__ = compile_only
    driver.set_active(AbsentGpu(arch))
    configs.assume(configs.Gpu("default", PROCESSORS[arch], arch))
    for family in families:
        verdict = self_test.examine(family, torch.device("cpu"))  # nothing is computed: only exceptions matter
        if verdict.details:
            raise RuntimeError(f"the {family} kernels do not compile for sm_{arch}:\n{verdict.details}")
    return len(kernels)


def main() -> None:
    """Compile for every architecture, several at once."""
    parser = argparse.ArgumentParser(prog="python -m aiakq.kernels.triton.precompile", description=__doc__)
    parser.add_argument("--arch", type=int, choices=PROCESSORS, action="append", help="all of them by default")
    parser.add_argument("--family", choices=self_test.FAMILIES, action="append", help="all of them by default")
    given = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    archs = given.arch or list(PROCESSORS)
    families = given.family or list(self_test.FAMILIES)
    # Each in its own process: Triton keeps some results for one GPU. Not forked: torch has threads.
    workers = min(len(archs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        for arch, count in zip(archs, pool.map(partial(compile_for, families=families), archs), strict=True):
            sys.stdout.write(f"sm_{arch}: {count} kernels compiled\n")


if __name__ == "__main__":
    main()
