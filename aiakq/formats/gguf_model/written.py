"""The tensors of a new GGUF file, from those of a checkpoint: the tables of families, read in the other direction.

A rule says which tensors a file has for those of a checkpoint, and where each of the latter lies in them. Writing is
the inverse of the sources by which the file is read: rows are put where they would be taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model.expert_parts import ExpertPart, expert_parts
from aiakq.formats.gguf_model.family import GGUFFamily, Shapes
from aiakq.formats.gguf_model.rules import Original, Plain, Stored
from aiakq.formats.gguf_model.sources import TensorSource
from aiakq.formats.gguf_model.tensors import ModelTensors

__all__ = ["ExpertPart", "FilePart", "FileTensor", "GGUFFamily", "GGUFFile", "expert_parts", "file_of", "file_tensors"]
_SUFFIXES = ("weight", "bias")


def file_of(tensors: object) -> GGUFFile | None:
    """Return the file of a checkpoint's foreign tensors if it is a GGUF file, else None."""
    return tensors.file if isinstance(tensors, ModelTensors) else None


@dataclass(frozen=True)
class FilePart:
    """Part ``index`` of ``source``, from the tensor ``name`` of the checkpoint."""

    name: str
    source: TensorSource
    index: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a new file.

    shape  as torch orders dimensions: [N, K], or [E, N, K] for stacked experts.
    parts  what it consists of; together they fill it.
    """

    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]

    @property
    def is_rows(self) -> bool:
        """Whether its rows are rows of tensors [N, K] of the checkpoint, so that quantized blocks can be moved."""
        return all(part.source.is_rows and not part.source.transposed for part in self.parts)

    def filled(self, fetch: Callable[[str], Tensor]) -> Tensor:
        """Return its values, or its rows of blocks; ``fetch`` returns a tensor of the checkpoint, [N, K] or the blocks
        [N, bytes of a row].
        """
        result: Tensor | None = None
        for part in self.parts:
            value = fetch(part.name)
            value = value.T if part.source.transposed else value
            piece = _split(part.source, value)[part.index]
            target = part.source.parts[part.index]
            if target.expert is None and target.rows is None:
                return piece.contiguous()
            if result is None:
                width = self.shape[-1:] if len(self.shape) == 1 else piece.shape[-1:]
                result = torch.empty((*self.shape[:-1], *width), dtype=piece.dtype)
            place = result if target.expert is None else result[target.expert]
            if target.rows is None:
                place.copy_(piece)
            else:
                place[target.rows] = piece
        assert result is not None, "a tensor of a file has parts"
        return result


def _split(source: TensorSource, value: Tensor) -> list[Tensor]:
    if source.split is not None:
        return list(source.split(value))
    assert len(source.parts) == 1, "rules that join rows of several tensors of a file are not written"
    return [value]


def file_tensors(family: GGUFFamily, config: Mapping[str, Any], shapes: Shapes) -> dict[str, FileTensor]:
    """Return the tensors of a file for a checkpoint, in the order of its layers; name -> tensor.

    config  the Hugging Face config of the model, with the sizes of heads.
    shapes  tensor of the checkpoint -> shape; those that no rule of the family knows are left out.
    """
    layers = next(config[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if name in config)
    found: dict[str, FileTensor] = {}
    claimed: set[str] = set()
    for layer in (None, *range(layers)):
        prefix = "" if layer is None else family.layers.replace("{layer}", str(layer))
        start = "" if layer is None else f"blk.{layer}."
        for module, rule in (family.outer if layer is None else family.block).items():
            if "{expert}" in module:  # each expert in a tensor of its own: files of 2023
                continue
            rule = Plain(rule) if isinstance(rule, str) else rule
            for suffix in _SUFFIXES:
                made = rule.stored(Original(prefix, module, suffix, config, shapes))
                if made:
                    named = {f"{start}{each}.{suffix}": shape for each, shape in made.items()}
                    known = {name: tensor.shape for name, tensor in found.items() if name.startswith(start)} | named
                    stored = Stored(f"{start}{module}.{suffix}", suffix, config, known)
                    sources = {prefix + target: source for target, source in rule.sources(stored)}
                    if claimed.isdisjoint(sources):
                        claimed |= sources.keys()
                        found |= _tensors(named, sources)
    return found


def _tensors(named: Mapping[str, tuple[int, ...]], sources: Mapping[str, TensorSource]) -> dict[str, FileTensor]:
    parts: dict[str, list[FilePart]] = {name: [] for name in named}
    for target, source in sources.items():
        for index, part in enumerate(source.parts):
            parts[part.tensor].append(FilePart(target, source, index))
    return {name: FileTensor(named[name], tuple(each)) for name, each in parts.items()}
