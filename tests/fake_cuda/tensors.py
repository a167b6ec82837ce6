"""Tensors on the fake GPU, and what every operation of torch does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_cuda.device import PAGEABLE, FakeDevice, map_tensors, poisoned
from fake_cuda.streams import Lease, Memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

#: Operations whose results have a size or a value that the host has to read.
READ_BY_THE_HOST = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.is_nonzero, aten.allclose,
}  # fmt: skip
#: Operations whose results nobody has written.
UNINITIALIZED = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
#: Products, whose sums must not depend on the number of rows: torch's do on a CPU, libraries of a GPU may.
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.addmv}
#: Operations that take tensors of the host beside those of the GPU, after copying them.
COPIES_INDICES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class CudaTensor(torch.Tensor):
    """A tensor whose device is "cuda:0".

    inner   [...] on the CPU: its values.
    lease   of its memory, which it shares with its views.
    """

    inner: Tensor
    lease: Lease
    state: FakeDevice

    @staticmethod
    def __new__(cls, inner: Tensor, lease: Lease, state: FakeDevice) -> CudaTensor:
        # Never one of inference mode: its views could not be those of a tensor that was made outside.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
                device=CUDA,
            )  # fmt: skip
        made.inner, made.lease, made.state = inner, lease, state
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, CudaTensor)).state
        return dispatch(state, func, args, kwargs or {}, None)

    @property
    def memory(self) -> Memory:
        """Its memory."""
        return self.lease.memory

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def tolist(self) -> Any:
        """Wait for the GPU, and read it."""
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refuse, as torch does."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def data_ptr(self) -> int:
        """The address of its values."""
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        """Do not reuse its memory before what is launched on ``stream`` now is over."""
        self.memory.recorded.add(stream.name)

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({list(self.shape)}, {self.dtype})"


class CudaMode(TorchDispatchMode):
    """Sees every operation of torch in this thread: those that make tensors of the GPU, and what the host reads."""

    def __init__(self, state: FakeDevice) -> None:
        super().__init__()
        self._state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(self._state, func, args, kwargs or {}, self)


def dispatch(state: FakeDevice, func: Any, args: Any, kwargs: Any, mode: CudaMode | None) -> Any:
    """Run an operation on the device of its tensors, or on the one that it names."""
    flat = tree_flatten((args, kwargs))[0]
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    on_gpu = [each for each in tensors if isinstance(each, CudaTensor)]
    if not on_gpu and not any(isinstance(each, torch.device) and each.type == "cuda" for each in flat):
        _check_host(state, func, tensors)
        return func(*args, **kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        if mode is None:
            return func.decompose(*args, **kwargs)
        with mode:
            return func.decompose(*args, **kwargs)
    with _disable_current_modes():
        if func.overloadpacket in (aten._to_copy, aten.copy_) and (copied := _copied(state, func, args, kwargs)):
            return copied[0]
        return _run(state, func, args, kwargs, tensors)


def _check_host(state: FakeDevice, func: Any, tensors: list[Tensor]) -> None:
    """A host operation must not meet a copy; views read nothing."""
    if func.is_view or not tensors:
        return
    is_written = func._schema.is_mutable
    for number, tensor in enumerate(tensors):
        state.check_host(tensor, is_written and number == 0, str(func.overloadpacket))


def _copied(state: FakeDevice, func: Any, args: Any, kwargs: Any) -> tuple[Tensor] | None:
    """Copy between the host and the GPU; None: it is between tensors of the GPU."""
    if func.overloadpacket is aten.copy_:
        target, source = args[:2]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(target, CudaTensor) and not isinstance(source, CudaTensor):
            if source.dim() == 0 and source.dtype != target.dtype:
                source = source.to(target.dtype)
            copy = lambda: target.inner.copy_(source)  # noqa: E731
            state.copy_to_device(source, copy, [target.memory], non_blocking)
            return (target,)
        if isinstance(source, CudaTensor) and not isinstance(target, CudaTensor):
            is_late = non_blocking and state.is_pinned(target)
            result = source.inner.to(target.dtype).expand(target.shape)
            return (state.copy_to_host(result, target, [source.memory], is_late),)
        return None
    [source], given = args, dict(kwargs)
    device = given.pop("device", None) or source.device
    non_blocking = bool(given.pop("non_blocking", False))
    if isinstance(source, CudaTensor) == (device.type == "cuda"):
        return None
    result = func(_inner(source), **given | {"device": CPU, "pin_memory": None})
    if isinstance(source, CudaTensor):
        return (state.copy_to_host(result, torch.empty_like(result), [source.memory], non_blocking),)
    lease = state.allocated(result)
    return (state.copy_to_device(source, lambda: CudaTensor(result, lease, state), [lease.memory], non_blocking),)


def _run(state: FakeDevice, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Run an operation on the GPU."""
    name, packet = func.name().removeprefix("aten::"), func.overloadpacket
    _check_devices(state, func, args, tensors)
    if packet in READ_BY_THE_HOST or _reads_a_size(packet, args, kwargs):
        state.use(name, [each.memory for each in tensors if isinstance(each, CudaTensor)], [])
        state.blocks(name)
    wanted = kwargs.get("device")
    inner_args, inner_kwargs = map_tensors(_inner, (args, kwargs))
    inner_args, inner_kwargs = tree_map_only(torch.device, lambda _: CPU, (inner_args, inner_kwargs))
    inner_kwargs.pop("pin_memory", None)
    call = _product(func) if packet in PRODUCTS else func
    if func.is_view:
        return _wrapped(state, call(*inner_args, **inner_kwargs), tensors, None)
    own = [each for each in tensors if isinstance(each, CudaTensor)]
    writes = _written(func, args, kwargs)
    written = [each.memory for each in writes]
    reads = [each.memory for each in own if each.memory not in written]
    outputs: list[Any] = []

    def launch() -> Any:
        result = call(*inner_args, **inner_kwargs)
        if packet in UNINITIALIZED:
            result = poisoned(result)
        outputs.append(result)
        return result

    if packet in UNINITIALIZED or (writes and not any(each.numel() for each in writes)):
        result = launch()  # nothing to launch
    else:
        result = state.run(name, launch, reads, written)
    if wanted is not None and wanted.type == "cpu":
        return result
    wrapped = _wrapped(state, result, tensors, None if packet in UNINITIALIZED else name)
    if state.capturing is not None and packet not in UNINITIALIZED:
        state.capturing.record(name, _again(call, inner_args, inner_kwargs, result))
    return wrapped


def _again(call: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    """Compute an operation again, into the memory of its first result."""
    first = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]

    def run() -> None:
        values = [each for each in tree_flatten(call(*args, **kwargs))[0] if isinstance(each, torch.Tensor)]
        for kept, new in zip(first, values, strict=True):
            if kept is not new:
                kept.copy_(new)

    return run


def _wrapped(state: FakeDevice, result: Any, tensors: list[Tensor], name: str | None) -> Any:
    """Tensors of the GPU for what an operation returned: arguments themselves, views of them, or new ones.

    name  of the operation that has written new ones; None if none has.
    """
    known = [each for each in tensors if isinstance(each, CudaTensor)]

    def wrap(inner: Tensor) -> Tensor:
        for each in known:
            if each.inner is inner:
                return each
        address = inner.untyped_storage()._cdata
        lease = next((each.lease for each in known if each.inner.untyped_storage()._cdata == address), None)
        if lease is None:
            lease = state.allocated(inner)
            if name is not None and state.capturing is None:
                state.use(name, [], [lease.memory])
        return CudaTensor(inner, lease, state)

    return map_tensors(wrap, result)


def _written(func: Any, args: Any, kwargs: Any) -> list[CudaTensor]:
    """The arguments that an operation modifies."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(value)[0] if isinstance(each, CudaTensor)]
    return found


def _check_devices(state: FakeDevice, func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Tensors are on one device, but for numbers and indices of the host; indices are copied, and the host waits."""
    for each in tensors:
        if isinstance(each, CudaTensor) or each.dim() == 0:
            continue
        if func.overloadpacket not in COPIES_INDICES:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func.name()}")
        state.blocks(PAGEABLE)


def _reads_a_size(packet: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host has to read how many elements a mask selects, or a tensor repeats."""
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if packet not in COPIES_INDICES:
        return False
    masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
    is_fill = packet is not aten.index and len(args) > 2 and args[2].dim() == 0
    return bool(masks) and not is_fill


def _product(func: Any) -> Callable[..., Any]:
    """A product of floats with sums in float64, rounded once."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = next(each.dtype for each in tree_flatten(args)[0] if isinstance(each, torch.Tensor))
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return func(*args, **kwargs)
        out = kwargs.get("out")
        wide = map_tensors(lambda each: each.double(), (args, {k: v for k, v in kwargs.items() if k != "out"}))
        plain = func.overloadpacket.default
        result = plain(*wide[0], **wide[1]).to(dtype)
        return result if out is None else out.copy_(result)

    return run


def _indices(index: Any) -> Any:
    """Lists among indices as tensors of the host, which torch would copy without asking ``CudaMode``."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, CudaTensor) else tensor
