"""compressed-tensors' ``quantization_config``: config groups, each with its scheme and targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiakq.formats import compressed_tensors_floats
from aiakq.formats.compressed_tensors_floats import is_dynamic
from aiakq.formats.config_keys import ARGUMENTS, GROUP, check_keys
from aiakq.formats.config_values import (
    first_of,
    read_flag,
    read_group_size,
    read_integer,
    read_names,
    read_object,
    read_word,
    says_nothing,
    unsupported,
)
from aiakq.patterns import glob_to_regex, is_plain
from aiakq.spec import LayerSpec, QuantSpec


def from_config(config: Mapping[str, object]) -> QuantSpec:
    """Return the spec of a config. Names take precedence over regular expressions (in alphabetical order), and those
    over ``Linear``.

    Raises ``format_unsupported``.
    """
    transforms = read_object(config.get("transform_config"), "transform_config")
    if transforms.get("config_groups"):
        raise unsupported("compressed-tensors with rotations of its activations (transform_config)")
    check_keys(transforms, ("config_groups",), "transform_config of compressed-tensors")
    _check_sparsity(read_object(config.get("sparsity_config"), "sparsity_config"))
    groups = [_stated(group, name) for name, group in read_object(config.get("config_groups"), "config_groups").items()]
    listed: dict[str, LayerSpec] = {}
    for group in groups:
        layer = _read_group(group, config.get("format"))
        for target in read_names(group.get("targets"), "targets"):
            listed.setdefault(target, layer)
    base = listed.pop("Linear", None)
    layers: list[tuple[str, LayerSpec | None]] = [(name, listed[name]) for name in sorted(listed, key=_specificity)]
    if base is None:
        if not layers or layers[0][1] is None:
            raise unsupported(f"compressed-tensors with {len(groups)} config groups and no target")
        base = layers[0][1]
        layers.append(("*", None))
    method = compressed_tensors_floats.method(base) or ("weight_only_int8" if base.bits == 8 else "gptq")
    integers = base.float8 is None and base.table is None
    return QuantSpec(
        method="smooth_quant" if base.activation_bits and integers else method,
        format="compressed-tensors",
        **vars(base),
        ignore=read_names(config.get("ignore"), "ignore"),
        layers=tuple(layers),
    )


#: Layouts of weights of which those that are 0 are left out.
_SPARSE = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24")
#: Records of how many weights are 0, and of which layers.
_SPARSITY = ("format", "targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass")


def _check_sparsity(sparsity: Mapping[str, object]) -> None:
    """Raise ``format_unsupported`` unless weights of 0 are stored like all others."""
    check_keys(sparsity, _SPARSITY, "sparsity_config of compressed-tensors")
    layout = read_word(sparsity, "format", default="dense")
    if layout in _SPARSE:
        raise unsupported(
            f"compressed-tensors whose weights of 0 are left out ({layout}); load the model in the llm-compressor that "
            "wrote it and save it with save_compressed=False, or use the checkpoint from before that"
        )
    if layout != "dense":
        raise unsupported(f"compressed-tensors with the sparsity_config format {layout!r:.40}")


#: Names of how columns were ordered.
_ORDERS = ("none", "false", "true", "group", "weight", "static", "dynamic")


def _stated(group: object, name: str) -> Mapping[str, object]:
    """Return a config group. Raises ``format_unsupported`` if it is a list of targets for a scheme known by name."""
    if isinstance(group, list):
        raise unsupported(f"compressed-tensors with the scheme {name!r:.40}, which its config does not describe")
    return read_object(group, f"the config group {name!r:.40}")


def _specificity(target: str) -> tuple[bool, str]:
    return target.startswith("re:"), target


def _read_group(group: Mapping[str, object], shared_format: object) -> LayerSpec:
    """Parse one entry of ``config_groups``; ``shared_format`` applies if it has no format of its own."""
    weights = read_object(group.get("weights"), "weights")
    inputs = read_object(group.get("input_activations"), "input_activations")
    layout = str(group.get("format") or shared_format).strip().lower()
    check_keys(group, GROUP, "a config group of compressed-tensors")
    for arguments, of in ((weights, "weights"), (inputs, "activations")):
        check_keys(arguments, ARGUMENTS, f"compressed-tensors {of}")
    if not weights:
        raise unsupported("compressed-tensors with a config group without weights")
    kind = read_word(weights, "type", default="int")
    if kind == "float" and layout in compressed_tensors_floats.LAYOUTS:
        return compressed_tensors_floats.read_group(weights, inputs, layout)
    if kind != "int":
        raise unsupported(f"compressed-tensors weights of type {kind!r:.40} in the format {layout!r:.40}")
    if layout not in ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"):
        raise unsupported(f"compressed-tensors format {layout!r:.40}")
    if (strategy := read_word(weights, "strategy", default="group")) not in ("tensor", "channel", "group"):
        raise unsupported(f"compressed-tensors weights with strategy {strategy!r:.40}")
    if is_dynamic(weights) or not says_nothing(weights.get("block_structure")):
        raise unsupported("compressed-tensors weights that are quantized at run time, or in blocks")
    for arguments, of in ((weights, "weights"), (inputs, "activations")):
        strategy = read_word(arguments, "strategy", default="group")
        if read_group_size(arguments.get("group_size")) > 0 and strategy != "group":
            raise unsupported(f"{of} with a group_size and the strategy {strategy!r:.40}")
    if (order := read_word(weights, "actorder", default="none")) not in _ORDERS:
        raise unsupported(f"compressed-tensors with the actorder {order!r:.40}")
    bits = read_integer(first_of(weights, "num_bits", default=8), "num_bits")
    if not 2 <= bits <= 8:
        raise unsupported(f"compressed-tensors with weights of {bits} bits; those of 2 to 8 are read")
    layer = LayerSpec(
        bits=bits,
        group_size=read_group_size(weights.get("group_size")),
        symmetric=read_flag(first_of(weights, "symmetric", default=True), "symmetric"),
        activation_bits=8 if inputs else None,
        static_input=bool(inputs) and not is_dynamic(inputs),
    )
    return replace(layer, activation_type=_activation_type(inputs, layer)) if inputs else layer


def _activation_type(inputs: Mapping[str, object], layer: LayerSpec) -> str | None:
    """Return what activations beside the integers of ``layer`` are rounded to, as ``LayerSpec`` calls it.

    Raises ``format_unsupported`` for other activations than those of 8 bits with one scale per token, or stored.
    """
    bits = read_integer(first_of(inputs, "num_bits", default=8), "num_bits")
    kind = read_word(inputs, "type", default="int")
    symmetric = read_flag(first_of(inputs, "symmetric", default=True), "symmetric")
    if bits != 8 or kind not in ("int", "float") or (kind == "float" and not symmetric):
        sort = "symmetric" if symmetric else "asymmetric"
        raise unsupported(f"{sort} activations of {bits} bits and type {kind!r:.40}; those of 8 bits are read")
    size, dynamic = read_group_size(inputs.get("group_size")), is_dynamic(inputs)
    strategy = read_word(inputs, "strategy", default="group" if size > 0 else "tensor")
    if strategy != ("token" if dynamic else "tensor"):
        when = "computed" if dynamic else "stored"
        raise unsupported(f"activations with {when} scales and the strategy {strategy!r:.40}")
    if kind == "float":
        if layer.bits > 6:
            raise unsupported(
                f"integers of {layer.bits} bits with activations that are floats; of up to 6 bits are read"
            )
        return "e4m3"
    if not symmetric:
        return "uint8"
    return None if (layer.bits, layer.group_size, layer.symmetric) == (8, -1, True) else "int8"


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Return the ``quantization_config`` of ``spec``: groups with names first, then every other Linear.

    Each group states its own format too.
    """
    targets: dict[LayerSpec, list[str]] = {}
    ignore = [_target(pattern) for pattern in spec.ignore]
    for pattern, layer in spec.layers:
        name = _target(pattern)
        if layer is None:
            ignore.append(name)
        elif layer != spec.layer:
            targets.setdefault(layer, []).append(name)
    groups = [_group(layer, names) for layer, names in targets.items()]
    groups.append(_group(spec.layer, ["Linear"]))
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
    }


def _target(pattern: str) -> str:
    return pattern if is_plain(pattern) or pattern.startswith("re:") else "re:" + glob_to_regex(pattern)


def _group(layer: LayerSpec, targets: list[str]) -> dict[str, object]:
    """Return one entry of ``config_groups``."""
    if layer.float8 is not None or layer.table is not None:
        return compressed_tensors_floats.group(layer, targets)
    weights: dict[str, object] = {
        "num_bits": layer.bits,
        "type": "int",
        "symmetric": layer.symmetric,
        "strategy": "channel" if layer.group_size == -1 else "group",
        "dynamic": False,
    }
    if layer.group_size != -1:
        weights["group_size"] = layer.group_size
    group: dict[str, object] = {
        "targets": targets,
        "weights": weights,
        "format": "int-quantized" if layer.activation_bits else "pack-quantized",
    }
    if layer.activation_bits:
        group["input_activations"] = {
            "num_bits": layer.activation_bits,
            "type": "int",
            "symmetric": True,
            "strategy": "tensor" if layer.static_input else "token",
            "dynamic": not layer.static_input,
        }
    return group


def writer(config: Mapping[str, object]) -> str | None:
    """Return the program that wrote a config, if recorded."""
    return f"compressed-tensors {config['version']}" if config.get("version") else None
