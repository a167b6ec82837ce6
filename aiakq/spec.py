"""QuantSpec: how a checkpoint is quantized, and its two-way map to ``quantization_config`` in config.json.

Four words are kept apart everywhere (docs/structure.md): the *method* chose the numbers, the *scheme* is the
arithmetic, the *format* is the layout on disk, the *implementation* is the code that computes.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiakq.errors import error

METHOD_NAMES = ("weight_only_int8", "smooth_quant", "awq", "gptq")

#: Spellings that users and other tools write, and the method they mean. ``gpt`` is in the reference page.
METHOD_ALIASES = {"gpt": "gptq", "w8a16": "weight_only_int8", "w8a8": "smooth_quant"}


def canonical_method(name: str) -> str:
    """The method a user's spelling means. Raises ``bad_option`` for anything unknown."""
    spelled = name.strip().lower().replace("-", "_")
    spelled = METHOD_ALIASES.get(spelled, spelled)
    if spelled not in METHOD_NAMES:
        raise error(
            "bad_option",
            option="The quantization method",
            value=name,
            expected="one of " + ", ".join(METHOD_NAMES),
            hint="weight_only_int8 is the safest, awq and gptq the smallest, smooth_quant the fastest in batches.",
        )
    return spelled


@dataclass(frozen=True)
class LayerSpec:
    """How one linear is stored: the part of a QuantSpec that may differ from layer to layer."""

    bits: int
    group_size: int = -1
    symmetric: bool = True
    activation_bits: int | None = None
    static_input: bool = False


@dataclass(frozen=True)
class QuantSpec:
    """What every quantized linear layer of a checkpoint has in common, and which layers differ.

    group_size       inputs per scale along K; -1 means one scale per output row.
    activation_bits  8 when activations are quantized too (scheme w8a8), else None.
    static_input     activations use a stored scale instead of one computed per token.
    desc_act         the file stores a scrambled group index per input (GPTQ act-order).
    ignore           module names (or ``re:`` patterns) that stay in 16 or 32 bits.
    layers           (module name or ``re:`` pattern, what holds there instead); the first that matches counts. None
                     means not quantized.
    notes            what aiakq records about the making; other tools ignore it.
    """

    method: str
    format: str
    bits: int
    group_size: int = -1
    symmetric: bool = True
    activation_bits: int | None = None
    static_input: bool = False
    desc_act: bool = False
    ignore: tuple[str, ...] = ("lm_head",)
    layers: tuple[tuple[str, LayerSpec | None], ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def for_layer(self, name: str) -> QuantSpec | None:
        """The spec of the linear ``name`` alone, without ``layers``; None where it is not quantized."""
        if any(_names(pattern, name) for pattern in self.ignore):
            return None
        for pattern, layer in self.layers:
            if _names(pattern, name):
                return None if layer is None else replace(self, layers=(), **vars(layer))
        return replace(self, layers=())

    @property
    def mixed(self) -> bool:
        """Whether quantized layers differ from each other."""
        base = self.layer
        return any(layer is not None and layer != base for _, layer in self.layers)

    @property
    def layer(self) -> LayerSpec:
        """What holds for every layer that ``layers`` does not name."""
        return LayerSpec(self.bits, self.group_size, self.symmetric, self.activation_bits, self.static_input)

    @property
    def scheme(self) -> str:
        return "w8a8" if self.activation_bits else f"w{self.bits}a16"

    def describe(self) -> str:
        """One phrase for tables, like ``w4a16 g128 asym``."""
        group = "channel" if self.group_size == -1 else f"g{self.group_size}"
        return f"{self.scheme} {group} {'sym' if self.symmetric else 'asym'}"

    def to_config(self) -> dict[str, Any]:
        """The ``quantization_config`` that transformers and vLLM read for this spec."""
        return _WRITERS[self.format](self)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> QuantSpec:
        """Read another tool's or our own ``quantization_config``. Raises ``format_unsupported``."""
        method = str(config.get("quant_method", "")).lower()
        reader = _READERS.get(method)
        if reader is None:
            raise error("format_unsupported", reason=f"quant_method is {method or 'missing'!r}")
        return reader(config)


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern of a config means the module ``name``; ``re:`` begins a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name


def _gptq_config(spec: QuantSpec) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "desc_act": spec.desc_act,
        "sym": spec.symmetric,
        "checkpoint_format": spec.format,
        "lm_head": False,
        "true_sequential": True,
        "meta": {"quantizer": [f"aiakq:{spec.notes.get('version', '0')}"]},
    }


def _awq_config(spec: QuantSpec) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "zero_point": not spec.symmetric,
        "version": "gemv" if spec.format == "awq_gemv" else "gemm",
        "modules_to_not_convert": list(spec.ignore),
    }


def _compressed_tensors_config(spec: QuantSpec) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": spec.bits,
        "type": "int",
        "symmetric": spec.symmetric,
        "strategy": "channel" if spec.group_size == -1 else "group",
        "dynamic": False,
    }
    if spec.group_size != -1:
        weights["group_size"] = spec.group_size
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if spec.activation_bits:
        group["input_activations"] = {
            "num_bits": spec.activation_bits,
            "type": "int",
            "symmetric": True,
            "strategy": "tensor" if spec.static_input else "token",
            "dynamic": not spec.static_input,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if spec.activation_bits else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(spec.ignore),
        "config_groups": {"group_0": group},
    }


_WRITERS = {
    "gptq": _gptq_config,
    "gptq_v2": _gptq_config,
    "awq": _awq_config,
    "awq_gemv": _awq_config,
    "compressed-tensors": _compressed_tensors_config,
}


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value under the first spelling present; GPTQ and AWQ tools disagree about names."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def _read_gptq(config: Mapping[str, Any]) -> QuantSpec:
    bits = _first(config, "bits", "w_bit", "wbits")
    if bits not in (2, 3, 4, 8):
        raise error("format_unsupported", reason=f"GPTQ with {bits} bits")
    layout = str(_first(config, "checkpoint_format", "format", default="gptq")).lower()
    if layout not in ("gptq", "gptq_v2"):
        raise error("format_unsupported", reason=f"GPTQ checkpoint_format {layout!r}")
    return QuantSpec(
        method="gptq",
        format=layout,
        bits=bits,
        group_size=_first(config, "group_size", "q_group_size", default=-1),
        symmetric=bool(_first(config, "sym", default=not config.get("zero_point", False))),
        desc_act=bool(config.get("desc_act", False)),
        ignore=() if config.get("lm_head") else ("lm_head",),
        notes=_quantizer_note(config),
    )


def _quantizer_note(config: Mapping[str, Any]) -> dict[str, Any]:
    """Which tool wrote the file, where it says so: asymmetric GPTQ v1 zeros cannot be read without knowing."""
    meta = config.get("meta")
    written_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if isinstance(written_by, list) and written_by:
        written_by = written_by[0]
    return {"quantizer": written_by} if isinstance(written_by, str) else {}


def _read_awq(config: Mapping[str, Any]) -> QuantSpec:
    bits = _first(config, "bits", "w_bit")
    version = str(config.get("version", "gemm")).lower()
    if bits != 4 or version not in ("gemm", "gemv"):
        raise error("format_unsupported", reason=f"AWQ version {version!r} with {bits} bits")
    return QuantSpec(
        method="awq",
        format="awq" if version == "gemm" else "awq_gemv",
        bits=4,
        group_size=_first(config, "group_size", "q_group_size", default=128),
        symmetric=not config.get("zero_point", True),
        ignore=tuple(config.get("modules_to_not_convert") or ("lm_head",)),
    )


def _read_compressed_tensors(config: Mapping[str, Any]) -> QuantSpec:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise error("format_unsupported", reason=f"compressed-tensors with {len(groups)} config groups")
    weights = groups[0].get("weights") or {}
    inputs = groups[0].get("input_activations")
    layout = groups[0].get("format") or config.get("format")
    if weights.get("type") != "int" or weights.get("num_bits") not in (4, 8):
        raise error(
            "format_unsupported",
            reason=f"compressed-tensors weights of type {weights.get('type')} with {weights.get('num_bits')} bits",
        )
    if layout not in ("pack-quantized", "int-quantized", "naive-quantized"):
        raise error("format_unsupported", reason=f"compressed-tensors format {layout!r}")
    if inputs and (inputs.get("num_bits") != 8 or inputs.get("type") != "int" or not inputs.get("symmetric", True)):
        raise error("format_unsupported", reason="activations other than symmetric 8-bit integers")
    bits = weights["num_bits"]
    if inputs:
        method = "smooth_quant"
    else:
        method = "weight_only_int8" if bits == 8 else "gptq"
    return QuantSpec(
        method=method,
        format="compressed-tensors",
        bits=bits,
        group_size=weights.get("group_size") or -1,
        symmetric=bool(weights.get("symmetric", True)),
        activation_bits=8 if inputs else None,
        static_input=bool(inputs) and not inputs.get("dynamic", False),
        ignore=tuple(config.get("ignore") or ()),
    )


def _read_auto_round(config: Mapping[str, Any]) -> QuantSpec:
    """AutoRound's own method name; the tensors are GPTQ's (without g_idx) or AWQ's, as ``packing_format`` says."""
    packing = str(config.get("packing_format", "auto_round:auto_gptq")).removeprefix("auto_round:")
    if packing in ("auto_gptq", "gptq"):
        return _read_gptq({**config, "checkpoint_format": "gptq"})
    if packing in ("auto_awq", "awq"):
        return _read_awq({"zero_point": not config.get("sym", False), **config, "version": "gemm"})
    raise error("format_unsupported", reason=f"auto-round packing_format {packing!r}")


_READERS = {
    "auto-round": _read_auto_round,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
}
