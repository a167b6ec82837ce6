"""Compile kernels for an absent GPU and count instructions, registers, shared memory and loops.

ptxas and nvdisasm come with Triton; no driver is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from loops import varying_bounds
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
#: Bytes of shared memory that a program may have.
SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
#: For which a quick run compiles a kernel with every number of warps.
THOROUGHLY = {80, 90}
#: Columns of tensor memory of a multiprocessor.
TENSOR_MEMORY = 512
#: Instructions of tensor cores.
MATRIX = {"HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "QMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA"}
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)((?:\.\w+)*)")
_LABEL = re.compile(r"\s*\.?(\.?L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*?`\(\.?(\.?L_x_\d+)\)")


class Nowhere:
    """A driver of a GPU of one kind: kernels are specialized and compiled for it as for a real one, not launched."""

    launcher_cls = None

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        # Compiled kernels are remembered by device.
        return self.arch

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    @classmethod
    def is_active(cls) -> bool:
        return True


@dataclass
class Compiled:
    """One kernel for one kind of GPU.

    loop    instructions of its main loop, the shortest in which matrices are multiplied, by name without suffixes.
    whole   the same of all of it.
    kernel  the name of its function.
    bounds  the number of bounds of loops that an enclosing loop changes, before and after Triton's passes for a GPU.
    waits   the number of waits for all products in flight, as Triton asked and as ptxas made it.
    columns of tensor memory, which only some GPUs have.
    trap    whether it gives up, which is what Triton makes of a kernel that needs too much tensor memory.
    """

    loop: Counter[str]
    whole: Counter[str]
    kernel: str
    bounds: tuple[int, int]
    waits: tuple[int, int]
    registers: int
    stack: int
    shared: int
    columns: int
    trap: bool

    def instructions(self) -> int:
        """Of the loop."""
        return self.loop.total()


#: The kernels compiled by this process, with architecture and number of warps.
_compiled: set[tuple[str, int, int]] = set()


def compiled(
    kernel: Any, arch: int, *arguments: Any, grid: tuple[int, ...] = (1,), once: bool = False, **constants: Any
) -> Compiled | None:
    """Compile ``kernel`` as a launch with these arguments would.

    once  whether to return None if the kernel was compiled for ``arch`` with as many warps before; for architectures
          that are not in THOROUGHLY, with any number of them.
    """
    key = kernel.__name__, arch, constants["num_warps"] if arch in THOROUGHLY else 0
    if once and key in _compiled:
        return None
    _compiled.add(key)
    driver.set_active(Nowhere(arch))
    made = kernel.warmup(*arguments, grid=grid, **constants)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None, usage
    lines = text.splitlines()
    bounds = (varying_bounds(made.asm["ttir"]), varying_bounds(made.asm["ttgir"]))
    waits = (made.asm["ptx"].count("wgmma.wait_group.sync.aligned 0;"), text.count("WARPGROUP.DEPBAR.LE gsb0, 0x0"))
    loop, whole = _count(_main_loop(lines)), _count(lines)
    return Compiled(
        loop, whole, made.metadata.name, bounds, waits, int(found[1]), int(found[2]), made.metadata.shared,
        getattr(made.metadata, "tmem_size", None) or 0, re.search(r"\btrap;", made.asm["ptx"]) is not None,
    )  # fmt: skip


def _count(lines: list[str]) -> Counter[str]:
    return Counter(found[1] for line in lines if (found := _INSTRUCTION.match(line)) and found[1] != "NOP")


def _main_loop(lines: list[str]) -> list[str]:
    """From the target of a branch backwards to the branch."""
    places: dict[str, int] = {}
    loops = []
    for number, line in enumerate(lines):
        label, branch = _LABEL.match(line), _BRANCH.search(line)
        if label:
            places[label[1].lstrip(".")] = number
        if branch and branch[1].lstrip(".") in places:
            loops.append(lines[places[branch[1].lstrip(".")] : number + 1])
    return min((loop for loop in loops if _count(loop).keys() & MATRIX), key=len, default=[])
