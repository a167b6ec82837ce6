"""The config groups of compressed-tensors whose weights are floats of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.formats.config_values import (
    first_of,
    read_flag,
    read_group_size,
    read_integer,
    read_word,
    unsupported,
)
from aiakq.spec import Float8, LayerSpec, QuantSpec

#: Formats of 4-bit floats -> the type of their scales, and the inputs that share one.
_FLOAT4 = {"nvfp4-pack-quantized": ("e4m3", 16), "mxfp4-pack-quantized": ("e8m0", 32)}
_MXFP8 = "mxfp8-quantized"
#: Formats of floats. Those of 8 bits are the same on disk; a config may leave it to the groups which ones there are.
LAYOUTS = ("float-quantized", "naive-quantized", "mixed-precision", _MXFP8, *_FLOAT4)
#: Types of scales, and how configs call them.
_SCALE_TYPES = {
    "float8_e4m3fn": "e4m3",
    "uint8": "e8m0",
    "float8_e8m0fnu": "e8m0",
    "float32": "float32",
    "none": "none",
}


def read_group(weights: Mapping[str, object], inputs: Mapping[str, object], layout: str) -> LayerSpec:
    """Parse the arguments of weights that are floats, and those of activations, empty if they are not rounded.

    Raises ``format_unsupported``.
    """
    bits = read_integer(first_of(weights, "num_bits", default=8), "num_bits")
    symmetric = read_flag(first_of(weights, "symmetric", default=True), "symmetric")
    if bits not in (4, 8) or not symmetric or is_dynamic(weights):
        raise unsupported(
            f"compressed-tensors floats of {bits} bits that are asymmetric, dynamic or not of 4 or 8 bits"
        )
    if (bits == 4) != (layout in _FLOAT4) and layout != "mixed-precision":
        raise unsupported(f"compressed-tensors floats of {bits} bits in the format {layout!r:.40}")
    if bits == 4:
        return _read_float4(weights, inputs, layout)
    if layout == _MXFP8 or _scale_type(weights, "weights") == "e8m0":
        return _read_mxfp8(weights, inputs)
    return _read_float8(weights, inputs)


def _scale_type(arguments: Mapping[str, object], of: str, default: str = "none") -> str:
    """Return what scales are rounded to, as ``LayerSpec.scale_type`` calls it, or float32 or none."""
    word = read_word(arguments, "scale_dtype", default="none").removeprefix("torch.")
    if word not in _SCALE_TYPES:
        raise unsupported(f"{of} with scales rounded to {word!r:.40}")
    found = _SCALE_TYPES[word]
    return default if found == "none" else found


def _check_blocks(arguments: Mapping[str, object], of: str, scale_type: str, size: int) -> None:
    """Raise ``format_unsupported`` for other scales than one of ``scale_type`` per group of ``size`` inputs."""
    wanted = "tensor_group" if scale_type == "e4m3" else "group"
    found = (
        read_word(arguments, "strategy", default=wanted),
        read_group_size(first_of(arguments, "group_size", default=size)),
        _scale_type(arguments, of, scale_type),
    )
    if found != (wanted, size, scale_type):
        strategy, group, kind = found
        raise unsupported(f"{of} with the strategy {strategy!r:.40}, groups of {group} and scales in {kind}")


def _float_bits(inputs: Mapping[str, object]) -> int:
    """Return the bits of activations that are rounded to floats. Raises ``format_unsupported`` for others."""
    bits = read_integer(first_of(inputs, "num_bits", default=8), "num_bits")
    kind = read_word(inputs, "type", default="int")
    if kind != "float" or not read_flag(first_of(inputs, "symmetric", default=True), "symmetric"):
        raise unsupported(f"floats with activations of {bits} bits and type {kind!r:.40}, or asymmetric ones")
    return bits


def _read_float4(weights: Mapping[str, object], inputs: Mapping[str, object], layout: str) -> LayerSpec:
    """Parse NVFP4 and MXFP4, whose activations are rounded to the same, or for MXFP4 to MXFP8."""
    size = read_group_size(weights.get("group_size"))
    found = next(((kind, group) for kind, group in _FLOAT4.values() if group == size), None)
    scale_type, group = _FLOAT4.get(layout) or found or ("e4m3", 16)
    _check_blocks(weights, "4-bit floats", scale_type, group)
    bits = None
    if inputs:
        bits = _float_bits(inputs)
        _check_blocks(inputs, "activations", scale_type, group)
        if bits not in ((4,) if scale_type == "e4m3" else (4, 8)):
            raise unsupported(f"4-bit floats with scales in {scale_type} and activations of {bits} bits")
        # "local": with a stored number for the whole layer, of which the computed scales are multiples.
        is_local = read_word(inputs, "dynamic", default="false") == "local"
        if is_local != (scale_type == "e4m3") or not (is_local or is_dynamic(inputs)):
            raise unsupported(f"4-bit floats with activations whose scales are dynamic: {inputs.get('dynamic')!r:.40}")
    return LayerSpec(
        bits=4,
        group_size=group,
        activation_bits=bits,
        static_input=bool(inputs) and scale_type == "e4m3",
        table="e2m1",
        scale_type=scale_type,
    )


def _read_mxfp8(weights: Mapping[str, object], inputs: Mapping[str, object]) -> LayerSpec:
    _check_blocks(weights, "MXFP8", "e8m0", 32)
    if inputs:
        bits = _float_bits(inputs)
        _check_blocks(inputs, "activations", "e8m0", 32)
        if bits != 8 or not is_dynamic(inputs):
            raise unsupported(f"MXFP8 with activations of {bits} bits, or with stored scales")
    return LayerSpec(
        bits=8,
        group_size=32,
        activation_bits=8 if inputs else None,
        float8=Float8(1, 32 if inputs else -1),
        scale_type="e8m0",
    )


def _read_float8(weights: Mapping[str, object], inputs: Mapping[str, object]) -> LayerSpec:
    """Parse a group of weights that are 8-bit floats, and of activations that are rounded to such, or are not."""
    if (kind := _scale_type(weights, "8-bit floats", "float32")) != "float32":
        raise unsupported(f"8-bit floats with scales rounded to {kind}")
    size = read_group_size(weights.get("group_size"))
    strategy = read_word(weights, "strategy", default="group" if size > 0 else "tensor")
    rows = -1 if strategy == "tensor" else 1
    if strategy == "block":
        rows, size = _block(weights.get("block_structure"))
    elif strategy not in ("tensor", "channel", "group"):
        raise unsupported(f"compressed-tensors floats with strategy {strategy!r:.40}")
    elif strategy != "group":
        size = -1
    dynamic = is_dynamic(inputs)
    return LayerSpec(
        bits=8,
        group_size=size,
        activation_bits=8 if inputs else None,
        static_input=bool(inputs) and not dynamic,
        float8=Float8(rows, _float_inputs(inputs, dynamic)),
    )


def _block(structure: object) -> tuple[int, int]:
    """Return the rows and inputs of a block, [128, 128] or "128x128". Raises ``format_unsupported``."""
    sizes = structure.lower().split("x") if isinstance(structure, str) else structure
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise unsupported(f"compressed-tensors with block_structure {structure!r:.40}")
    rows, size = (read_integer(value, "block_structure") for value in sizes)
    if min(rows, size) < 1:
        raise unsupported(f"compressed-tensors with block_structure {structure!r:.40}")
    return rows, size


def _float_inputs(inputs: Mapping[str, object], dynamic: bool) -> int:
    """Return the inputs that share a computed scale, -1 for all. Raises ``format_unsupported``."""
    if not inputs:
        return -1
    if (bits := _float_bits(inputs)) != 8:
        raise unsupported(f"8-bit floats with activations of {bits} bits")
    if dynamic and (kind := _scale_type(inputs, "activations", "float32")) != "float32":
        raise unsupported(f"activations with scales rounded to {kind}")
    size = read_group_size(inputs.get("group_size"))
    strategy = read_word(inputs, "strategy", default="group" if size > 0 else "tensor")
    if strategy not in (("token", "group") if dynamic else ("tensor",)) or (strategy == "group") != (size > 0):
        when = "computed" if dynamic else "stored"
        raise unsupported(f"activations with {when} scales and the strategy {strategy!r:.40}")
    return size


def is_dynamic(arguments: Mapping[str, object]) -> bool:
    """Return ``dynamic``. Raises ``format_unsupported`` for scales that are partly computed at run time ("local")."""
    return read_flag(arguments.get("dynamic"), "dynamic of compressed-tensors")


# --- writing ----------------------------------------------------------------------------------------------------------


def method(layer: LayerSpec) -> str | None:
    """Return the method of a layer of floats, which the config does not record; None for integers."""
    if layer.table is not None:
        return "nvfp4" if layer.scale_type == "e4m3" else "mxfp4"
    if layer.float8 is None:
        return None
    return "mxfp8" if layer.scale_type == "e8m0" else "fp8"


def preset(layer: LayerSpec) -> str | None:
    """Return the name that llm-compressor has for such layers of floats; None if it has none, or for integers."""
    rounds = bool(layer.activation_bits)
    if layer.table is not None:
        name = "NVFP4" if layer.scale_type == "e4m3" else "MXFP4"
        return name if layer.activation_bits == 4 else None if rounds else f"{name}A16"
    if layer.float8 is None or not rounds or layer.scale_type is not None:
        return None
    static = {(-1, True): "FP8", (1, False): "FP8_DYNAMIC", (128, False): "FP8_BLOCK"}
    return static.get((layer.float8.rows, layer.static_input))


def unwritable(spec: QuantSpec) -> str | None:
    """Return why no config groups describe the layers of ``spec``, or None."""
    layers = (spec.layer, *(layer for _, layer in spec.layers if layer is not None))
    return next((reason for layer in layers if (reason := _unwritable(layer)) is not None), None)


def _unwritable(layer: LayerSpec) -> str | None:
    if layer.table is not None:
        return _unwritable_float4(layer)
    if layer.float8 is not None:
        return _unwritable_float8(layer, layer.float8)
    if not layer.activation_bits:
        return None
    if layer.activation_type is not None:
        return f"aiakq reads integers beside activations in {layer.activation_type}, and does not write them"
    if layer != LayerSpec(8, activation_bits=8, static_input=layer.static_input):
        return "aiakq writes integers of 8 bits, symmetric and with a scale per output, beside rounded activations"
    return None


def _unwritable_float4(layer: LayerSpec) -> str | None:
    size = dict(_FLOAT4.values()).get(layer.scale_type or "")
    if size is None or (layer.table, layer.bits, layer.group_size) != ("e2m1", 4, size):
        return (
            "such files have 4-bit floats in groups of 32 with scales in e8m0, or of 16 in e4m3, "
            f"not {layer.table} with other scales"
        )
    if layer.scale_type == "e8m0" and layer.static_input:
        return "such files have MXFP4 with activations that are rounded in groups, not with one stored scale"
    is_nvfp4 = layer.scale_type == "e4m3"
    if layer.activation_bits and (layer.activation_bits, layer.static_input) not in (
        ((4, True),) if is_nvfp4 else ((4, False), (8, False))
    ):
        return f"such files have no {'NVFP4' if is_nvfp4 else 'MXFP4'} beside activations of other kinds"
    return None


def _unwritable_float8(layer: LayerSpec, float8: Float8) -> str | None:
    rounds = bool(layer.activation_bits)
    if rounds and (float8.powers_of_two or float8.bound is not None):
        return "such files cannot say that scales of activations are rounded up to powers of two, or bounded"
    if layer.bits != 8 or layer.activation_bits not in (None, 8):
        return "such files have 8-bit floats beside activations of 8 or 16 bits"
    if layer.scale_type is not None:
        mxfp8 = layer.scale_type == "e8m0" and (float8.rows, layer.group_size) == (1, 32) and not layer.static_input
        if not mxfp8 or float8.activation_group != (32 if rounds else -1):
            return "such files have 8-bit floats with scales in e8m0 for groups of 32, of weights and of activations"
        return None
    if (float8.rows == -1 and layer.group_size != -1) or (float8.rows > 1 and layer.group_size < 1):
        return "such files have a scale for a whole weight, rows, groups or blocks"
    if layer.static_input and float8.activation_group != -1:
        return "such files have a stored scale for all activations, not for groups of them"
    return None


def group(layer: LayerSpec, targets: list[str]) -> dict[str, object]:
    """Return one entry of ``config_groups``."""
    if layer.scale_type is not None:
        return _block_group(layer, targets)
    assert layer.float8 is not None, "floats of 8 bits have Float8, others a type of scales"
    return _float_group(layer, layer.float8, targets)


def _block_group(layer: LayerSpec, targets: list[str]) -> dict[str, object]:
    """Return one entry of ``config_groups`` for NVFP4, MXFP4 or MXFP8."""
    in_units = layer.scale_type == "e4m3"
    common: dict[str, object] = {
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group" if in_units else "group",
        "group_size": layer.group_size,
        "scale_dtype": "torch.float8_e4m3fn" if in_units else "torch.uint8",
    }
    small = "nvfp4-pack-quantized" if in_units else "mxfp4-pack-quantized"
    group: dict[str, object] = {
        "targets": targets,
        "weights": {**common, "num_bits": layer.bits, "dynamic": False},
        "format": _MXFP8 if layer.float8 is not None else small,
    }
    if layer.activation_bits:
        dynamic: object = "local" if in_units else True
        group["input_activations"] = {**common, "num_bits": layer.activation_bits, "dynamic": dynamic}
    return group


def _float_group(layer: LayerSpec, float8: Float8, targets: list[str]) -> dict[str, object]:
    """Return one entry of ``config_groups`` for weights that are 8-bit floats."""
    common: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy = "tensor" if float8.rows == -1 else "channel" if layer.group_size == -1 else "group"
    weights = {**common, "strategy": strategy, "dynamic": False}
    if float8.rows > 1:
        weights |= {"strategy": "block", "block_structure": [float8.rows, layer.group_size]}
    elif strategy == "group":
        weights["group_size"] = layer.group_size
    group: dict[str, object] = {"targets": targets, "weights": weights, "format": "float-quantized"}
    if layer.static_input:
        group["input_activations"] = {**common, "strategy": "tensor", "dynamic": False}
    elif layer.activation_bits and float8.activation_group > 0:
        size = float8.activation_group
        group["input_activations"] = {**common, "strategy": "group", "group_size": size, "dynamic": True}
    elif layer.activation_bits:
        group["input_activations"] = {**common, "strategy": "token", "dynamic": True}
    return group
