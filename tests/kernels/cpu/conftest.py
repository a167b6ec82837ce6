"""Fixtures of the native kernels' tests: the library on each instruction set, weights, and calls with strides."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.kernels.cpu import build, library
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight

SCHEMES = {bits: f"w{bits}a16" for bits in (2, 3, 4, 5, 6, 8)}
#: Tables of floats, of integers times a power of two that fit into 5 bits, and of integers of 8 bits with both ends.
VALUES = {
    **TABLES,
    "int8": (-128.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, *map(float, range(1, 127, 18)), 127.0),
}
SETS = ("vnni_bf16", *build.X86) if platform.machine().lower() in ("x86_64", "amd64") else tuple(build.ELSEWHERE)


@pytest.fixture(scope="session")
def native() -> library.NativeLibrary:
    """The library. Skips where there is no compiler; with one, a missing library is a failure."""
    reason = library.unavailable()
    if reason:
        try:
            build.find_compiler()
        except build.BuildError:
            pytest.skip(reason)
        pytest.fail(reason)
    return library.load_library()


@pytest.fixture(params=SETS)
def isa(request, native) -> Iterator[str]:
    """Runs the test once with every instruction set of this machine."""
    before = native.isa
    try:
        native.use_isa(request.param)
    except OSError as problem:
        pytest.skip(str(problem))
    yield request.param
    native.use_isa(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """``threads(n)`` sets torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_weight() -> Callable[..., QWeight]:
    """``make_weight(n, k, bits, group, zeros, perm, bias, w8a8, table)`` -> random QWeight.

    ``zeros`` is None, "codes", "floats" or "offsets", ``table`` a key of VALUES.
    """

    def make(
        n: int,
        k: int,
        bits: int,
        group: int,
        zeros: str | None = None,
        perm=False,
        bias=False,
        w8a8=False,
        table: str | None = None,
    ) -> QWeight:
        random = torch.Generator().manual_seed(n * 1009 + k * 31 + bits * 7 + group)
        groups = -(-k // group)
        codes = torch.randint(0, 2**bits, (n, k), generator=random).to(torch.uint8)
        # Signed: some tools write negative scales.
        scales = (torch.rand(n, groups, generator=random) + 0.5) * torch.randn(n, groups, generator=random).sign()
        zero = torch.randint(0, 2**bits, (n, groups), generator=random)
        return QWeight(
            scheme="w8a8" if w8a8 else "lut4a16" if table else SCHEMES[bits],
            codes=codes,
            scales=scales if w8a8 or group % 3 else scales.half(),
            zeros={None: None, "codes": zero.to(torch.uint8), "floats": zero + 0.37, "offsets": None}[zeros],
            perm=torch.randperm(k, generator=random) if perm else None,
            bias=torch.randn(n, generator=random) if bias else None,
            group_size=group,
            table=torch.tensor(VALUES[table]) if table else None,
            offsets=-scales * zero if zeros == "offsets" else None,
        )

    return make


@pytest.fixture(scope="session")
def apply() -> Callable[..., Tensor]:
    """``apply(state, x, y)`` runs a prepared layer into ``y``, rows of any stride, and returns it."""

    def run(state: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
        op, m = state.op, len(x)
        y = torch.full((m, op.n), float("nan"), dtype=x.dtype) if y is None else y
        assert x.stride(1) == 1 and y.stride(1) == 1
        scratch = library.allocate_scratch(m * state.scratch_per_row)
        op.m, op.x_type, op.y_type = m, library.TYPES[x.dtype], library.TYPES[y.dtype]
        op.x, op.y, op.scratch = x.data_ptr(), y.data_ptr(), scratch.data_ptr()
        op.x_stride, op.y_stride = x.stride(0), y.stride(0)
        library.OpList(op)()
        return y

    return run


@pytest.fixture(scope="session")
def worst_row() -> Callable[[Tensor, Tensor], float]:
    """The largest relative error, root mean square over a row, of any row."""

    def worst(found: Tensor, wanted: Tensor) -> float:
        error = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
        # Not a number is the worst of all.
        return error.nan_to_num(float("inf")).max().item()

    return worst
