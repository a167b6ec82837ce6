"""Put the fake GPU in the place of CUDA, for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import guard
from fake_cuda.device import FakeDevice, Launches
from fake_cuda.graphs import FakeGraph, launch
from fake_cuda.streams import FakeEvent, FakeStream
from fake_cuda.tensors import CudaMode, CudaTensor
from torch.utils._pytree import tree_flatten, tree_map_only

#: A Hopper with one multiprocessor, for which launchers make as few programs as they can.
PROPERTIES = SimpleNamespace(
    name="fake GPU", multi_processor_count=1, major=9, minor=0, total_memory=1 << 33, warp_size=32
)


@contextlib.contextmanager
def fake_cuda(seed: int = 0) -> Iterator[FakeDevice]:
    """Until the end of the block, torch has one GPU, a fake one. Raises the first fault that was found."""
    device = FakeDevice(seed)
    with pytest.MonkeyPatch.context() as patch:
        _replace_cuda(patch, device)
        _replace_tensors(patch, device)
        _replace_triton(patch, device)
        guard.library().set_guard(1)
        try:
            with CudaMode(device):
                yield device
        finally:
            guard.library().set_guard(0)
    device.finish()


@contextlib.contextmanager
def counted(device: FakeDevice) -> Iterator[Launches]:
    """What the device is asked to do in the block."""
    before, device.launches = device.launches, Launches()
    try:
        yield device.launches
    finally:
        before.add(device.launches)
        device.launches = before


def _replace_cuda(patch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    """Replace what the product uses of torch.cuda."""

    @contextlib.contextmanager
    def stream(chosen: FakeStream | None) -> Iterator[None]:
        before, device.current = device.current, chosen or device.current
        try:
            yield
        finally:
            device.current = before

    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "device": lambda *_: contextlib.nullcontext(),
        "device_of": lambda *_: contextlib.nullcontext(),
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda *_: PROPERTIES,
        "mem_get_info": lambda *_: (PROPERTIES.total_memory // 2, PROPERTIES.total_memory),
        "empty_cache": lambda: None,
        "manual_seed_all": lambda *_: None,
        "synchronize": lambda *_: device.synchronize(),
        "current_stream": lambda *_: device.current,
        "default_stream": lambda *_: device.default,
        "stream": stream,
        "Stream": lambda *_, **__: device.new_stream(),
        "Event": lambda **_: FakeEvent(device),
        "CUDAGraph": lambda *_, **__: FakeGraph(device),
        "graph_pool_handle": lambda: next(FakeGraph._pools),
        "is_current_stream_capturing": lambda: device.graph_of(device.current) is not None,
    }
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.cuda.graph, "default_capture_stream", None)
    patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)


def _replace_tensors(patch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    """See what the host reads of its own tensors without an operation of torch, and pin them."""

    def reading(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, CudaTensor):
                device.check_host(self, False, name)
            return original(self, *args, **kwargs)

        return read

    for name in ("tolist", "numpy", "__array__"):
        patch.setattr(torch.Tensor, name, reading(name))
    patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: device.pin(self))
    patch.setattr(torch.Tensor, "is_pinned", lambda self, *_: device.is_pinned(self))


def _replace_triton(patch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    """Kernels of Triton run in its interpreter, over the memory of the CPU; their self-tests are another test's."""
    from triton.runtime.interpreter import GridExecutor

    from aiakq.kernels.triton import configs, self_test

    interpret = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        if not any(isinstance(each, CudaTensor) for each in tensors):
            return interpret(self, *args, **kwargs)
        if not all(isinstance(each, CudaTensor) for each in tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        inner, named = tree_map_only(CudaTensor, lambda each: each.inner, (args, kwargs))
        launch(device, self.fn.__name__, tensors, lambda: interpret(self, *inner, **named))
        return None

    patch.setattr(GridExecutor, "__call__", call)
    patch.setattr(self_test, "verdict", lambda *_: self_test.Verdict(None, 0.0))
    for kept in (configs._counters, configs._scratch):
        for key in [key for key in kept if "cuda" in str(key)]:
            patch.delitem(kept, key)
    patch.setattr(configs, "_counters", {})
    patch.setattr(configs, "_scratch", {})
    configs.gpu.cache_clear()
