"""CheckpointWeights: layers with the weights of a checkpoint, packed, decoded or rounded while they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from aiakq import formats
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.config_values import unsupported
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import Role
from aiakq.kernels.types import QWeight
from aiakq.runtime.device_memory import release_memory
from aiakq.runtime.loader.binding import LinearBuilder, Part, joined_rows
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
        #: Tensors read in their stored dtype.
        self.stored: set[str] = set()
        self._prepared = 0
        #: Why weights were decoded at load -> their bytes as floats.
        self._decoded: dict[str, int] = {}

    def has(self, name: str) -> bool:
        return self.checkpoint.locate(name) is not None

    def has_shape(self, name: str, *shape: int) -> bool:
        source = self.checkpoint.locate(name)
        return source is not None and tuple(self.checkpoint.inventory[source].shape) == shape

    def is_packed(self, name: str) -> bool:
        return self.checkpoint.locate_linear(name) is not None

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return [*shape] in ``dtype`` or the activation dtype, on the device. Raises ``tensor_mismatch``."""
        linear = name.removesuffix(".weight")
        if len(shape) == 2 and linear != name and self.is_packed(linear):
            table = self._decoded_weight(linear, *shape, "routers and tables are computed in floats")
            return table.to(dtype or self.ops.dtype)
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
        self.stored.add(source)
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
            if not bias:
                self._refuse_biases([name for name, _ in parts], weights)
            quantized = [weight for weight in weights if isinstance(weight, QWeight)]
            decoded = [weight for weight in weights if isinstance(weight, DecodedWeight)]
            if not decoded:
                return self.quantized(quantized if rows is None else [each.with_rows(rows) for each in quantized], role)
            if not quantized:
                return self._decoded_linear(decoded, role, rows)
        return self._separate(parts, k, bias, role)

    def _refuse_biases(self, names: Sequence[str], weights: Sequence[QWeight | DecodedWeight]) -> None:
        """Raise ``tensor_mismatch`` for a bias of a layer that has none; zeros are those that AutoGPTQ writes."""
        for name, weight in zip(names, weights, strict=True):
            if weight.bias is not None and bool(weight.bias.any()):
                reason = f"{name}.bias is not zero, and the model of config.json has no such bias"
                raise error("tensor_mismatch", path=self.checkpoint.named_path, reason=reason)

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
        if (found := self._packed_embedding(name, vocab, width, tied, bias)) is not None:
            return found
        if self.checkpoint.locate_linear(name.removesuffix(".weight")) is None:
            return self.embedding_of(self._stored(name, vocab, width), tied, bias)
        return self.embedding_of(self.decoded_table(name.removesuffix(".weight"), vocab, width), tied, bias)

    def packed_experts(self, name: str) -> Iterator[QWeight] | None:
        """See Weights."""
        source = self.checkpoint.locate(name)
        return None if source is None or self.checkpoint.foreign is None else self.checkpoint.foreign.experts(source)

    def _packed_embedding(
        self, name: str, vocab: int, width: int, tied: bool, bias: Tensor | None
    ) -> tuple[EmbeddingLayer, LinearLayer | None] | None:
        """Return what ``embedding`` returns if a GGUF file holds blocks [V, D] from which the device looks up rows."""
        source = self.checkpoint.locate(name)
        weight = None if source is None or self.checkpoint.foreign is None else self.checkpoint.foreign.table(source)
        if weight is None:
            return None
        if (weight.n, weight.k) == (vocab, width):
            self._release(vocab * width)
            found = self.ops.quantized_embedding(weight if bias is None else weight.with_bias(bias), tied)
            if found is not None:
                return found
            self._decoded["embeddings are looked up in floats"] = vocab * width * self.ops.dtype.itemsize
        return None

    def decoded_table(self, name: str, vocab: int, width: int) -> Tensor:
        """Return the table [V, D] of the quantized embedding ``name`` as floats. Raises ``tensor_mismatch``."""
        return self._decoded_weight(name, vocab, width, "embeddings are looked up in floats")

    def _decoded_weight(self, name: str, n: int, k: int, reason: str) -> Tensor:
        """Return the weight [N, K] of the quantized layer ``name`` as floats, which ``reason`` says why.

        Raises ``format_unsupported`` for one whose activations are rounded, too.
        """
        weight = self._quantized(name, n, k)
        if isinstance(weight, QWeight) and not weight.scheme.endswith("a16"):
            raise unsupported(f"{name} with rounded activations, in a layer that is computed in floats")
        return self._as_dense(as_floats(weight, self.ops.dtype), reason)

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
        self.checkpoint.shapes[source] = (n, k)
        weight = self.checkpoint.read_linear(source, packed=True)
        if (weight.n, weight.k) != (n, k):
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{source} holds {weight.n} x {weight.k} weights, config.json says {n} x {k}",
            )
        if isinstance(weight, QWeight) and weight.rounded is not None and self.ops.exact:
            # Kernels do not round products of codes and scales.
            exact = weight.factors is None and self.ops.dtype == torch.float32
            values = as_floats(weight, weight.rounded if exact else self.ops.dtype)
            reason = f"their tool rounds them to {str(weight.rounded).removeprefix('torch.')}, and --cpu-math is exact"
            weight = DecodedWeight(values, weight.bias, reason)
        if not self.remarks:
            remark = formats.remark(self.checkpoint.layout(source), weight, source)
            self.remarks += [remark] if remark else []
        return weight
