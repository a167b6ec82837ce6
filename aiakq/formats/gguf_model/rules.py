"""Rules: which tensors of the model a tensor of a GGUF file becomes, one small class for each way it may be stored.

A family's tables map the name of a tensor in the file, without its layer and suffix, to a rule, or to the name in the
checkpoint if it is stored as it is. Names in checkpoints are templates: ``{layer}`` and ``{expert}`` are filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aiakq.formats.gguf_model.sources import TensorPart, TensorSource, interleaved_heads, parted_heads, rows_of, whole

#: A name in the checkpoint, and where its tensor is.
Named = tuple[str, TensorSource]


@dataclass(frozen=True)
class Stored:
    """A tensor of the file.

    name    its whole name.
    suffix  weight or bias.
    config  the Hugging Face config of the model.
    shapes  of all tensors of the file.
    """

    name: str
    suffix: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[self.name]

    def beside(self, module: str) -> str:
        """Return the name of another tensor of the same layer, with the same suffix."""
        return f"{self.name.rsplit('.', 2)[0]}.{module}.{self.suffix}"

    def size(self, *names: str) -> int:
        """Return the first of the values of the config under ``names`` that is set."""
        return int(next(self.config[name] for name in names if self.config.get(name) is not None))

    @property
    def head_dim(self) -> int:
        heads = self.size("num_attention_heads", "n_head")
        return int(self.config.get("head_dim") or self.size("hidden_size", "n_embd") // heads)

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")


class TensorRule(Protocol):
    """How a tensor of the file becomes tensors of the model."""

    def sources(self, stored: Stored) -> Iterator[Named]:
        """Yield names in the checkpoint and their sources."""


def _check_rows(stored: Stored, rows: int) -> None:
    """Raise ValueError if the tensor has another number of rows."""
    if stored.shape[0] != rows:
        raise ValueError(f"{stored.shape[0]} rows, not {rows}")


@dataclass(frozen=True)
class Plain:
    """A tensor that is stored as it is."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        yield f"{self.name}.{stored.suffix}", whole(stored.name)


@dataclass(frozen=True)
class Bare:
    """A tensor whose name in the checkpoint has no suffix."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        yield self.name, whole(stored.name)


@dataclass(frozen=True)
class PlainBeside:
    """A tensor that is stored as it is, and called ``name`` in layers with another one, ``beside``; else ``alone``."""

    name: str
    beside: str
    alone: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        name = self.name if stored.beside(self.beside) in stored.shapes else self.alone
        yield f"{name}.{stored.suffix}", whole(stored.name)


@dataclass(frozen=True)
class Unread:
    """A tensor that another rule reads, or that the config already holds."""

    def sources(self, stored: Stored) -> Iterator[Named]:
        yield from ()


@dataclass(frozen=True)
class RotatedQueries:
    """The query projection of families with interleaved rotary embedding, whose rows are permuted in each head."""

    name: str

    def heads(self, stored: Stored) -> int:
        """Return the number of heads."""
        return stored.size("num_attention_heads")

    def sources(self, stored: Stored) -> Iterator[Named]:
        heads = self.heads(stored)
        _check_rows(stored, stored.shape[0] // heads * heads)
        yield (
            f"{self.name}.{stored.suffix}",
            rows_of(stored.name, interleaved_heads(heads, stored.shape[0] // heads)),
        )


class RotatedKeys(RotatedQueries):
    """The key projection of these families."""

    def heads(self, stored: Stored) -> int:
        return stored.kv_heads


@dataclass(frozen=True)
class SplitQKV:
    """One tensor of queries, keys and values that are separate in the checkpoint; interleaved as RotatedQueries."""

    query: str
    key: str
    value: str
    interleaved: bool = False

    def sources(self, stored: Stored) -> Iterator[Named]:
        heads, kv_heads, width = stored.size("num_attention_heads"), stored.kv_heads, stored.head_dim
        _check_rows(stored, (heads + 2 * kv_heads) * width)
        start = 0
        for name, count in ((self.query, heads), (self.key, kv_heads), (self.value, kv_heads)):
            rows: Tensor | slice = slice(start, start + count * width)
            if self.interleaved and name != self.value:
                rows = interleaved_heads(count, width) + start
            yield f"{name}.{stored.suffix}", rows_of(stored.name, rows)
            start += count * width


@dataclass(frozen=True)
class GroupedQKV:
    """One tensor of queries, keys and values, which the checkpoint orders by groups of heads that share a key."""

    name: str
    by_head: bool = False

    def sources(self, stored: Stored) -> Iterator[Named]:
        heads, width = stored.size("num_attention_heads", "n_head"), stored.head_dim
        groups = heads if self.by_head else stored.kv_heads
        rows = parted_heads((heads // groups * width, width, width), groups)
        _check_rows(stored, len(rows))
        yield f"{self.name}.{stored.suffix}", rows_of(stored.name, rows)


@dataclass(frozen=True)
class Halves:
    """A tensor whose first and last rows are separate in the checkpoint, like gate and up."""

    first: str
    last: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        half = stored.shape[0] // 2
        _check_rows(stored, 2 * half)
        yield f"{self.first}.{stored.suffix}", rows_of(stored.name, slice(0, half))
        yield f"{self.last}.{stored.suffix}", rows_of(stored.name, slice(half, 2 * half))


@dataclass(frozen=True)
class Shifted:
    """The weight of a norm to which the converter added 1."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        yield f"{self.name}.{stored.suffix}", TensorSource((TensorPart(stored.name),), less_one)


def less_one(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor minus 1, in float32."""
    return parts[0].float() - 1.0


@dataclass(frozen=True)
class Transposed:
    """A matrix [N, K] that the checkpoint stores as [K, N]."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        transposed = len(stored.shape) > 1
        yield f"{self.name}.{stored.suffix}", TensorSource((TensorPart(stored.name),), transposed=transposed)


@dataclass(frozen=True)
class Reshaped:
    """A tensor with another shape in the checkpoint: ``shape(stored)``."""

    name: str
    to: Callable[[Stored], tuple[int, ...]]

    def sources(self, stored: Stored) -> Iterator[Named]:
        shape = self.to(stored)
        yield (
            f"{self.name}.{stored.suffix}",
            TensorSource((TensorPart(stored.name),), lambda parts: parts[0].reshape(shape)),
        )


@dataclass(frozen=True)
class StackedExperts:
    """Stacked experts [E, N, K], each of which has a tensor of its own in the checkpoint."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        for expert in range(stored.shape[0]):
            name = self.name.replace("{expert}", str(expert))
            yield f"{name}.{stored.suffix}", TensorSource((TensorPart(stored.name, expert),))


@dataclass(frozen=True)
class ExpertHalves:
    """Stacked experts with gate and up in one tensor [E, 2F, K], each of which has tensors of its own."""

    first: str
    last: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        half = stored.shape[1] // 2
        for expert in range(stored.shape[0]):
            for name, rows in ((self.first, slice(0, half)), (self.last, slice(half, 2 * half))):
                full = name.replace("{expert}", str(expert))
                yield f"{full}.{stored.suffix}", rows_of(stored.name, rows, expert)


@dataclass(frozen=True)
class Combined:
    """A tensor of the checkpoint that is computed from one or two of the file, like gate and up of all experts.

    other       the second of them, in the file; empty if there is none.
    combine     computes it from both.
    bias        whether biases are combined in the same way, and called ``NAME_bias``; else the name has the suffix.
    experts     see TensorSource.
    """

    name: str
    other: str
    combine: Callable[[Any], Tensor]
    bias: bool = False
    experts: bool = False

    def sources(self, stored: Stored) -> Iterator[Named]:
        name = f"{self.name}.{stored.suffix}"
        if self.bias:
            name = f"{self.name}_bias" if stored.suffix == "bias" else self.name
        parts = (stored.name, stored.beside(self.other)) if self.other else (stored.name,)
        experts = self.experts and stored.suffix == "weight"
        yield name, TensorSource(tuple(map(TensorPart, parts)), self.combine, experts=experts)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return gate and up [E, F, K] as [E, 2F, K]."""
    return torch.cat(list(parts), dim=1)
