"""TensorSource: where a tensor of a Hugging Face checkpoint is in a GGUF file, and how it is stored there.

llama.cpp's converter changes some tensors: it permutes the rows of queries and keys in families with interleaved
rotary embedding, adds 1 to Gemma's norms, stacks experts, transposes the matrices of GPT-2. A source undoes that. As
long as it only picks and orders rows, it applies to quantized blocks, too, which lie along rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorPart:
    """Rows of one tensor of a GGUF file, which has the shape [N, K] or [N], or [E, ...] for E stacked experts.

    tensor  its name.
    expert  index in its first dimension; None to leave that as it is.
    rows    the rows to take, in this order: int64 [N'], or a slice; None for all.
    """

    tensor: str
    expert: int | None = None
    rows: Tensor | slice | None = None

    def of(self, value: Tensor) -> Tensor:
        """Return the part of ``value``, the whole tensor."""
        if self.expert is not None:
            value = value[self.expert]
        if self.rows is None:
            return value
        return value[self.rows] if isinstance(self.rows, slice) else value[self.rows.to(value.device)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors with the same K [N', K] as one [N, K]: the default of ``TensorSource.combine``."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True, eq=False)
class TensorSource:
    """A tensor of the model, from parts of tensors in the file.

    combine     computes it from the parts; ``joined`` concatenates their rows.
    split       the inverse of ``combine``: the parts, from the tensor; None for ``joined``.
    transposed  whether the checkpoint stores the result [N, K] as [K, N].
    experts     whether the parts are stacks [E, N_i, K] of experts whose linears [sum of N_i, K] have their rows, for
                families that take stacks apart; the result is what the checkpoint has in their place.
    """

    parts: tuple[TensorPart, ...]
    combine: Callable[[Sequence[Tensor]], Tensor] = joined
    split: Callable[[Tensor], Sequence[Tensor]] | None = None
    transposed: bool = False
    experts: bool = False

    @property
    def is_rows(self) -> bool:
        """Whether the linear layer [N, K] consists of rows of stored tensors, which quantized blocks survive."""
        return self.combine is joined

    def read(self, fetch: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor; ``fetch`` returns a whole tensor of the file as floats, [N, K] as torch orders them."""
        value = self.combine([part.of(fetch(part.tensor)) for part in self.parts])
        return value.T.contiguous() if self.transposed else value

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the tensor, from those of the tensors of the file. Reads nothing.

        Raises KeyError for a tensor that the file lacks, IndexError, RuntimeError or ValueError for other shapes.
        """
        return tuple(self.read(lambda name: torch.empty(shapes[name], device="meta")).shape)


def whole(tensor: str) -> TensorSource:
    """Return the source of a tensor that is stored as it is."""
    return TensorSource((TensorPart(tensor),))


def rows_of(tensor: str, rows: Tensor | slice, expert: int | None = None) -> TensorSource:
    """Return the source of a tensor that consists of some rows of a stored one."""
    return TensorSource((TensorPart(tensor, expert, rows),))


def computed(tensor: str, function: Callable[[Tensor], Tensor]) -> TensorSource:
    """Return the source of a tensor that ``function`` computes from a stored one."""
    return TensorSource((TensorPart(tensor),), lambda parts: function(parts[0]))


def interleaved_heads(heads: int, width: int) -> Tensor:
    """Return the order of rows [heads * width] that undoes the permutation of queries and keys for interleaved rotary
    embedding: the file has elements 0, D/2, 1, D/2 + 1, ... of each head.
    """
    rows = torch.arange(heads * width).view(heads, width // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


def parted_heads(counts: Sequence[int], groups: int) -> Tensor:
    """Return the order of rows that interleaves parts by group: the file has all queries, all keys, all values, and the
    model those of group 0, of group 1, and so on.

    counts  rows of each part per group, like (D, D, D) for BLOOM.
    """
    starts = [sum(counts[:index]) * groups for index in range(len(counts))]
    order = [
        torch.arange(start + group * count, start + (group + 1) * count)
        for group in range(groups)
        for start, count in zip(starts, counts, strict=True)
    ]
    return torch.cat(order)
