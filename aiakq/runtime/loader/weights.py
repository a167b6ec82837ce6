"""The source of a model's weights, a checkpoint or random numbers, and the operations that its layers use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from aiakq import formats
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint, packed_bytes
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import Role
from aiakq.kernels.ops.row_parallel import Collective, operations_of_rank
from aiakq.kernels.types import QWeight
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import free_memory, release_memory
from aiakq.runtime.loader.binding import LinearBuilder, Part, joined_rows
from aiakq.runtime.loader.dummy_weights import DummyWeights
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.loader.rounding import RoundingAtLoad

#: Number of weights to prepare before freed memory is returned to the system, which costs time.
_RELEASE_EVERY = 30_000_000


class CheckpointWeights(LinearBuilder):
    """``Weights`` that are read from a checkpoint.

    remarks   notes about the files for the user, without duplicates.
    left_out  tensors of the checkpoint that the model does not use, see ``formats.left_out``.
    rounding  rounds weights that are not quantized; None: they stay as they are.
    """

    left_out: Collection[str] = ()

    def __init__(self, checkpoint: Checkpoint, ops: Ops, rounding: RoundingAtLoad | None = None) -> None:
        super().__init__(ops)
        self.checkpoint = checkpoint
        self.rounding = rounding
        self.remarks: list[str] = [] if rounding is None else [rounding.remark]
        self._prepared = 0
        #: Why weights were decoded at load -> their bytes as floats.
        self._decoded: dict[str, int] = {}

    def has(self, name: str) -> bool:
        return self.checkpoint.locate(name) is not None

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return [*shape] in ``dtype`` or the activation dtype, on the device. Raises ``tensor_mismatch``."""
        return self._stored(name, *shape).to(device=self.ops.device, dtype=dtype or self.ops.dtype)

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """Return [N, K] in its stored dtype, or dequantized to the activation dtype. Raises ``tensor_mismatch``."""
        if not self._is_quantized(name):
            return self._stored(f"{name}.weight", n, k)
        return as_floats(self._quantized(name, n, k), self.ops.dtype)

    def _stored(self, name: str, *shape: int) -> Tensor:
        """Return the tensor in its stored dtype. Raises ``tensor_mismatch``, and ``not_finite`` for vectors."""
        source = self.checkpoint.locate(name)
        if source is None:
            raise error("tensor_mismatch", path=self.checkpoint.path, reason=f"the tensor {name} is missing")
        stored = tuple(self.checkpoint.inventory[source].shape)
        if stored != shape:
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{source} has the shape {list(stored)}, config.json says {list(shape)}",
            )
        return self.checkpoint.checked_tensor(source)

    def _bias(self, name: str, n: int) -> Tensor:
        return self._stored(f"{name}.bias", n)

    def _release(self, coming: int) -> None:
        """Return memory to the system from time to time, before ``coming`` weights are prepared."""
        if self._prepared > _RELEASE_EVERY:
            # Drop the file's pages that were read, and return freed heap memory.
            self.checkpoint.close()
            release_memory()
            self._prepared = 0
        self._prepared += coming

    def _read(self, parts: Sequence[Part], k: int, bias: bool, role: Role, rows: Tensor | None = None) -> LinearLayer:
        self._release(k * sum(n for _, n in parts))
        is_quantized = [self._is_quantized(name) for name, _ in parts]
        if not any(is_quantized):
            weight = joined_rows([self._stored(f"{name}.weight", n, k) for name, n in parts])
            biases = joined_rows([self._stored(f"{name}.bias", n) for name, n in parts]) if bias else None
            if rows is not None:
                weight, biases = weight[rows], None if biases is None else biases[rows]
            return self.dense(weight, biases, len(parts), role=role)
        if all(is_quantized):
            weights = [self._quantized(name, n, k) for name, n in parts]
            quantized = [weight for weight in weights if isinstance(weight, QWeight)]
            decoded = [weight for weight in weights if isinstance(weight, DecodedWeight)]
            if not decoded:
                return self.quantized(quantized if rows is None else [each.with_rows(rows) for each in quantized], role)
            if not quantized:
                return self._decoded_linear(decoded, role, rows)
        return self._separate(parts, k, bias, role)

    def _decoded_linear(self, weights: Sequence[DecodedWeight], role: Role, rows: Tensor | None) -> LinearLayer:
        """Return one layer of weights that were decoded to floats."""
        values = joined_rows([self._as_dense(weight.values, weight.reason) for weight in weights])
        stored = [weight.bias for weight in weights if weight.bias is not None]
        biases = joined_rows(stored) if len(stored) == len(weights) else None
        if rows is not None:
            values, biases = values[rows], None if biases is None else biases[rows]
        return self.dense(values, biases, len(weights), role=role)

    def _as_dense(self, values: Tensor, reason: str) -> Tensor:
        """Return ``values`` in the activation dtype, or in a smaller one of their own, and count their bytes."""
        dtype = self.ops.dtype if values.dtype.itemsize > self.ops.dtype.itemsize else values.dtype
        self._decoded[reason] = self._decoded.get(reason, 0) + values.numel() * dtype.itemsize
        return values.to(device=self.ops.device, dtype=dtype)

    @property
    def decoded_remarks(self) -> list[str]:
        """Return what was decoded to floats while the weights were read, why, and the memory that takes."""
        return [
            f"weights are decoded at load, to {size / 2**20:.{int(size < 10 * 2**20)}f} MiB of floats: {reason}"
            for reason, size in self._decoded.items()
        ]

    def embedding(
        self, name: str, vocab: int, width: int, *, tied: bool, bias: Tensor | None = None
    ) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """See Weights: bias [V]."""
        if self.checkpoint.locate_linear(name.removesuffix(".weight")) is None:
            return self.embedding_of(self._stored(name, vocab, width), tied, bias)
        return self.embedding_of(self.decoded_table(name.removesuffix(".weight"), vocab, width), tied, bias)

    def decoded_table(self, name: str, vocab: int, width: int) -> Tensor:
        """Return the table [V, D] of the quantized embedding ``name`` as floats. Raises ``tensor_mismatch``."""
        table = as_floats(self._quantized(name, vocab, width), self.ops.dtype)
        return self._as_dense(table, "embeddings are looked up in floats")

    def _is_quantized(self, name: str) -> bool:
        """Whether the layer ``name`` is quantized, in the checkpoint or while it is loaded."""
        stored = self.checkpoint.locate_linear(name) is not None
        return stored or (self.rounding is not None and self.rounding.takes(name))

    def _quantized(self, name: str, n: int, k: int) -> QWeight | DecodedWeight:
        source = self.checkpoint.locate_linear(name)
        if source is None:
            assert self.rounding is not None, name
            bias = self._bias(name, n) if self.has(f"{name}.bias") else None
            return self.rounding.rounded(name, self._stored(f"{name}.weight", n, k), bias)
        weight = self.checkpoint.read_linear(source)
        if (weight.n, weight.k) != (n, k):
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{source} holds {weight.n} x {weight.k} weights, config.json says {n} x {k}",
            )
        if isinstance(weight, QWeight) and weight.rounded is not None and self.ops.exact:
            # Kernels do not round products of codes and scales.
            values = as_floats(weight, weight.rounded if self.ops.dtype == torch.float32 else self.ops.dtype)
            reason = f"their tool rounds them to {str(weight.rounded).removeprefix('torch.')}, and --cpu-math is exact"
            weight = DecodedWeight(values, weight.bias, reason)
        if not self.remarks:
            remark = formats.remark(self.checkpoint.layout(source), weight, source)
            self.remarks += [remark] if remark else []
        return weight


#: Implementations that compute on quantized weights, which ``--dequantize always`` excludes.
QUANTIZED = frozenset({"cpu", "triton", "triton-w8a8"})


def weights_for(config: EngineConfig, collective: Collective | None = None) -> CheckpointWeights | DummyWeights:
    """Return the weights of ``config``: random ones, or the checkpoint's. Raises ``tensor_inventory``.

    collective  collective of the ranks that the model is sharded over, or None.
    """
    if config.load.load_format == "dummy":
        return DummyWeights(config, operations(config, False, collective))
    weights = open_weights(config, collective)
    weights.left_out = check_inventory(config.model, weights.checkpoint)
    return weights


def open_weights(config: EngineConfig, collective: Collective | None = None) -> CheckpointWeights:
    """Open the checkpoint of ``config`` as a source of weights, with the implementations that memory allows."""
    load = config.load
    checkpoint = Checkpoint.open(load.path, load.weights, load.ignore_patterns, config.model.raw)
    checkpoint.mapped, checkpoint.threads = load.mapped, load.read_threads
    if checkpoint.gguf is not None:
        checkpoint.gguf.dtype = config.device.dtype
    may_dequantize = _may_dequantize(config, checkpoint)
    rounding = RoundingAtLoad(checkpoint, config.spec) if load.rounds and config.spec is not None else None
    weights = CheckpointWeights(checkpoint, operations(config, may_dequantize, collective), rounding)
    if _is_decoded_on_gpu(config, checkpoint):
        sizes = f"{_expanded(config, checkpoint) / 2**30:.1f} GiB in {str(config.device.dtype).removeprefix('torch.')}"
        when = f"at load, to {sizes}" if may_dequantize else f"in every step, because {sizes} do not fit"
        weights.remarks.append(f"FP8 and FP4 weights are decoded {when}: no kernel of this device computes with them")
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
    share = _LARGE_SHARE if _is_decoded_on_gpu(config, checkpoint) else _SHARE
    return _expanded(config, checkpoint) < share * free_memory(config.device.device)


def _is_decoded_on_gpu(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Whether weights are small floats on a device without kernels for them."""
    spec, device = config.spec, config.device.device
    specs = [] if spec is None else [spec.layer, *(layer for _, layer in spec.layers if layer is not None)]
    floats = any(layer.float8 is not None or layer.table is not None for layer in specs)
    return device.type == "cuda" and (floats or packed_bytes(checkpoint.inventory) > 0)


def _expanded(config: EngineConfig, checkpoint: Checkpoint) -> float:
    """Return the bytes of all quantized weights in the dtype of activations."""
    if config.load.rounds and config.spec is not None:
        return sum(RoundingAtLoad(checkpoint, config.spec).weights().values()) * config.device.dtype.itemsize
    expanded = packed_bytes(checkpoint.inventory) * 2.0 * config.device.dtype.itemsize
    for prefix in checkpoint.quantized_linears() if config.spec is not None else ():
        # Codes are the largest tensors. If the config is wrong about their width, only this estimate is affected.
        info = max(checkpoint.linear_headers(prefix).values(), key=lambda info: info.nbytes)
        bits = 8 if info.dtype == "I8" else checkpoint.linear_spec(prefix).bits
        expanded += info.nbytes * 8 / bits * config.device.dtype.itemsize
    return expanded
