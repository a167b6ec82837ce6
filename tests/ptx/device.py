"""A driver for Triton whose GPU is the emulator: kernels are compiled, and their PTX runs on tensors of the CPU.

Launchers, self-test and tests of the product are used as they are. Triton has to be imported without TRITON_INTERPRET.
"""

from __future__ import annotations

import gc
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from ptx import allocation, library
from ptx.program import Program, RunOptions, Span
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import driver

from aiakq.kernels.triton.precompile import AbsentGpu

#: Bytes of shared memory that a block may have, and multiprocessors: of an A100, an L40S and an H100.
SHARED = {80: 166912, 89: 101376, 90: 232448}
PROCESSORS = {80: 108, 89: 142, 90: 132}


@dataclass
class Emulation:
    """How kernels are executed, and what was.

    arch      compute capability times ten of the GPU.
    options   of every launch from now on.
    rewrite   changes the PTX of kernels, by name, before it is decoded; asked at every launch.
    observer  called before every launch.
    programs  the kernels that have run, by name, each with its compiled variants.
    seconds   of processor time that the emulator took, without compiling and decoding.
    """

    arch: int
    options: RunOptions = field(default_factory=RunOptions)
    rewrite: Callable[[str, str], str] | None = None
    observer: Callable[[Launch], None] | None = None
    programs: dict[str, list[Program]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """The number of instructions that warps have executed."""
        return sum(program.steps for variants in self.programs.values() for program in variants)

    def program(self, name: str, text: str, shared: int) -> Program:
        """Return the kernel of ``text``, decoded once."""
        changed = text if self.rewrite is None else self.rewrite(name, text)
        variants = self.programs.setdefault(name, [])
        found = next((program for program in variants if program.text == changed), None)
        if found is None:
            found = Program(changed, shared)
            variants.append(found)
        return found


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel: the bits of its parameters, and the tensors whose memory it may use."""

    program: Program
    grid: tuple[int, int, int]
    bits: list[bytes]
    tensors: list[Tensor]

    def run(self, program: Program, options: RunOptions) -> None:
        """Run it, or instead of its kernel a changed one. Raises PtxFault."""
        program.run(self.grid, self.bits, {_span(tensor) for tensor in self.tensors}, options)


class EmulatedGpu(AbsentGpu):
    """A driver of a GPU of one kind."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(emulation.arch)
        self.emulation = emulation
        self.utils = self
        self.launcher_cls = lambda source, metadata: _Launcher(source, metadata, emulation)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.emulation.arch]}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return the module, the function, registers, spills and the most threads of a block."""
        return 1, 1, 0, 0, 1024

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    @classmethod
    def is_active(cls) -> bool:
        return True


def install(arch: int) -> Emulation:
    """Let Triton compile for ``arch`` and run on the emulator, with launches as on the usual GPU of that kind.

    Kernels are compiled to PTX and not further, so what is compiled has a cache of its own.
    """
    from aiakq.kernels.triton import configs

    emulation = Emulation(arch)
    os.environ["TRITON_CACHE_DIR"] = str(library.FOLDER / "triton")
    CUDABackend.make_cubin = lambda *_: b""
    CompiledKernel._init_handles = _load
    driver.set_active(EmulatedGpu(emulation))
    allocation.mark_unwritten()
    configs.assume(configs.Gpu("default", PROCESSORS[arch], arch))
    return emulation


class _Launcher:
    """Runs a compiled kernel; Triton calls it with all arguments of the function, constants too."""

    def __init__(self, source: Any, metadata: Any, emulation: Emulation) -> None:
        self._types = list(source.signature.values())
        self._emulation = emulation
        self.loaded: tuple[str, str, int] | None = None

    def load(self, name: str, text: str, shared: int) -> None:
        """Take the PTX of the kernel."""
        self.loaded = name, text, shared

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        arguments = rest[-len(self._types) :] if self._types else ()
        given = [(kind, value) for kind, value in zip(self._types, arguments, strict=True) if kind != "constexpr"]
        assert self.loaded is not None
        program = self._emulation.program(*self.loaded)
        bits = [_bits(kind, value) for kind, value in given]
        # What follows are addresses of memory that Triton may ask for and these kernels do not.
        bits += [b""] * (len(program.kernel.parameter_sizes) - len(bits))
        tensors = list(_used([value for _, value in given if isinstance(value, Tensor)]))
        launch = Launch(program, (x, y, z), bits, tensors)
        if self._emulation.observer is not None:
            self._emulation.observer(launch)
        started = time.process_time()
        try:
            launch.run(program, self._emulation.options)
        finally:
            self._emulation.seconds += time.process_time() - started


def _bits(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        return struct.pack("<Q", value.data_ptr())
    if kind.startswith("fp"):
        return struct.pack({"fp32": "<f", "fp64": "<d"}[kind], value)
    size = max(8, int(kind.lstrip("iu"))) // 8
    return int(value).to_bytes(size, "little", signed=value < 0)


def _used(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors, and those whose addresses are numbers in one of them."""
    addresses: set[int] = set()
    for tensor in tensors:
        yield tensor
        if tensor.dtype == torch.int64:
            addresses.update(tensor[tensor > 1 << 32].tolist())
    if addresses:
        for other in gc.get_objects():
            if issubclass(type(other), Tensor) and other.device.type == "cpu" and other.layout == torch.strided:
                span = _span(other)
                if any(span.begin <= address < span.end for address in addresses):
                    yield other


def _span(tensor: Tensor) -> Span:
    storage = tensor.untyped_storage()
    return Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


_init_handles = CompiledKernel._init_handles


def _load(self: CompiledKernel) -> None:
    """Load a kernel as Triton does, and give its PTX to the launcher."""
    _init_handles(self)
    if isinstance(self._run, _Launcher) and self._run.loaded is None:
        self._run.load(self.name, self.asm["ptx"], self.metadata.shared)
