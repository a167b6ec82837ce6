"""Formats: names, shapes and metadata of a quantized linear layer's tensors on disk. Each module implements one layout.

format.py says what a module provides; functions below provide defaults for what it may omit. A format is added by a
module and an entry here or, outside the tree, by an entry point in the group ``aiakq.formats``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiakq.formats.compatibility import Readers
from aiakq.formats.skipped_layers import hidden_layers
from aiakq.registry import Registry
from aiakq.spec import LayerSpec, QuantSpec

if TYPE_CHECKING:
    from torch import Tensor

    from aiakq.formats.decoded_weight import DecodedWeight as DecodedWeight
    from aiakq.formats.format import Dialect as Dialect
    from aiakq.formats.format import Format as Format
    from aiakq.formats.headers import Dimensions, Headers
    from aiakq.formats.safetensors_file import TensorInfo
    from aiakq.kernels.types import QWeight

#: name (``QuantSpec.format``) -> module. The two GPTQ versions differ in one constant and share a module.
FORMATS: Registry[Format] = Registry(
    "aiakq.formats",
    {
        "gptq": "aiakq.formats.gptq",
        "gptq_v2": "aiakq.formats.gptq",
        "awq": "aiakq.formats.awq",
        "awq_gemv": "aiakq.formats.awq_gemv",
        "awq_gemv_fast": "aiakq.formats.awq_gemv_fast",
        "compressed-tensors": "aiakq.formats.compressed_tensors",
        "fp8": "aiakq.formats.fp8",
        "gguf": "aiakq.formats.gguf.linears",
        "modelopt": "aiakq.formats.modelopt",
        "bitsandbytes": "aiakq.formats.bitsandbytes",
        "mlx": "aiakq.formats.mlx",
        "hqq": "aiakq.formats.hqq",
        "marlin": "aiakq.formats.marlin",
        "quanto": "aiakq.formats.quanto",
        "torchao": "aiakq.formats.torchao",
        "qqq": "aiakq.formats.qqq",
        "bitnet": "aiakq.formats.bitnet",
        "aqlm": "aiakq.formats.aqlm",
        "squeezellm": "aiakq.formats.squeezellm",
        "vptq": "aiakq.formats.vptq",
    },
)
#: Formats for symmetric weights only -> the version of the same format that also supports zero points.
WITH_ZERO_POINTS = {"gptq": "gptq_v2"}
#: The format that can hold every QuantSpec.
FALLBACK = "compressed-tensors"
#: Widths of the codes of formats that name none.
_BITS = (2, 3, 4, 8)


def load(name: str) -> Format:
    """Import the module of the format ``name``. Raises KeyError for a name that is not in FORMATS."""
    return FORMATS.load(name)


@functools.cache
def modules() -> list[Format]:
    """Return the modules of all formats, without duplicates, in the order of FORMATS."""
    return list({id(module): module for module in map(load, FORMATS)}.values())


@functools.cache
def all_suffixes() -> tuple[str, ...]:
    """Return the tensor suffixes of all formats, without duplicates."""
    return tuple(sorted({suffix for module in modules() for suffix in module.SUFFIXES}))


@functools.cache
def _dotted_suffixes() -> tuple[str, ...]:
    return tuple(sorted((suffix for suffix in all_suffixes() if "." in suffix), key=len, reverse=True))


def split_name(name: str) -> tuple[str, str]:
    """Return the module of a tensor and its suffix, which has dots where a format's suffix does."""
    for suffix in _dotted_suffixes():
        if name.endswith(f".{suffix}"):
            return name[: -len(suffix) - 1], suffix
    module, _, suffix = name.rpartition(".")
    return module, suffix


def has_signed_scales(name: str) -> bool:
    """Whether the readers of the format ``name`` accept negative scales."""
    return bool(getattr(load(name), "SIGNED_SCALES", True))


def dimensions(spec: QuantSpec, headers: Headers, read: Callable[[str], Tensor]) -> Dimensions:
    """Return the dimensions of a packed linear; ``read`` returns its tensor with a suffix.

    Raises KeyError, ValueError or ArithmeticError for headers of another layout, and ``tensor_mismatch``.
    """
    found: Dimensions = _optional(
        spec.format, "read_dimensions", lambda headers, spec, _: load(spec.format).dimensions(headers, spec)
    )(headers, spec, read)
    return found


def described(headers: Headers, spec: QuantSpec, name: str) -> QuantSpec:
    """Return how the linear ``name`` is stored: as files say, or as ``spec`` does. Raises ``format_unsupported``."""
    found: QuantSpec = _optional(spec.format, "described", lambda headers, spec, _: spec)(headers, spec, name)
    return found


def unplaced(headers: Headers, spec: QuantSpec, n: int, k: int) -> list[str]:
    """Return the suffixes of tensors of a linear of N x K, described by ``spec``, that it should not have."""
    from aiakq.formats.headers import BIAS  # imported late, because it imports torch

    module = load(spec.format)
    placed = {BIAS, *module.packed_shapes(headers, spec, n, k), *getattr(module, "OPTIONAL", ())}
    return [suffix for suffix in headers if suffix not in placed]


def needs_config(spec: QuantSpec) -> bool:
    """Whether layers differ in more than widths, groups and zero points, and only the config tells which is which."""
    if hasattr(load(spec.format), "described"):
        return False
    return len({replace(layer, bits=0, group_size=0, symmetric=True) for layer in stored_layers(spec)}) > 1


def unreadable(format: str, config: Mapping[str, object], inventory: Mapping[str, TensorInfo]) -> str | None:
    """Return why a checkpoint in this format is not read, from its config.json and headers, or None."""
    found: str | None = _optional(format, "unreadable", lambda *_: None)(config, inventory)
    return found


def decoded(headers: Headers, spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear of N x K is decoded to floats at load, as far as headers tell, or None."""
    found: str | None = _optional(spec.format, "decoded", lambda *_: None)(headers, spec, n, k)
    return found


# --- selection --------------------------------------------------------------------------------------------------------


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear of any format, complete or damaged."""
    return any(module.holds_codes(headers) for module in modules())


def layout_of(headers: Headers, label: str) -> str:
    """Return the format of one packed linear: ``label`` (from the config) unless its tensors contradict it.

    Some tools label one layout as another, but shapes are reliable (docs/decisions/0009). If the labelled format does
    not match and exactly one other does, that one is used. If none or several do, the label is used.
    """
    if load(label).matches(headers):
        return label
    matching = [module for module in modules() if module.matches(headers)]
    if len(matching) != 1:
        return label
    return next(name for name in FORMATS if load(name) is matching[0])


def choose(spec: QuantSpec, experts: bool = False) -> str:
    """Return the format for ``spec`` if none is requested: its own, or FALLBACK if that is more widely supported.

    Every entry of ``spec.layers`` counts as an exception; ``experts`` tells whether the model has experts.
    """
    if supports(spec) is None and unportable(spec, experts) is None:
        return spec.format
    return FALLBACK


def records_method(format: str) -> bool:
    """Whether the config records the quantization method; if not, ``QuantSpec.method`` is a guess."""
    return bool(getattr(load(format), "RECORDS_METHOD", True))


def unportable(spec: QuantSpec, experts: bool) -> str | None:
    """Return why another format is the better default for ``spec``, or None."""
    found: str | None = _optional(spec.format, "unportable", lambda *_: None)(spec, experts)
    return found


def remark(format: str, weight: QWeight | DecodedWeight, name: str) -> str | None:
    """Return what looks wrong about ``weight``, which was read from the linear ``name``, or None."""
    found: str | None = getattr(load(format), "remark", lambda *_: None)(weight, name)
    return found


# --- writing ----------------------------------------------------------------------------------------------------------


def supports(spec: QuantSpec) -> str | None:
    """Return why the files of its format cannot hold ``spec``, or None."""
    read_only = "aiakq reads such files, and does not write them"
    found: str | None = _optional(spec.format, "supports", lambda _: read_only)(spec)
    if found is None and spec.rotated:
        found = "such files cannot say that inputs are rotated while a model runs"
    if found is None and not _optional(spec.format, "ORDERED_LAYERS", False):
        found = hidden_layers(spec)
    reasons = (_not_held(spec.format, layer) for layer in stored_layers(spec))
    return found or next((reason for reason in reasons if reason is not None), None)


def stored_layers(spec: QuantSpec) -> list[LayerSpec]:
    """Return how the layers of ``spec`` are stored: most of them, then those that differ."""
    return [spec.layer, *(layer for _, layer in spec.layers if layer is not None)]


def _not_held(format: str, layer: LayerSpec) -> str | None:
    """Return why a format has no such codes, or None."""
    if layer.blocks is not None:
        return None if format == "gguf" else "such files hold no blocks of GGUF files"
    if layer.table is not None:
        return None if layer.table in _optional(format, "TABLES", ()) else "such files hold no indices of tables"
    if layer.float8 is None and layer.bits not in _optional(format, "BITS", _BITS):
        return f"such files hold no codes of {layer.bits} bits"
    return None


def config_files(spec: QuantSpec) -> dict[str, object]:
    """Return the JSON files that readers of this format look for beside config.json, by name."""
    found: dict[str, object] = _optional(spec.format, "config_files", lambda _: {})(spec)
    return found


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear with N outputs and K inputs cannot be written as in ``spec``, or None."""
    found: str | None = _optional(spec.format, "shape_problem", lambda *_: None)(spec, n, k)
    return found


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed word and cannot be split."""
    found: tuple[int, int] = _optional(spec.format, "word_shape", lambda _: (1, 1))(spec)
    return found


def width_multiple(spec: QuantSpec) -> int:
    """Return the multiple to which the width of an MLP on each GPU is padded."""
    return int(_optional(spec.format, "WIDTH_MULTIPLE", 32))


def reader_notes(spec: QuantSpec, experts: bool) -> list[str]:
    """Return notes for users on other programs that read ``spec``; ``experts``: whether the model has fused experts."""
    found: list[str] = _optional(spec.format, "reader_notes", lambda *_: [])(spec, experts)
    return found


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """Describe how other programs read a model in this format whose quantized layers have ``schemes``."""
    described: Readers | None = _optional(format, "readers", lambda *_: None)(format, schemes, experts)
    return described or Readers()


def _optional(name: str, attribute: str, default: object) -> Any:
    return getattr(load(name), attribute, default)
