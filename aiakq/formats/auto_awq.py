"""What AutoAWQ's GEMM, GEMV and GEMV-fast layouts share, such as ``quantization_config`` (key ``version``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from aiakq.errors import error
from aiakq.formats.compatibility import experts_note
from aiakq.formats.config_keys import layer_override
from aiakq.formats.config_values import (
    first_of,
    read_bits,
    read_flag,
    read_group_size,
    read_names,
    read_object,
    read_word,
    says_nothing,
    unsupported,
)
from aiakq.formats.headers import Headers
from aiakq.formats.skipped_layers import skipped_names, unnamed_layers
from aiakq.spec import LayerSpec, QuantSpec

#: GPTQModel exports AWQ's layouts under its own method name.
QUANT_METHODS = ("awq", "gptq")
#: Readers expect zero points, and vLLM's fast kernels need them.
ZERO_POINTS = True


def from_config(config: Mapping[str, object], format: str, versions: Sequence[str]) -> QuantSpec | None:
    """Return the spec of a config in the layout ``format``, or None if its version is not one of ``versions``.

    Raises ``format_unsupported``.
    """
    if str(config.get("quant_method", "")).lower() == "gptq":
        if read_flag(config.get("is_marlin_format"), "is_marlin_format"):
            return None
        version = read_word(config, "checkpoint_format", "format", default="gptq")
        symmetric = read_flag(config.get("sym"), "sym")
    else:
        version = read_word(config, "version", "checkpoint_format", default="gemm")
        symmetric = not read_flag(first_of(config, "zero_point", default=True), "zero_point")
    if version not in versions:
        return None
    bits = first_of(config, "bits", "w_bit")
    if read_bits(bits, f"AWQ version {version!r}") != 4:
        raise unsupported(f"AWQ version {version!r} with {bits!r:.40} bits")
    if not says_nothing(config.get("rotation")):
        raise unsupported(f"AWQ version {version!r} with rotation {config['rotation']!r:.40}")
    base = LayerSpec(4, symmetric=symmetric)
    for key, values in read_object(config.get("dynamic"), "dynamic").items():
        layer = None if key.startswith("-:") else layer_override(values, base)
        if layer is not None and layer.bits != 4:
            raise unsupported(f"AWQ version {version!r} with {layer.bits} bits for {key!r:.40}")
    stored = config.get("modules_to_not_convert")
    listed = ("lm_head",) if stored is None else read_names(stored, "modules_to_not_convert")
    return QuantSpec(
        method="awq",
        format=format,
        bits=4,
        group_size=read_group_size(first_of(config, "group_size", "q_group_size", default=128)),
        symmetric=symmetric,
        # AutoAWQ skips every module whose name contains one of these strings.
        ignore=tuple(name if name == "lm_head" else f"*{name}*" for name in listed),
    )


def to_config(spec: QuantSpec, version: str) -> dict[str, object]:
    """Return the ``quantization_config`` of ``spec``. Raises ``option_conflict`` if layers differ."""
    if spec.mixed:
        raise error(
            "option_conflict",
            option="A width or group size for single layers",
            other="the AWQ format",
            reason="its files have one of each for all layers",
            hint="Write compressed-tensors.",
        )
    return {
        "quant_method": "awq",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "zero_point": not spec.symmetric,
        "version": version,
        # Readers look for these strings in module names.
        "modules_to_not_convert": skipped_names(spec),
    }


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, even if some of its tensors are missing or damaged."""
    return "qweight" in headers


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of stored scales: float16, regardless of ``dtype``, that of other tensors."""
    return torch.float16


def supports(spec: QuantSpec) -> str | None:
    """Return why AWQ files cannot hold ``spec``, or None."""
    if spec.bits != 4 or spec.activation_bits or any(layer is not None for _, layer in spec.layers):
        return "such files hold 4 bits for every layer"
    return "such files hold no 4-bit floats" if spec.table is not None else unnamed_layers(spec)


def reader_notes(spec: QuantSpec, experts: bool) -> list[str]:
    """Return notes for users on other programs that read ``spec``; see ``aiakq.formats``."""
    return [experts_note(spec.format)] if experts else []
