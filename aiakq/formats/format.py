"""Format: what a module of ``aiakq.formats`` or of a plugin provides. A module implements one layout on disk.

``headers`` maps suffix -> TensorInfo of one linear (aiakq/formats/safetensors_file.py). A bias is not packed: it is the
tensor ``bias`` [N] in every format, and not part of ``packed_shapes``. Besides the names below, a module may provide

    CONFIG_FILE                                        file in which older tools stored the config
    RECORDS_METHOD                                     False if the config does not record the quantization method
    WIDTH_MULTIPLE                                     multiple to which widths per GPU are padded (32)
    config_files(spec) -> {name: JSON}                 additional config files that readers look for
    OPTIONAL                                           suffixes that a linear may have whatever the config says, not in
                                                       ``packed_shapes``; ``read`` checks what matters of them
    SIGNED_SCALES                                      False if its readers cannot have negative scales
    INPUT_ORDER                                        True if its files can hold an order of the inputs (act-order)
    ORDERED_LAYERS                                     True if the first entry for a layer counts, quantized or not; if
                                                       not, those that are not quantized count first
    ZERO_POINTS                                        True if its readers expect zero points, of symmetric weights, too
    BITS                                               widths of codes that it writes; 2, 3, 4 and 8 if it has none
    TABLES                                             names of the tables of values (kernels/tables.py) that it writes
    unportable(spec, experts) -> None | reason         why another format is the better default for ``spec``
    shape_problem(spec, n, k) -> None | reason         why a linear of N x K cannot be written
    word_shape(spec) -> (inputs, outputs)              number that share a packed word and cannot be split
    reader_notes(spec, experts) -> [sentence]          notes for users on other programs that read ``spec``
    readers(format, schemes, experts) -> Readers       how other programs read the files, for the model card
    remark(weight, name) -> None | sentence            what looks wrong about a weight that was read
    writer(config) -> None | name                      the program that wrote a config
    read_dimensions(headers, spec, read) -> Dimensions in place of ``dimensions`` where headers do not tell: ``read``
                                                       returns the tensor with a suffix
    described(headers, spec, name) -> QuantSpec        how one linear is stored, where files say it, and not the config
    unreadable(config, inventory) -> None | reason     why a checkpoint is not read, from its config.json and headers
    decoded(headers, spec, n, k) -> None | reason      why a linear is decoded to floats at load, as headers tell

A suffix may have dots: ``weight.absmax``.

A layout that is only read has no ``supports``, ``scale_dtype``, ``to_config`` and ``write``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from aiakq.spec import QuantSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from aiakq.formats.decoded_weight import DecodedWeight
    from aiakq.formats.headers import Dimensions, Headers, Shapes
    from aiakq.kernels.types import QWeight


class Dialect(Protocol):
    """A module that reads the ``quantization_config`` of another tool."""

    def from_config(self, config: Mapping[str, object]) -> QuantSpec | None:
        """Return the spec, or None if the config describes another layout. Raises ``format_unsupported``."""


class Format(Dialect, Protocol):
    """Names, shapes and metadata of a quantized linear layer's tensors on disk."""

    @property
    def SUFFIXES(self) -> tuple[str, ...]:
        """Suffixes of the tensors of one packed linear, e.g. ``qweight``."""

    @property
    def QUANT_METHODS(self) -> tuple[str, ...]:
        """Values of ``quant_method`` in config.json that ``from_config`` reads."""

    def holds_codes(self, headers: Headers) -> bool:
        """Whether a module with these tensors is a packed linear at all, complete or damaged."""

    def matches(self, headers: Headers) -> bool:
        """Whether shapes and dtypes match this layout."""

    def packed_shapes(self, headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
        """Return suffix -> shape of the expected tensors of a linear of N x K."""

    def dimensions(self, headers: Headers, spec: QuantSpec) -> Dimensions:
        """Return N, K, bits and groups. Raises KeyError, ValueError or ArithmeticError for other headers."""

    def supports(self, spec: QuantSpec) -> str | None:
        """Return why the files cannot hold ``spec``, or None."""

    def scale_dtype(self, spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored scales; ``dtype`` is that of unquantized tensors."""

    def to_config(self, spec: QuantSpec) -> dict[str, object]:
        """Return the ``quantization_config`` to write."""

    def read(self, tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight | DecodedWeight:
        """Read one linear from its tensors, suffix -> tensor; the result satisfies all invariants of QWeight.

        What QWeight cannot hold is decoded to floats. Raises ``tensor_mismatch`` and ``not_finite``, with ``name``.
        """

    def write(self, weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one linear: the inverse of ``read``."""


if TYPE_CHECKING:
    from aiakq.formats import awq, awq_gemv, awq_gemv_fast, compressed_tensors, fp8, gptq, modelopt

    _WRITTEN: tuple[Format, ...] = (awq, awq_gemv, awq_gemv_fast, compressed_tensors, fp8, gptq, modelopt)
