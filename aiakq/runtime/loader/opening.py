"""The weights of a model as its configuration says: a checkpoint's or random ones, and the operations that compute."""

from __future__ import annotations

from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.contradictions import contradictions
from aiakq.formats.left_out import of_first_prediction_layer
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.row_parallel import Collective, operations_of_rank
from aiakq.kernels.selection import BACKENDS
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import free_memory
from aiakq.runtime.loader.dummy_weights import DummyWeights as DummyWeights
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.loader.rounding import RoundingAtLoad
from aiakq.runtime.loader.stored_problem import stacked_problem, stacks, stored_problem
from aiakq.runtime.loader.weights import CheckpointWeights as CheckpointWeights

#: Implementations that compute on quantized weights, which ``--dequantize always`` excludes.
QUANTIZED = frozenset({"cpu", "triton", "triton-floats", "triton-fp8", "triton-w8a8"})


def weights_for(config: EngineConfig, collective: Collective | None = None) -> CheckpointWeights | DummyWeights:
    """Return the weights of ``config``: random ones, or the checkpoint's. Raises ``tensor_inventory``.

    collective  collective of the ranks that the model is sharded over, or None.
    """
    if config.load.load_format == "dummy":
        return DummyWeights(config, operations(config, False, collective))
    weights = open_weights(config, collective)
    left_out = check_inventory(config.model, weights.checkpoint)
    if config.draft is not None and config.draft.load == config.load:
        left_out -= of_first_prediction_layer(left_out, config.model.num_layers)
    weights.left_out = left_out
    return weights


def open_weights(config: EngineConfig, collective: Collective | None = None) -> CheckpointWeights:
    """Open the checkpoint of ``config`` as a source of weights, with the implementations that memory allows."""
    load = config.load
    checkpoint = Checkpoint.open(load.path, load.weights, load.ignore_patterns, config.model.raw)
    checkpoint.read_with(load.mapped, load.read_threads, config.device.dtype)
    checkpoint.remarks += contradictions(checkpoint)
    may_dequantize = _may_dequantize(config, checkpoint)
    rounding = RoundingAtLoad(checkpoint, config.spec) if load.rounds and config.spec is not None else None
    weights = CheckpointWeights(checkpoint, operations(config, may_dequantize, collective), rounding)
    if (decoded := _floats_without_kernel(config, checkpoint)) > 0:
        sizes = f"{decoded / 2**30:.1f} GiB in {str(config.device.dtype).removeprefix('torch.')}"
        when = f"at load, to {sizes}" if may_dequantize else f"in every step, because {sizes} do not fit"
        weights.remarks.append(f"small floats are decoded {when}: no kernel of this device computes with them")
    return weights


def operations(config: EngineConfig, may_dequantize: bool = False, collective: Collective | None = None) -> Ops:
    """Return the operations of ``config``'s device, sharded if there is a ``collective``.

    may_dequantize  whether there is enough memory for dequantized weights.
    """
    excluded = frozenset() if may_dequantize else frozenset({"dequantized"})
    if config.load.dequantize == "always":
        excluded = QUANTIZED
    device = config.device
    uniform = config.parallel.math == "exact"
    ops = Ops(device.device, device.dtype, config.cache.dtype, excluded, config.load.cpu_math == "exact", uniform)
    return ops if collective is None else operations_of_rank(ops, collective)


#: Largest share of free memory that weights dequantized at load may take: where kernels compute with most packed
#: weights, and where none does.
_SHARE, _LARGE_SHARE = 0.25, 0.8


def _may_dequantize(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    if config.load.dequantize != "auto":
        return config.load.dequantize != "never"
    share = _LARGE_SHARE if _floats_without_kernel(config, checkpoint) > 0 else _SHARE
    return _expanded(config, checkpoint) < share * free_memory(config.device.device)


def _floats_without_kernel(config: EngineConfig, checkpoint: Checkpoint) -> float:
    """Return the bytes, in the dtype of activations, of weights that are small floats on a GPU without kernels for
    them.
    """
    backend = BACKENDS.get(config.device.device.type)
    if backend is None or "triton" not in backend.names:
        return 0.0
    spec, ops = config.spec, operations(config)
    specs = [] if spec is None else [spec.layer, *(layer for _, layer in spec.layers if layer is not None)]
    width = config.device.dtype.itemsize
    sizes = 0.0
    for experts in stacks(checkpoint):
        selection, _ = ops.select("linear", stacked_problem(experts, ops))
        sizes += 0 if selection.name in QUANTIZED else experts.weights * width
    if config.load.rounds or not any(layer.is_float for layer in specs):
        return sizes
    for prefix in checkpoint.quantized_linears():
        if checkpoint.linear_spec(prefix).layer.is_float:
            selection, _ = ops.select("linear", stored_problem(checkpoint, prefix, ops))
            sizes += 0 if selection.name in QUANTIZED else _size_of(config, checkpoint, prefix)
    return sizes


def _expanded(config: EngineConfig, checkpoint: Checkpoint) -> float:
    """Return the bytes of all quantized weights in the dtype of activations."""
    if config.load.rounds and config.spec is not None:
        return sum(RoundingAtLoad(checkpoint, config.spec).weights().values()) * config.device.dtype.itemsize
    prefixes = checkpoint.quantized_linears() if config.spec is not None else ()
    stacked = sum(experts.weights for experts in stacks(checkpoint)) * config.device.dtype.itemsize
    return stacked + sum(_size_of(config, checkpoint, prefix) for prefix in prefixes)


def _size_of(config: EngineConfig, checkpoint: Checkpoint, prefix: str) -> float:
    """Return the bytes of a quantized linear in the dtype of activations."""
    # Codes are the largest tensors. If the config is wrong about their width, only this estimate is affected.
    info = max(checkpoint.linear_headers(prefix).values(), key=lambda info: info.nbytes, default=None)
    if info is None:  # codes of another format, which the comparison of all tensors refuses
        return 0
    bits = 8 if info.dtype == "I8" else checkpoint.linear_spec(prefix).bits
    return info.nbytes * 8 / bits * config.device.dtype.itemsize
