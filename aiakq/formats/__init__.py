"""Formats: names, shapes and metadata of the tensors of a quantized linear layer on disk. One module knows one layout.

A module of a format must offer

    SUFFIXES         suffixes of the tensors that one packed linear may own, e.g. ``qweight``
    QUANT_METHODS    values of ``quant_method`` in config.json that ``from_config`` reads
    holds_codes(headers) -> bool                       whether a module with these tensors is a packed linear at all
    matches(headers) -> bool                           whether shapes and dtypes are those of this layout
    packed_shapes(headers, spec, n, k) -> {suffix: shape}   the tensors that a linear of N x K must have
    dimensions(headers, spec) -> Dimensions            N, K, bits and groups of a packed linear
    supports(spec) -> None | reason                    why the files cannot hold ``spec``
    scale_dtype(spec, dtype) -> dtype                  in which scales are stored
    from_config(config) -> QuantSpec | None            None where the config says another layout
    to_config(spec) -> dict                            the ``quantization_config`` to write
    read(tensors, spec, name) -> QWeight               ``tensors`` maps suffix -> tensor; ``name`` is for messages
    write(weight, spec, dtype) -> tensors              the same map back; ``dtype`` is that of unquantized tensors

``headers`` maps suffix -> TensorInfo of one linear (aiakq/formats/safetensors_file.py). A bias is not packed: it is the
tensor ``bias`` [N] in every format, and ``packed_shapes`` leaves it out. ``read`` raises ``tensor_mismatch`` and
``not_finite``; what it returns satisfies every promise of ``QWeight``. A module may also offer

    CONFIG_FILE                                        where older tools put the config, beside config.json
    RECORDS_METHOD                                     False where the config does not say which method was used
    WIDTH_MULTIPLE                                     what padded widths per GPU are multiples of (32)
    config_files(spec) -> {name: JSON}                 files that readers look for beside config.json
    unportable(spec, experts) -> None | reason         why another format is the better default for ``spec``
    shape_problem(spec, n, k) -> None | reason         why a linear of N x K cannot be written
    word_shape(spec) -> (inputs, outputs)              that share words and cannot be cut apart
    reader_notes(spec, experts) -> [sentence]          what users should know about other programs that read ``spec``
    readers(format, schemes, experts) -> Readers       how other programs read the files, for the model card
    remark(weight, name) -> None | sentence            what looks wrong about a weight that was read
    writer(config) -> None | name                      the program that wrote a config

The functions below answer for modules that leave these out. A format is added by a module and a line here, or, outside
the tree, by an entry point in the group ``aiakq.formats``.
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
#: Formats that hold symmetric weights only -> the version of the same format that also holds zero points.
WITH_ZERO_POINTS = {"gptq": "gptq_v2"}
#: The format that can hold whatever a QuantSpec can say.
FALLBACK = "compressed-tensors"


def load(name: str) -> ModuleType:
    """The module of the format ``name``; KeyError for a name that is not in FORMATS."""
    module: ModuleType = FORMATS.load(name)
    return module


@functools.cache
def modules() -> list[ModuleType]:
    """The modules of all formats, each once, in the order of FORMATS."""
    return list({id(module): module for module in map(load, FORMATS)}.values())


@functools.cache
def all_suffixes() -> tuple[str, ...]:
    """The tensor suffixes of every format, each once."""
    return tuple(sorted({suffix for module in modules() for suffix in module.SUFFIXES}))


# --- which format -----------------------------------------------------------------------------------------------------


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear of any format, whole or damaged."""
    return any(module.holds_codes(headers) for module in modules())


def layout_of(headers: Headers, label: str) -> str:
    """The format of one packed linear: ``label`` (what the config says) unless its tensors contradict it.

    Some tools label one layout as another; shapes cannot be wrong (docs/decisions/0009). Where the labelled format does
    not match and exactly one other does, that one is right. If none or several do, only the label is left.
    """
    if load(label).matches(headers):
        return label
    matching = [module for module in modules() if module.matches(headers)]
    if len(matching) != 1:
        return label
    return next(name for name in FORMATS if load(name) is matching[0])


def choose(spec: QuantSpec, experts: bool = False) -> str:
    """The format for ``spec`` if none is asked for: its own, or FALLBACK where that cannot hold it or is read by fewer.

    Every entry of ``spec.layers`` counts as an exception, and ``experts`` says that the model has experts.
    """
    if load(spec.format).supports(spec) is None and unportable(spec, experts) is None:
        return spec.format
    return FALLBACK


def records_method(format: str) -> bool:
    """Whether the config says which method chose the numbers; where it does not, ``QuantSpec.method`` is a guess."""
    return bool(getattr(load(format), "RECORDS_METHOD", True))


def unportable(spec: QuantSpec, experts: bool) -> str | None:
    """Why another format is the better default for ``spec``; None if there is no reason."""
    reason: str | None = _optional(spec.format, "unportable", lambda *_: None)(spec, experts)
    return reason


def remark(format: str, weight: QWeight, name: str) -> str | None:
    """What looks wrong about ``weight``, which was read from the linear ``name``; None if nothing does."""
    found: str | None = getattr(load(format), "remark", lambda *_: None)(weight, name)
    return found


# --- writing ----------------------------------------------------------------------------------------------------------


def config_files(spec: QuantSpec) -> dict[str, Any]:
    """JSON files that readers of this format look for beside config.json, by name."""
    files: dict[str, Any] = _optional(spec.format, "config_files", lambda _: {})(spec)
    return files


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Why a linear of N outputs and K inputs cannot be written as ``spec`` says; None if it can."""
    reason: str | None = _optional(spec.format, "shape_problem", lambda *_: None)(spec, n, k)
    return reason


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """How many inputs and how many outputs share words of the file, and cannot be cut apart."""
    shape: tuple[int, int] = _optional(spec.format, "word_shape", lambda _: (1, 1))(spec)
    return shape


def width_multiple(spec: QuantSpec) -> int:
    """What the width of an MLP on each GPU is padded to a multiple of."""
    return int(_optional(spec.format, "WIDTH_MULTIPLE", 32))


def reader_notes(spec: QuantSpec, experts: bool) -> list[str]:
    """What a user should know about other programs that read ``spec``; ``experts`` if the model has fused experts."""
    notes: list[str] = _optional(spec.format, "reader_notes", lambda *_: [])(spec, experts)
    return notes


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """How other programs read a model in this format, whose quantized layers have ``schemes``; see ``Readers``."""
    found: Readers | None = _optional(format, "readers", lambda *_: None)(format, schemes, experts)
    return found or Readers()


def _optional(name: str, attribute: str, default: Any) -> Any:
    return getattr(load(name), attribute, default)
