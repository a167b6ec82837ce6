"""Recorded operations give in one call what they give one by one."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.activation import NativeActivation
from aiakq.kernels.cpu.embedding import NativeRowSelection
from aiakq.kernels.cpu.norm import NativeNorm
from aiakq.kernels.cpu.recording import Recording, RecordingError
from aiakq.kernels.ops import Ops

pytestmark = pytest.mark.usefixtures("native")

WIDTH, LAYERS, MOST = 96, 5, 40


class Stack:
    """Layers of norm, product, gate and product, whose results go on, with a residual."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random) / 8

        self.layers = [
            (
                NativeNorm(weight(WIDTH), None, 1e-5, centered=False),
                Ops(torch.device("cpu"), torch.float32).dense(weight(4 * WIDTH, WIDTH)),
                NativeActivation("silu"),
                Ops(torch.device("cpu"), torch.float32).dense(weight(WIDTH, 2 * WIDTH)),
            )
            for _ in range(LAYERS)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        added = None
        for norm, first, gate, second in self.layers:
            added = second(gate.gated(first(norm(x, added))))
        return added


def recorded(stack, x):
    with Recording() as recording:
        y = stack(x)
    return recording, recording.op_list(), y


def test_replaying_gives_the_same_bits_as_running_for_any_number_of_rows():
    stack, x = Stack(), torch.empty(MOST, WIDTH)
    recording, call, y = recorded(stack, x)
    assert len(recording.ops) == 4 * LAYERS
    for rows in (1, 2, 7, MOST, 3):
        given = torch.randn(rows, WIDTH)
        for op in recording.ops:
            op.m = rows
        x[:rows] = given
        y.fill_(float("nan"))
        call()
        assert torch.equal(y[:rows], stack(given.clone())), rows
        assert y[rows:].isnan().all(), "rows beyond the given ones were written"


def test_nothing_is_computed_while_recording():
    x = torch.full((MOST, WIDTH), float("nan"))
    stack = Stack()
    recorded(stack, x)
    assert library.of_thread.recorder is None
    assert stack(torch.ones(2, WIDTH)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_copies_of_parts_of_rows_are_recorded(dtype):
    x, y = torch.zeros(MOST, 3, 8, dtype=dtype), torch.zeros(MOST, 4, 10, dtype=dtype)

    def copies() -> None:
        y[:, :-1, 2:7] = x[:, :, :5]
        y[:, -1, :4] = x[:, 1, 3:7]

    with Recording() as recording:
        copies()
    assert not y.any()
    x[:] = torch.arange(x.numel()).view(x.shape)
    for rows in (5, MOST):
        for op in recording.ops:
            op.m = rows
        recording.op_list()()
        found = y.clone()
        copies()
        assert torch.equal(found[:rows], y[:rows]) and not found[rows:].any()
        y.zero_()
    for to, source in ((y, x[:, :, :1]), (y[:, :3, :8].float().double(), x), (y[:, :3, :8].mT, x.mT)):
        with pytest.raises(RecordingError, match=r"torch computes aten.copy_"), Recording():
            to.copy_(source)


def test_memory_of_freed_tensors_is_reused():
    recording, call, _ = recorded(Stack(), torch.empty(MOST, WIDTH))
    # A layer's products, gate, norm and scratch: those of the layer after take the same places.
    assert len(call.memory) < 4 + 4
    outputs = {op.y for op in recording.ops}
    assert len(outputs) < len(recording.ops)


def test_memory_of_live_views_is_not_reused():
    norm = NativeNorm(torch.ones(WIDTH), None, 1e-5, centered=False)
    x = torch.randn(MOST, WIDTH)
    with Recording() as recording:
        first = norm(x)
        view = first[:, :16]
        del first
        second = norm(x)
    recording.op_list()()
    assert view.data_ptr() != second.data_ptr()
    assert torch.equal(view, second[:, :16])


def test_operations_of_torch_are_refused():
    x = torch.randn(4, WIDTH)
    for compute in (lambda: x + 1, lambda: torch.zeros(3), lambda: x[torch.tensor([0])], lambda: x.sum().item()):
        with pytest.raises(RecordingError, match="torch computes aten"), Recording():
            compute()
        assert library.of_thread.recorder is None
    assert torch.equal(x + 0, x), "nothing is recorded any more"


def test_selecting_rows_equals_indexing():
    x = torch.randn(9, WIDTH)
    select = NativeRowSelection()
    numbers = torch.tensor([3, 0, 8, 3])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(select(x.to(dtype), numbers), x.to(dtype)[numbers])
    assert torch.equal(select(x[:, 5:21], numbers), x[numbers, 5:21])
    assert select(x, torch.tensor([9])).isnan().all()
    assert select(x, numbers[:0]).shape == (0, WIDTH)
