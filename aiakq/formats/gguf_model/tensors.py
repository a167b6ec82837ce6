"""ModelTensors: the tensors of a model in Hugging Face's names and shapes, read from a GGUF file.

Linears whose rows are rows of stored blocks stay packed: they have the kind as dtype, and are read as bytes. Everything
else is read as floats: embeddings, and what the converter stacked or transposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.expert_stack import ExpertStack
from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.decoding import PLAIN, check_kind, read_blocks, read_floats
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.file_rows import FileRows
from aiakq.formats.gguf.kinds import KINDS, NUMBERS, Kind
from aiakq.formats.gguf.linears import config_for
from aiakq.formats.gguf_model import tensor_names
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.formats.gguf_model.sources import TensorPart, TensorSource, joined
from aiakq.formats.model_folder import some_of
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.kernels.types import QWeight

#: Tensors that models use as tables or for routing, not as linears.
_FLOATS = re.compile(r"(token_embd|position_embd|token_types|blk\.[0-9]+\.ffn_gate_inp(_shexp)?)\.weight")


@dataclass(frozen=True)
class BlockInfo(TensorInfo):
    """The header of a packed linear [N, K], whose dtype is a kind of blocks."""

    @property
    def nbytes(self) -> int:
        return self.shape[0] * KINDS[NUMBERS[self.dtype]].row_bytes(self.shape[1])


@dataclass(frozen=True, kw_only=True)
class StackInfo(TensorInfo):
    """The header of a stack of experts as the checkpoint has it, which the file holds in ``stored`` bytes of blocks."""

    experts: ExpertStack
    stored: int

    @property
    def nbytes(self) -> int:
        return self.stored


@dataclass
class ModelTensors:
    """The tensors of one model.

    inventory  name -> header; packed linears have a BlockInfo.
    dtype      dtype of floats that are decoded from blocks.
    """

    file: GGUFFile
    sources: Mapping[str, TensorSource]
    inventory: dict[str, TensorInfo] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, file: GGUFFile, config: Mapping[str, Any]) -> ModelTensors:
        """Return the tensors of a file whose metadata say ``config``, from headers alone.

        Raises what ``tensor_names`` raises, and ``gguf_unsupported`` for kinds of blocks that are not read.
        """
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        found = cls(file, tensor_names(config, Metadata(file.metadata, file.path.name), shapes))
        for name, source in found.sources.items():
            for part in source.parts:
                check_kind(file.tensors[part.tensor].kind, part.tensor)
            shape = source.shape(shapes)
            first = file.tensors[source.parts[0].tensor]
            packed = found._packed_kind(name, source, shape)
            if packed is not None:
                found.inventory[name] = BlockInfo(packed.name, shape, first.file, first.offset)
            elif source.experts and (kind := found._stack_kind(source)) is not None:
                stored = sum(file.tensors[part.tensor].nbytes for part in source.parts)
                # Blocks run along the inputs, which the checkpoint may have in front of the outputs.
                count, k = shape[0], first.shape[-1]
                experts = ExpertStack(count, math.prod(shape) // (count * k), k, LAYOUTS[kind.name].spec)
                found.inventory[name] = StackInfo(
                    dtype="F32", shape=shape, file=first.file, offset=first.offset, experts=experts, stored=stored
                )
            else:
                found.inventory[name] = TensorInfo(found._float_dtype(source), shape, first.file, first.offset)
        return found

    @property
    def source(self) -> Path:
        """The GGUF file."""
        return self.file.path

    @property
    def folder(self) -> Path:
        """The folder of the file and its parts."""
        return self.file.path.parent

    def read_with(self, mapped: bool, threads: int, dtype: torch.dtype) -> None:
        """Set the dtype of floats that are decoded from blocks. How the file is read does not vary."""
        self.dtype = dtype

    def changed_files(self) -> list[str]:
        """Return the parts of the file that have changed since they were opened."""
        return self.file.changed_files()

    def close(self) -> None:
        """Close the file; tensors that were read remain valid."""
        self.file.close()

    def _kinds(self, source: TensorSource) -> set[Kind]:
        return {self.file.tensors[part.tensor].kind for part in source.parts}

    def _packed_kind(self, name: str, source: TensorSource, shape: tuple[int, ...]) -> Kind | None:
        """Return the kind of blocks of a linear that stays packed, or None."""
        kinds = self._kinds(source)
        rows = source.is_rows and not source.transposed and len(shape) == 2 and name.endswith(".weight")
        if not rows or len(kinds) > 1 or any(_FLOATS.fullmatch(part.tensor) for part in source.parts):
            return None
        kind = next(iter(kinds))
        return kind if kind.name in LAYOUTS else None

    def _float_dtype(self, source: TensorSource) -> str:
        kinds = {kind.name for kind in self._kinds(source)}
        return kinds.pop() if len(kinds) == 1 and kinds <= PLAIN.keys() and source.is_rows else "F32"

    def quantization_config(self) -> dict[str, object] | None:
        """Return the ``quantization_config`` of the model, see gguf/linears.py; None without packed linears."""
        packed = {name.removesuffix(".weight"): info.dtype for name, info in self._packed()}
        matrices = [name for name, info in self.inventory.items() if len(info.shape) == 2 and name.endswith(".weight")]
        plain = [name.removesuffix(".weight") for name in matrices]
        return config_for(packed, [name for name in plain if name not in packed])

    def _packed(self) -> Iterator[tuple[str, TensorInfo]]:
        return ((name, info) for name, info in self.inventory.items() if isinstance(info, BlockInfo))

    def table(self, name: str) -> QWeight | None:
        """Return a matrix [V, D] that is read as floats as its blocks, if it consists of rows of one kind; else None.

        Raises KeyError for an unknown name, ``not_finite``.
        """
        if self._table_kind(name) is None:
            return None
        return self._blocks(name, self.sources[name])

    def blocks(self, name: str) -> QWeight | None:
        """Return the packed linear ``name`` [N, K], whose rows are not read yet; None for another tensor."""
        if not isinstance(self.inventory.get(name), BlockInfo):
            return None
        return self._blocks(name, self.sources[name])

    def _blocks(self, name: str, source: TensorSource) -> QWeight:
        """Return a source of rows of blocks of one kind."""
        first = self.file.tensors[source.parts[0].tensor]
        starts = []
        for part in source.parts:
            shape, every = self.file.tensors[part.tensor].shape, FileRows.of(self.file, part.tensor).starts
            starts.append(part.of(every.view(*shape[:-1], 1)))
        return read_blocks(FileRows(self.file, joined(starts).squeeze(1), first.row_bytes), first.kind, name)

    def experts(self, name: str) -> Iterator[QWeight] | None:
        """Yield the linears of the experts that are stacked in the tensor ``name``, one after the other; None if they
        are not stored as blocks of one kind.

        Outputs are in the order of the file's tensors: all of the gate, then all of the up projection. Raises KeyError
        for an unknown name, ``not_finite``.
        """
        source = self.sources[name]
        if not source.experts or self._stack_kind(source) is None:
            return None
        return (self._expert(source, number, name) for number in range(self.inventory[name].shape[0]))

    def _expert(self, source: TensorSource, number: int, name: str) -> QWeight:
        parts = tuple(replace(part, expert=number) for part in source.parts)
        return self._blocks(name, replace(source, parts=parts))

    def _stack_kind(self, source: TensorSource) -> Kind | None:
        """Return the kind of blocks of a stack of experts, or None."""
        kinds = self._kinds(source)
        return kind if len(kinds) == 1 and (kind := next(iter(kinds))).name in LAYOUTS else None

    @property
    def stacked_experts(self) -> list[ExpertStack]:
        """What ``experts`` yields, by tensor."""
        return [info.experts for info in self.inventory.values() if isinstance(info, StackInfo)]

    def _table_kind(self, name: str) -> Kind | None:
        """Return the kind of blocks of an embedding, or None."""
        source, kinds = self.sources[name], self._kinds(self.sources[name])
        rows = source.is_rows and not source.transposed and len(self.inventory[name].shape) == 2 and len(kinds) == 1
        tables = all(part.tensor == "token_embd.weight" for part in source.parts)
        return kind if rows and tables and (kind := next(iter(kinds))).name in LAYOUTS else None

    def remark(self) -> str:
        """Return what to tell the user about tensors that are stored as blocks and read as floats; empty for none.

        Embeddings that ``table`` returns are not among them: whether they are decoded depends on the device.
        """
        decoded = [
            name
            for name, source in self.sources.items()
            if not isinstance(self.inventory[name], BlockInfo | StackInfo)
            and self._table_kind(name) is None
            and any(kind.name in LAYOUTS for kind in self._kinds(source))
        ]
        if not decoded:
            return ""
        count = sum(math.prod(self.inventory[name].shape) for name in decoded)
        stored = sum(
            self.file.tensors[name].nbytes
            for name in {part.tensor for name in decoded for part in self.sources[name].parts}
        )
        return (
            f"weights stored as blocks, {stored / 2**20:.0f} MiB, are decoded at load to {count * 2 / 2**20:.0f} MiB "
            f"in 16 bits, or twice that in float32: {some_of(decoded)}"
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor: the blocks of a packed linear as [N, bytes of a row] uint8, others as floats.

        Raises KeyError for an unknown name, ``model_malformed``, ``not_finite``.
        """
        source = self.sources[name]
        if isinstance(self.inventory[name], BlockInfo):
            return source.combine([self._part(part, lambda rows, kind: rows) for part in source.parts])

        def floats(rows: Tensor, kind: Kind) -> Tensor:
            return read_floats(rows, kind, name, None if kind.name in PLAIN else self.dtype)

        try:
            value = source.combine([self._part(part, floats) for part in source.parts])
        except AiakqError:
            raise
        except (RuntimeError, IndexError, ValueError):
            reason = f"the parts of {name} do not fit together"
            raise error("model_malformed", file=self.file.path.name, reason=reason) from None
        return value.T.contiguous() if source.transposed else value.contiguous()

    def _part(self, part: TensorPart, decode: Callable[[Tensor, Kind], Tensor]) -> Tensor:
        """Read a part, of a stack only the expert that is asked for."""
        tensor = self.file.tensors[part.tensor]
        shape, first, end = tensor.shape, 0, tensor.rows
        if part.expert is not None:
            each = tensor.rows // shape[0]
            shape, first, end = shape[1:], part.expert * each, (part.expert + 1) * each
        values = decode(self.file.read(part.tensor, first, end), tensor.kind)
        return replace(part, expert=None).of(values.reshape(*shape[:-1], -1))
