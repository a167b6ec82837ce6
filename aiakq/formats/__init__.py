"""Formats: names, shapes and metadata of a quantized linear layer's tensors on disk. Each module implements one layout.

A format module must provide

    SUFFIXES         suffixes of the tensors of one packed linear, e.g. ``qweight``
    QUANT_METHODS    values of ``quant_method`` in config.json that ``from_config`` reads
    holds_codes(headers) -> bool                       whether a module with these tensors is a packed linear at all
    matches(headers) -> bool                           whether shapes and dtypes match this layout
    packed_shapes(headers, spec, n, k) -> {suffix: shape}   expected tensors of a linear of N x K
    dimensions(headers, spec) -> Dimensions            N, K, bits and groups of a packed linear
    supports(spec) -> None | reason                    why the files cannot hold ``spec``
    scale_dtype(spec, dtype) -> dtype                  dtype of stored scales
    from_config(config) -> QuantSpec | None            None if the config describes another layout
    to_config(spec) -> dict                            the ``quantization_config`` to write
    read(tensors, spec, name) -> QWeight               ``tensors`` maps suffix -> tensor; ``name`` is for messages
    write(weight, spec, dtype) -> tensors              the inverse; ``dtype`` is that of unquantized tensors

``headers`` maps suffix -> TensorInfo of one linear (aiakq/formats/safetensors_file.py). A bias is not packed: it is the
tensor ``bias`` [N] in every format, and not part of ``packed_shapes``. ``read`` raises ``tensor_mismatch`` and
``not_finite``; its result satisfies all invariants of ``QWeight``. A module may also provide

    CONFIG_FILE                                        file in which older tools stored the config
    RECORDS_METHOD                                     False if the config does not record the quantization method
    WIDTH_MULTIPLE                                     multiple to which widths per GPU are padded (32)
    config_files(spec) -> {name: JSON}                 additional config files that readers look for
    unportable(spec, experts) -> None | reason         why another format is the better default for ``spec``
    shape_problem(spec, n, k) -> None | reason         why a linear of N x K cannot be written
    word_shape(spec) -> (inputs, outputs)              number that share a packed word and cannot be split
    reader_notes(spec, experts) -> [sentence]          notes for users on other programs that read ``spec``
    readers(format, schemes, experts) -> Readers       how other programs read the files, for the model card
    remark(weight, name) -> None | sentence            what looks wrong about a weight that was read
    writer(config) -> None | name                      the program that wrote a config

The functions below provide defaults for modules that omit these. A format is added by a module and an entry here or,
outside the tree, by an entry point in the group ``aiakq.formats``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aiakq.formats.compatibility import Readers
from aiakq.registry import Registry
from aiakq.spec import QuantSpec

if TYPE_CHECKING:
    from aiakq.formats.headers import Headers
    from aiakq.kernels.types import QWeight

#: name (``QuantSpec.format``) -> module. The two GPTQ versions differ in one constant and share a module.
FORMATS = Registry(
    "aiakq.formats",
    {
        "gptq": "aiakq.formats.gptq",
        "gptq_v2": "aiakq.formats.gptq",
        "awq": "aiakq.formats.awq",
        "awq_gemv": "aiakq.formats.awq_gemv",
        "awq_gemv_fast": "aiakq.formats.awq_gemv_fast",
        "compressed-tensors": "aiakq.formats.compressed_tensors",
    },
)
#: Formats for symmetric weights only -> the version of the same format that also supports zero points.
WITH_ZERO_POINTS = {"gptq": "gptq_v2"}
#: The format that can hold every QuantSpec.
FALLBACK = "compressed-tensors"


def load(name: str) -> ModuleType:
    """Import the module of the format ``name``. Raises KeyError for a name that is not in FORMATS."""
    module: ModuleType = FORMATS.load(name)
    return module


@functools.cache
def modules() -> list[ModuleType]:
    """Return the modules of all formats, without duplicates, in the order of FORMATS."""
    return list({id(module): module for module in map(load, FORMATS)}.values())


@functools.cache
def all_suffixes() -> tuple[str, ...]:
    """Return the tensor suffixes of all formats, without duplicates."""
    return tuple(sorted({suffix for module in modules() for suffix in module.SUFFIXES}))


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
    if load(spec.format).supports(spec) is None and unportable(spec, experts) is None:
        return spec.format
    return FALLBACK


def records_method(format: str) -> bool:
    """Whether the config records the quantization method; if not, ``QuantSpec.method`` is a guess."""
    return bool(getattr(load(format), "RECORDS_METHOD", True))


def unportable(spec: QuantSpec, experts: bool) -> str | None:
    """Return why another format is the better default for ``spec``, or None."""
    reason: str | None = _optional(spec.format, "unportable", lambda *_: None)(spec, experts)
    return reason


def remark(format: str, weight: QWeight, name: str) -> str | None:
    """Return what looks wrong about ``weight``, which was read from the linear ``name``, or None."""
    remark_text: str | None = getattr(load(format), "remark", lambda *_: None)(weight, name)
    return remark_text


# --- writing ----------------------------------------------------------------------------------------------------------


def config_files(spec: QuantSpec) -> dict[str, Any]:
    """Return the JSON files that readers of this format look for beside config.json, by name."""
    files: dict[str, Any] = _optional(spec.format, "config_files", lambda _: {})(spec)
    return files


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear with N outputs and K inputs cannot be written as in ``spec``, or None."""
    reason: str | None = _optional(spec.format, "shape_problem", lambda *_: None)(spec, n, k)
    return reason


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed word and cannot be split."""
    shape: tuple[int, int] = _optional(spec.format, "word_shape", lambda _: (1, 1))(spec)
    return shape


def width_multiple(spec: QuantSpec) -> int:
    """Return the multiple to which the width of an MLP on each GPU is padded."""
    return int(_optional(spec.format, "WIDTH_MULTIPLE", 32))


def reader_notes(spec: QuantSpec, experts: bool) -> list[str]:
    """Return notes for users on other programs that read ``spec``; ``experts``: whether the model has fused experts."""
    notes: list[str] = _optional(spec.format, "reader_notes", lambda *_: [])(spec, experts)
    return notes


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """Describe how other programs read a model in this format whose quantized layers have ``schemes``."""
    described: Readers | None = _optional(format, "readers", lambda *_: None)(format, schemes, experts)
    return described or Readers()


def _optional(name: str, attribute: str, default: object) -> Any:
    return getattr(load(name), attribute, default)
