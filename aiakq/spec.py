"""QuantSpec: how a checkpoint is quantized, independent of its format; formats map it to ``quantization_config``.

Four words are kept apart everywhere (docs/structure.md): the *method* chose the numbers, the *scheme* is the
arithmetic, the *format* is the layout on disk, the *implementation* is the code that computes.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from aiakq.patterns import is_plain, matches

#: Spellings that users and other tools write, and the method they mean. ``gpt`` is in the reference page.
METHOD_ALIASES = {
    "gpt": "gptq",
    "w8a16": "weight_only_int8",
    "w8a8": "smooth_quant",
    "fp8_dynamic": "fp8",
    "nvfp4a16": "nvfp4",
    "mxfp4a16": "mxfp4",
}


def canonical_method(name: str) -> str:
    """The method a user's spelling means, known or not."""
    spelled = name.strip().lower().replace("-", "_")
    return METHOD_ALIASES.get(spelled, spelled)


@dataclass(frozen=True)
class Float8:
    """Weights whose codes are 8-bit floats, e4m3 or e5m2, and the scales of activations that are rounded to e4m3.

    rows              outputs that share a scale: those of a block, 1 for a scale per output, -1 for one in all.
    activation_group  inputs that share a computed scale; -1: all of a token.
    powers_of_two     whether computed scales are rounded up to powers of two (ue8m0).
    bound             magnitude above which activations are cut off instead of making the scale larger, and the smallest
                      computed scale (FBGEMM); None: there is neither.
    """

    rows: int = 1
    activation_group: int = -1
    powers_of_two: bool = False
    bound: float | None = None


@dataclass(frozen=True)
class LayerSpec:
    """How one linear layer is stored: the fields of a QuantSpec that may differ between layers."""

    bits: int
    group_size: int = -1
    symmetric: bool = True
    activation_bits: int | None = None
    static_input: bool = False
    float8: Float8 | None = None
    table: str | None = None
    blocks: str | None = None
    scale_type: str | None = None
    activation_type: str | None = None

    @property
    def is_float(self) -> bool:
        """Whether codes are floats of 8 bits, or indices of a table of values."""
        return self.float8 is not None or self.table is not None


@dataclass(frozen=True)
class QuantSpec:
    """How the linear layers of a checkpoint are quantized: the common values, and the layers that differ.

    method           a key of METHODS, or a name starting with "recipe:"; a guess where the checkpoint has none.
    format           a key of FORMATS (aiakq/formats).
    bits             bits per weight code.
    group_size       inputs per scale along K; -1 means one scale per output row.
    symmetric        whether the zero point is 2**(bits - 1) everywhere.
    activation_bits  8 or 4 if activations are quantized too (schemes w8a8, w4a8, fp8a8, lut4a8, lut4a4), else None.
    float8           how the scales of codes that are 8-bit floats are shared; None for other codes.
    table            name of the values (aiakq/kernels/tables.py) that 4-bit codes are indices of; None for other codes.
    blocks           ggml's name of the blocks that hold a row, like Q4_K; None in other formats than GGUF.
    scale_type       what the scales of a group, and those of activations, are rounded to: e8m0 (MXFP4, MXFP8) or e4m3
                     times a number for the whole layer (NVFP4); None: they are any floats.
    activation_type  what activations beside integers are rounded to: int8 or uint8 as compressed-tensors does, or e4m3;
                     None: what the scheme says, with w8a8 symmetric int8 as kernels compute it.
    static_input     activations use a stored scale instead of one computed per token, or a stored unit of their scales.
    desc_act         the file stores the group index of every input, in no order (GPTQ act-order).
    ignore           names or patterns (aiakq/patterns.py) of modules that are not quantized.
    layers           (module name or pattern, its LayerSpec); the first match counts. None means not quantized.
    rotated          names or patterns of linears whose weights multiply inputs rotated by a Hadamard matrix.
    notes            what the writer recorded about itself; other programs ignore it.
    """

    method: str
    format: str
    bits: int
    group_size: int = -1
    symmetric: bool = True
    activation_bits: int | None = None
    static_input: bool = False
    float8: Float8 | None = None
    table: str | None = None
    blocks: str | None = None
    scale_type: str | None = None
    activation_type: str | None = None
    desc_act: bool = False
    ignore: tuple[str, ...] = ("lm_head",)
    layers: tuple[tuple[str, LayerSpec | None], ...] = ()
    rotated: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def for_layer(self, name: str) -> QuantSpec | None:
        """The spec of the linear ``name`` alone, with empty ``layers``; None if it is not quantized."""
        if self._position(self._ignored, name) is not None:
            return None
        position = self._position(self._listed, name)
        if position is None:
            return replace(self, layers=())
        layer = self.layers[position][1]
        return None if layer is None else replace(self, layers=(), **vars(layer))

    def names(self, name: str) -> bool:
        """Whether ``ignore`` or ``layers`` says something about the linear ``name``."""
        return any(self._position(index, name) is not None for index in (self._ignored, self._listed))

    # Lists may name every linear of a large model, so plain names are looked up and only patterns are matched.
    @cached_property
    def _ignored(self) -> tuple[dict[str, int], list[tuple[int, str]]]:
        return _indexed(self.ignore)

    @cached_property
    def _listed(self) -> tuple[dict[str, int], list[tuple[int, str]]]:
        return _indexed([pattern for pattern, _ in self.layers])

    @staticmethod
    def _position(index: tuple[dict[str, int], list[tuple[int, str]]], name: str) -> int | None:
        names, patterns = index
        best = names.get(name)
        for position, pattern in patterns:
            if best is not None and position > best:
                break
            if matches(pattern, name):
                return position
        return best

    @property
    def mixed(self) -> bool:
        """Whether quantized layers differ from each other."""
        base = self.layer
        return any(layer is not None and layer != base for _, layer in self.layers)

    @property
    def layer(self) -> LayerSpec:
        """The values of every layer that ``layers`` does not name."""
        return LayerSpec(**{field.name: getattr(self, field.name) for field in fields(LayerSpec)})

    @property
    def scheme(self) -> str:
        """The arithmetic: ``w4a16``, ``w8a8``, ``fp8a16``, ``lut4a16`` and so on."""
        if self.float8 is not None:
            return "fp8a8" if self.activation_bits else "fp8a16"
        if self.table is not None:
            return f"lut{self.bits}a{self.activation_bits or 16}"
        return f"w{self.bits}a{self.activation_bits or 16}"

    def describe(self) -> str:
        """One phrase for tables, like ``w4a16 g128 asym``."""
        group = "channel" if self.group_size == -1 else f"g{self.group_size}"
        if self.float8 is not None and self.float8.rows != 1:
            group = "tensor" if self.float8.rows == -1 else f"blocks of {self.float8.rows}x{self.group_size}"
        zeros = " sym" if self.symmetric else " asym"
        if self.float8 is not None or self.table is not None:
            zeros = "".join(f" {name}" for name in (self.table, self.scale_type) if name)
        zeros += f", activations in {self.activation_type}" if self.activation_type else ""
        others = ", some layers differ" if self.mixed else ""
        rotated = ", some inputs rotated" if self.rotated else ""
        return f"{self.scheme} {group}{zeros}{others}{rotated}"

    def rotates(self, name: str) -> bool:
        """Whether the weight of the linear ``name`` multiplies rotated inputs."""
        return any(matches(pattern, name) for pattern in self.rotated)


def _indexed(patterns: Sequence[str]) -> tuple[dict[str, int], list[tuple[int, str]]]:
    """The first position of every plain name, and (position, pattern) of every pattern."""
    names: dict[str, int] = {}
    others: list[tuple[int, str]] = []
    for position, pattern in enumerate(patterns):
        if is_plain(pattern):
            names.setdefault(pattern, position)
        else:
            others.append((position, pattern))
    return names, others
