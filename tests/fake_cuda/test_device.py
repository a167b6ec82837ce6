"""What the fake GPU computes, and each fault that it knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from fake_cuda.install import counted, fake_cuda
from fake_cuda.streams import CudaFault

CUDA = torch.device("cuda")


@contextlib.contextmanager
def finds(kind: str) -> Iterator[None]:
    """The block, on a GPU of its own, ends with a fault of this kind."""
    with pytest.raises(CudaFault) as found, fake_cuda():
        yield
    assert found.value.kind == kind, found.value


def graph_of(compute, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        compute()
    return graph


def test_tensors_are_computed_with_as_on_a_gpu(device):
    x = torch.arange(12, device=CUDA).view(3, 4)
    x[:2] += 1
    assert (x.device, x.is_cuda, x[0, 0].item()) == (torch.device("cuda", 0), True, 1)
    assert x.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [8, 9, 10, 11]]
    y = x.float() @ torch.eye(4).to(CUDA)
    assert y.dtype == torch.float32 and y.cpu().tolist() == x.tolist()
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4)
    with pytest.raises(TypeError):
        x.numpy()


def test_what_nobody_has_written_is_no_number(device):
    assert torch.empty(3, device=CUDA).isnan().all() and torch.empty_like(torch.ones(2, device=CUDA)).isnan().all()
    assert (torch.empty(3, device=CUDA, dtype=torch.int32) > 1 << 24).all()


def test_a_copy_is_read_behind_its_event(device):
    x = torch.arange(4, device=CUDA)
    with counted(device) as launches:
        copy = (x * 2).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        arrived.synchronize()
    assert copy.numpy().tolist() == [0, 2, 4, 6]
    assert (launches.to_host, launches.blocked, launches.waits) == (1, [], {"Event.synchronize": 1})


@pytest.mark.parametrize("read", [lambda x: x.tolist(), lambda x: x.numpy(), lambda x: x + 1, lambda x: x[0].item()])
def test_a_read_that_no_event_guards_is_found(read):
    with finds("host read that no event guards"):
        early = torch.cuda.Event()
        early.record()
        copy = torch.ones(4, device=CUDA).to("cpu", non_blocking=True)
        early.synchronize()
        read(copy)


def test_what_numpy_reads_too_early_has_no_values(device):
    target = torch.zeros(3).pin_memory()
    seen = target.numpy()
    target.copy_(torch.ones(3, device=CUDA), non_blocking=True)
    assert all(seen != seen)
    torch.cuda.synchronize()
    assert seen.tolist() == [1, 1, 1]


def test_pinned_buffers_are_free_behind_their_copy(device):
    buffer = torch.ones(4).pin_memory()
    with counted(device) as launches:
        x = buffer.to(CUDA, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        buffer.zero_()
    assert x.tolist() == [1, 1, 1, 1] and launches.to_device == 1 and not launches.blocked


@pytest.mark.parametrize("write", [lambda x: x.zero_(), lambda x: x.numpy().fill(0)], ids=["torch", "numpy"])
def test_a_pinned_buffer_that_is_overwritten_too_early_is_found(write):
    with finds("pinned buffer overwritten while a copy from it was pending"):
        buffer = torch.ones(4).pin_memory()
        buffer.to(CUDA, non_blocking=True)
        write(buffer)
        torch.cuda.synchronize()


def test_what_makes_the_host_wait_is_counted(device):
    x = torch.arange(4, device=CUDA)
    with counted(device) as launches:
        bool(x[0] == 0)
        x[x > 1].sum()
        x[[1, 2]] = 0
        torch.tensor([1, 2]).to(CUDA, non_blocking=True)
        x.cpu()
    assert [name for name, _ in launches.blocked] == [
        "_local_scalar_dense", "index.Tensor", "copy from pageable memory", "copy from pageable memory",
        "copy to the host",
    ]  # fmt: skip
    assert all(where.startswith("test_device.py") for _, where in launches.blocked)


def test_a_capture_computes_nothing_and_a_replay_everything(device):
    x, total = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)
    made = []
    with counted(device) as launches:
        graph = graph_of(lambda: (made.append(x * 2), total.add_(made[0])))
        assert not launches.kernels
        assert total.tolist() == [0, 0, 0] and made[0].isnan().all()
        x.fill_(4)
        graph.replay()
        graph.replay()
    assert total.tolist() == [16, 16, 16] and made[0].tolist() == [8, 8, 8] and launches.replays == 2


@pytest.mark.parametrize(
    ("kind", "compute"),
    [
        ("synchronization in a capture", lambda x: torch.cuda.synchronize()),
        ("synchronization in a capture", lambda x: torch.cuda.current_stream().synchronize()),
        ("synchronization in a capture", lambda x: x.sum().item()),
        ("synchronization in a capture", lambda x: x.nonzero()),
        ("synchronization in a capture", lambda x: x[x > 0]),
        ("copy between host and GPU in a capture", lambda x: torch.ones(2).to(CUDA, non_blocking=True)),
        ("copy between host and GPU in a capture", lambda x: x.to("cpu", non_blocking=True)),
        ("copy between host and GPU in a capture", lambda x: x.copy_(torch.ones(3).pin_memory(), non_blocking=True)),
    ],
)
def test_what_cannot_be_captured_is_found(kind, compute):
    with finds(kind):
        x = torch.ones(3, device=CUDA)
        graph_of(lambda: compute(x))


def test_the_default_stream_and_other_streams_cannot_be_captured():
    with finds("capture of the default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    with finds("work on another stream during a capture"):
        x, side = torch.ones(3, device=CUDA), torch.cuda.Stream()

        def compute():
            with torch.cuda.stream(side):
                x.add_(1)

        graph_of(compute)
    with finds("event of a capture used outside"):
        event = torch.cuda.Event()
        graph_of(event.record)
        torch.cuda.current_stream().wait_event(event)


def test_a_graph_whose_memory_was_freed_is_found():
    with finds("graph uses memory that was freed"):
        x = torch.ones(3, device=CUDA)
        graph = graph_of(lambda: x.add_(1))
        x = torch.zeros(3, device=CUDA)
        graph.replay()


def test_streams_that_events_order(device):
    x, side = torch.ones(3, device=CUDA), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    side.record_event().wait()
    x.add_(1)
    assert x.tolist() == [3, 3, 3]


@pytest.mark.parametrize("first", ["wait", "no wait"])
def test_streams_that_no_event_orders_are_found(first):
    with finds("accesses that no event orders"):
        x, side = torch.ones(3, device=CUDA), torch.cuda.Stream()
        if first == "wait":
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        x.add_(1)


def test_inputs_of_a_replay_that_are_overwritten_are_found():
    with finds("accesses that no event orders"):
        x, total = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)
        graph, side = graph_of(lambda: total.add_(x)), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph.replay()
        with torch.cuda.stream(side):
            x.fill_(2)


def test_memory_that_another_stream_still_uses_is_not_freed():
    def use(is_recorded):
        x, side = torch.ones(3, device=CUDA), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if is_recorded:
            x.record_stream(side)

    with fake_cuda():
        use(True)
    with finds("memory freed while another stream uses it"):
        use(False)
