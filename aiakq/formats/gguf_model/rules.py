"""Rules: which tensors of the model a tensor of a GGUF file becomes, one small class for each way it may be stored.

A family's tables map the name of a tensor in the file, without its layer and suffix, to a rule, or to the name in the
checkpoint if it is stored as it is. Names in checkpoints are templates: ``{layer}`` and ``{expert}`` are filled in.
Both directions are read from these tables: a rule also says which tensors a file has for those of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from aiakq.formats.gguf_model.sources import TensorPart, TensorSource, interleaved_heads, parted_heads, rows_of, whole

Shape = tuple[int, ...]
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


@dataclass(frozen=True)
class Original:
    """The part of a checkpoint that becomes one tensor of a file: a layer's, or what is outside of layers.

    prefix  what names of the layer begin with.
    module  name of the tensor in the file, without its layer and suffix.
    suffix  weight or bias.
    config  the Hugging Face config of the model.
    shapes  of all tensors of the checkpoint.
    """

    prefix: str
    module: str
    suffix: str
    config: Mapping[str, Any]
    shapes: Mapping[str, Shape]

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor of the layer, or None if the checkpoint lacks it."""
        return self.shapes.get(f"{self.prefix}{name}.{self.suffix}")

    def as_it_is(self, name: str) -> dict[str, Shape]:
        """Return the file's tensor if the checkpoint's, ``name``, has the same shape there."""
        shape = self.shape(name)
        return {} if shape is None else {self.module: shape}


class TensorRule(Protocol):
    """How a tensor of the file becomes tensors of the model."""

    def sources(self, stored: Stored) -> Iterator[Named]:
        """Yield names in the checkpoint and their sources."""

    def stored(self, original: Original) -> Mapping[str, Shape]:
        """Return the tensors that a new file has for those of a checkpoint: module -> shape. Empty if the checkpoint
        has none of these, or if new files have them under the names of another rule.
        """


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

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return original.as_it_is(self.name)


@dataclass(frozen=True)
class Bare:
    """A tensor whose name in the checkpoint has no suffix; in the file it has ``suffix``."""

    name: str
    suffix: str = "weight"

    def sources(self, stored: Stored) -> Iterator[Named]:
        yield self.name, whole(stored.name)

    def stored(self, original: Original) -> Mapping[str, Shape]:
        shape = original.shapes.get(original.prefix + self.name)
        return {} if shape is None or original.suffix != self.suffix else {original.module: shape}


@dataclass(frozen=True)
class PlainBeside:
    """A tensor that is stored as it is, and called ``name`` in layers with another one, ``beside``; else ``alone``."""

    name: str
    beside: str
    alone: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        name = self.name if stored.beside(self.beside) in stored.shapes else self.alone
        yield f"{name}.{stored.suffix}", whole(stored.name)

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return original.as_it_is(self.name) or original.as_it_is(self.alone)


@dataclass(frozen=True)
class Unread:
    """A tensor that another rule reads, or that the config already holds."""

    def sources(self, stored: Stored) -> Iterator[Named]:
        yield from ()

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return {}


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

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return original.as_it_is(self.name)


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

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return {}


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

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return original.as_it_is(self.name)


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

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return {}


@dataclass(frozen=True)
class Shifted:
    """The weight of a norm to which the converter added 1."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        yield f"{self.name}.{stored.suffix}", TensorSource((TensorPart(stored.name),), less_one, split=plus_one)

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return original.as_it_is(self.name)


def less_one(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor minus 1, in float32."""
    return parts[0].float() - 1.0


def plus_one(value: Tensor) -> Sequence[Tensor]:
    """Return the tensor plus 1, in float32."""
    return [value.float() + 1.0]


@dataclass(frozen=True)
class Transposed:
    """A matrix [N, K] that the checkpoint stores as [K, N]."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        transposed = len(stored.shape) > 1
        yield f"{self.name}.{stored.suffix}", TensorSource((TensorPart(stored.name),), transposed=transposed)

    def stored(self, original: Original) -> Mapping[str, Shape]:
        shape = original.shape(self.name)
        return {} if shape is None else {original.module: shape[::-1]}


@dataclass(frozen=True)
class Reshaped:
    """A tensor with another shape in the checkpoint: ``to(stored)``; in the file, ``back`` of that."""

    name: str
    to: Callable[[Stored], Shape]
    back: Callable[[Shape], Shape]

    def sources(self, stored: Stored) -> Iterator[Named]:
        shape = self.to(stored)
        yield (
            f"{self.name}.{stored.suffix}",
            TensorSource(
                (TensorPart(stored.name),),
                lambda parts: parts[0].reshape(shape),
                split=lambda value: [value.reshape(self.back(tuple(value.shape)))],
            ),
        )

    def stored(self, original: Original) -> Mapping[str, Shape]:
        shape = original.shape(self.name)
        return {} if shape is None else {original.module: self.back(shape)}


@dataclass(frozen=True)
class StackedExperts:
    """Stacked experts [E, N, K], each of which has a tensor of its own in the checkpoint."""

    name: str

    def sources(self, stored: Stored) -> Iterator[Named]:
        for expert in range(stored.shape[0]):
            name = self.name.replace("{expert}", str(expert))
            yield f"{name}.{stored.suffix}", TensorSource((TensorPart(stored.name, expert),))

    def stored(self, original: Original) -> Mapping[str, Shape]:
        shapes: list[Shape] = []
        while (shape := original.shape(self.name.replace("{expert}", str(len(shapes))))) is not None:
            shapes.append(shape)
        return {original.module: (len(shapes), *shapes[0])} if shapes and len(set(shapes)) == 1 else {}


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

    def stored(self, original: Original) -> Mapping[str, Shape]:
        return {}


@dataclass(frozen=True)
class Combined:
    """A tensor of the checkpoint that is computed from one or two of the file, like gate and up of all experts.

    other       the second of them, in the file; empty if there is none.
    combine     computes it from both.
    split       its inverse: both of them, from the value and the config.
    bias        whether biases are combined in the same way, and called ``NAME_bias``; else the name has the suffix.
    experts     see TensorSource.
    """

    name: str
    other: str
    combine: Callable[[Any], Tensor]
    split: Callable[..., Sequence[Tensor]]
    bias: bool = False
    experts: bool = False

    def sources(self, stored: Stored) -> Iterator[Named]:
        parts = (stored.name, stored.beside(self.other)) if self.other else (stored.name,)
        split = partial(self.split, config=stored.config)
        experts = self.experts and stored.suffix == "weight"
        source = TensorSource(tuple(map(TensorPart, parts)), self.combine, split, experts=experts)
        yield self._full(stored.suffix), source

    def stored(self, original: Original) -> Mapping[str, Shape]:
        shape = original.shapes.get(original.prefix + self._full(original.suffix))
        if shape is None:
            return {}
        parts = self.split(torch.empty(shape, device="meta"), config=original.config)
        return dict(zip((original.module, self.other), (tuple(part.shape) for part in parts), strict=False))

    def _full(self, suffix: str) -> str:
        if self.bias:
            return f"{self.name}_bias" if suffix == "bias" else self.name
        return f"{self.name}.{suffix}"


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return gate and up [E, F, K] as [E, 2F, K]."""
    return torch.cat(list(parts), dim=1)


def halves(value: Tensor, config: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return gate and up [E, F, K] of [E, 2F, K], the inverse of ``side_by_side``."""
    return value.chunk(2, dim=1)
