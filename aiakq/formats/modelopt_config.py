"""The config of NVIDIA ModelOpt: in config.json, and in hf_quant_config.json.

What an algorithm means is what ModelOpt's export does (modelopt/torch/export) and vLLM reads
(vllm/model_executor/layers/quantization/modelopt.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import (
    first_of,
    merged,
    read_flag,
    read_integer,
    read_names,
    read_object,
    read_word,
    says_nothing,
    unsupported,
)
from aiakq.formats.skipped_layers import skipped_patterns
from aiakq.patterns import is_plain
from aiakq.spec import Float8, LayerSpec, QuantSpec

#: ModelOpt writes the first; the others are vLLM's names of what the algorithms need.
METHODS = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")
#: Block size of ``FP8_PB_WO``.
_BLOCK = 128
_MXFP4 = LayerSpec(4, 32, activation_bits=8, static_input=True, table="e2m1", scale_type="e8m0")
_MXFP4_WEIGHTS = LayerSpec(4, 32, table="e2m1", scale_type="e8m0")
_NVFP4 = LayerSpec(4, 16, activation_bits=4, static_input=True, table="e2m1", scale_type="e4m3")
#: ``quant_algo`` -> how a layer is stored that aiakq writes, too.
_ALGORITHMS: Mapping[str, LayerSpec] = {
    "FP8": LayerSpec(8, activation_bits=8, static_input=True, float8=Float8(-1)),
    "FP8_PER_CHANNEL_PER_TOKEN": LayerSpec(8, activation_bits=8, float8=Float8()),
    "FP8_PB_WO": LayerSpec(8, _BLOCK, float8=Float8(_BLOCK)),
    "MXFP8": LayerSpec(8, 32, activation_bits=8, float8=Float8(1, 32, powers_of_two=True), scale_type="e8m0"),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": LayerSpec(4, 16, table="e2m1", scale_type="e4m3"),
    "W4A8_MXFP4_FP8": _MXFP4,
}
#: The same for those that are only read. Weights of W4A8_AWQ are rounded twice, to integers and to 8-bit floats.
_READ_ONLY: Mapping[str, LayerSpec] = {
    "NVFP4_AWQ": _NVFP4,
    "W4A16_AWQ": LayerSpec(4, 128),
    "W4A8_AWQ": _ALGORITHMS["FP8"],
    "W4A16_MXFP4": _MXFP4_WEIGHTS,
    "MXFP4": _MXFP4_WEIGHTS,
}
#: Those whose groups may have any size.
_ANY_GROUP = ("W4A16_AWQ", "W4A8_AWQ")
_MIXED = "MIXED_PRECISION"
#: The type of the KV cache, which does not matter beside quantized weights (aiakq/formats/config_keys.py).
_CACHE = "kv_cache_quant_algo"
_LAYER = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
_GROUP = ("weights", "input_activations", "targets", "has_zero_point", "pre_quant_scale")
_PART = ("num_bits", "type", "dynamic", "group_size", "strategy")
_QUANTIZATION = (*_LAYER, "exclude_modules", "quantized_layers")


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config, in the format ``fp8`` if all layers are FP8 alike, else ``modelopt``.

    hf_quant_config.json has an object ``quantization``, config.json its keys. Raises ``format_unsupported``.
    """
    values = _values(config)
    layers: list[tuple[str, LayerSpec | None]] = []
    if _word(values) == _MIXED:
        layers = [*_listed(values), ("*", None)]
        base = layers[0][1]
        if base is None:
            raise unsupported("NVIDIA ModelOpt with MIXED_PRECISION and no quantized_layers")
    else:
        base = _layer(values)
        if _word(values) == "MXFP4":
            _check_mxfp4(config)
    for name, group in read_object(config.get("config_groups"), "config_groups").items():
        _check_group(read_object(group, f"the config group {name!r:.40}"), None if layers else base)
    excluded = read_names(first_of(values, "exclude_modules", "ignore"), "exclude_modules")
    only_float8 = not layers and base.float8 is not None and _word(values) in _ALGORITHMS
    return QuantSpec(
        method="modelopt",
        format="fp8" if only_float8 else "modelopt",
        **vars(base),
        ignore=tuple(f"*{name}*" if is_plain(name) else name for name in excluded),
        layers=tuple(layers),
    )


def _values(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys of a config, wherever it has them. Raises ``format_unsupported`` if it has two values of one."""
    inner = read_object(config.get("quantization"), "quantization")
    check_keys(inner, _QUANTIZATION, "quantization of ModelOpt")
    return merged({key: value for key, value in config.items() if key != "quantization"}, inner, "NVIDIA ModelOpt")


def _word(values: Mapping[str, object]) -> str:
    return str(values.get("quant_algo") or "").strip().upper()


def _layer(values: Mapping[str, object]) -> LayerSpec:
    """Return how layers of an algorithm are stored. Raises ``format_unsupported``."""
    algorithm = _word(values)
    layer = _ALGORITHMS.get(algorithm) or _READ_ONLY.get(algorithm)
    cache = values.get(_CACHE)
    if not algorithm and not says_nothing(cache):
        raise unsupported(
            f"NVIDIA ModelOpt with {_CACHE} {cache!r:.40} and no quant_algo: its weights are not quantized, and "
            "aiakq computes the scales of an 8-bit KV cache; take the model it was made from, with --kv-cache-dtype fp8"
        )
    if layer is None:
        known = ", ".join((*_ALGORITHMS, *_READ_ONLY))
        raise unsupported(f"NVIDIA ModelOpt with quant_algo {algorithm or 'missing'!r:.40}; read are {known}")
    size = read_integer(first_of(values, "group_size", default=0), "group_size")
    if read_flag(values.get("has_zero_point"), "has_zero_point"):
        raise unsupported(f"NVIDIA ModelOpt with quant_algo {algorithm} and zero points ('has_zero_point')")
    if algorithm in _ANY_GROUP:
        return layer if layer.float8 or size <= 0 else replace(layer, group_size=size)
    if size > 0 and size != layer.group_size:
        raise unsupported(f"NVIDIA ModelOpt with quant_algo {algorithm} and groups of {size}, not {layer.group_size}")
    return layer


def _listed(values: Mapping[str, object]) -> list[tuple[str, LayerSpec | None]]:
    """Return the layers that have an algorithm of their own; all others are not quantized."""
    layers: list[tuple[str, LayerSpec | None]] = []
    for name, stored in read_object(values.get("quantized_layers"), "quantized_layers").items():
        entry = read_object(stored, f"the entry of {name!r:.80}")
        check_keys(entry, _LAYER, f"the entry of {name!r:.80}")
        if _word(entry) == "MXFP4":
            _check_mxfp4(entry)
        layers.append((name, _layer(entry)))
    return layers


def _check_mxfp4(config: Mapping[str, object]) -> None:
    """Raise ``format_unsupported`` unless ``config_groups`` say that activations are not rounded: ModelOpt writes MXFP4
    for models with rounded activations, and for others.
    """
    groups = read_object(config.get("config_groups"), "config_groups")
    rounded = any(read_object(group, "a config group").get("input_activations") for group in groups.values())
    if not groups or rounded:
        inputs = "rounded activations" if rounded else "nothing that says whether activations are rounded"
        hint = "if they are not, change quant_algo to W4A16_MXFP4"
        raise unsupported(f"NVIDIA ModelOpt with quant_algo MXFP4 and {inputs}; {hint}")


def _check_group(group: Mapping[str, object], layer: LayerSpec | None) -> None:
    """Raise ``format_unsupported`` for a config group of other numbers than those of ``layer``; None: of no floats."""
    check_keys(group, _GROUP, "a config group of ModelOpt")
    targets = read_names(group.get("targets"), "targets")
    if layer is not None and targets and list(targets) != ["Linear"]:
        raise unsupported(f"NVIDIA ModelOpt with a config group for {', '.join(targets)!r:.80}, not for all linears")
    expected = {} if layer is None else {"weights": layer.bits, "input_activations": layer.activation_bits}
    for part in ("weights", "input_activations"):
        stored = read_object(group.get(part), part)
        check_keys(stored, _PART, f"the {part} of a config group of ModelOpt")
        by_row = layer is not None and layer.group_size == -1 and layer.float8 is not None and layer.float8.rows == 1
        if layer is not None and stored.get("strategy") not in (None, "channel" if by_row else None):
            raise unsupported(f"NVIDIA ModelOpt with {part} of the strategy {stored['strategy']!r:.40}")
        size = read_integer(first_of(stored, "group_size", default=0), "group_size")
        if layer is not None and size > 0 and size != layer.group_size:
            raise unsupported(f"NVIDIA ModelOpt with {part} in groups of {size}, not {layer.group_size}")
        bits = stored.get("num_bits", expected.get(part, 8))
        fits = bits == expected[part] if part in expected else bits in (4, 8)
        kinds = {"float"} if layer is None or layer.is_float else {"int"}
        kinds |= {"int"} if layer is None and part == "weights" and bits == 4 else set()
        if stored and (not fits or read_word(stored, "type", default="float") not in kinds):
            raise unsupported(f"NVIDIA ModelOpt with {part} of {bits!r:.20} bits and type {stored.get('type')!r:.20}")


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Return the ``quantization_config`` of a spec. Raises ``format_unsupported`` where ``unwritable`` has a reason."""
    reason = unwritable(spec)
    if reason is not None:
        raise unsupported(f"modelopt for this model: {reason}")
    algorithm = next(name for name, layer in _ALGORITHMS.items() if layer == spec.layer)
    config: dict[str, object] = {"quant_method": "modelopt", "quant_algo": algorithm}
    config["ignore"] = skipped_patterns(spec)
    if spec.group_size != -1:
        config["group_size"] = spec.group_size
    return config


def unwritable(spec: QuantSpec) -> str | None:
    """Return why no config of this format describes ``spec``, or None."""
    if spec.mixed or spec.layer not in _ALGORITHMS.values():
        return f"such files have one of {', '.join(_ALGORITHMS)} for all layers"
    if any(pattern.startswith("re:") for pattern in skipped_patterns(spec)):
        return "such files have no regular expressions for layers that are not quantized"
    return None


def writer(config: Mapping[str, object]) -> str | None:
    """Return the program that wrote a config, if recorded."""
    producer = config.get("producer")
    if not isinstance(producer, Mapping) or not producer.get("name"):
        return None
    return f"{producer['name']} {producer.get('version') or ''}".strip()
