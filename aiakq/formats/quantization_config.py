"""The ``quantization_config`` of config.json, as GPTQ, AWQ, AutoRound and compressed-tensors tools write it.

Both ways: into a QuantSpec, and out of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.patterns import glob_to_regex, is_plain
from aiakq.spec import LayerSpec, QuantSpec


def write(spec: QuantSpec) -> dict[str, Any]:
    """The ``quantization_config`` that transformers and vLLM read for ``spec``.

    Raises ``option_conflict`` for layers that differ in a format that cannot say so.
    """
    return _WRITERS[spec.format](spec)


def read(config: Mapping[str, Any]) -> QuantSpec:
    """Another tool's or our own ``quantization_config`` as a spec. Raises ``format_unsupported``."""
    if not isinstance(config, Mapping):
        raise _unsupported("quantization_config is not an object")
    method = str(config.get("quant_method", "")).lower()
    reader = _READERS.get(method)
    if reader is None:
        raise _unsupported(_REPACKED.get(method) or f"quant_method is {method or 'missing'!r:.80}")
    return reader(config)


# --- writing ---------------------------------------------------------------------------------------------------------

#: What vLLM calls linears that it computes as one; it looks for that name in ``dynamic``.
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED["up_proj"] = "gate_up_proj"


def _gptq_config(spec: QuantSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "desc_act": spec.desc_act,
        "sym": spec.symmetric,
        "checkpoint_format": spec.format,
        "lm_head": "lm_head" not in spec.ignore,
        "true_sequential": True,
        "meta": {"quantizer": [f"aiakq:{spec.notes.get('version', '0')}"]},
    }
    left_out = [name for name in spec.ignore if name != "lm_head"]
    entries: list[tuple[str, LayerSpec | None]] = [*((name, None) for name in left_out), *spec.layers]
    dynamic: dict[str, dict[str, Any]] = {}
    for pattern, layer in entries:
        if layer is None:
            dynamic[f"-:{_regex(pattern)}"] = {}
        else:
            values = {"bits": layer.bits, "group_size": layer.group_size, "sym": layer.symmetric}
            dynamic[f"+:{_regex(pattern)}"] = values
    return {**config, "dynamic": dynamic} if dynamic else config


def _regex(pattern: str) -> str:
    """A name or pattern as GPTQModel's regular expression; names fit vLLM's fused names as well."""
    if not is_plain(pattern):
        return pattern[3:] if pattern.startswith("re:") else glob_to_regex(pattern)
    stem, _, last = pattern.rpartition(".")
    fused = _FUSED.get(last)
    if fused is None:
        return f"^{re.escape(pattern)}$"
    return f"^{re.escape(stem + '.')}({last}|{fused})$"


def _awq_config(spec: QuantSpec) -> dict[str, Any]:
    if spec.mixed:
        raise error(
            "option_conflict",
            option="A width or group of its own for some layers",
            other="the AWQ format",
            reason="its files have one for all",
            hint="Write compressed-tensors.",
        )
    left_out = [pattern for pattern, layer in spec.layers if layer is None]
    return {
        "quant_method": "awq",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "zero_point": not spec.symmetric,
        "version": {"awq": "gemm", "awq_gemv": "gemv", "awq_gemv_fast": "gemv_fast"}[spec.format],
        # Readers look for these as parts of names.
        "modules_to_not_convert": [pattern.strip("*") for pattern in (*spec.ignore, *left_out)],
    }


def _compressed_tensors_config(spec: QuantSpec) -> dict[str, Any]:
    """Groups with names come first and the rest is every other Linear; each group says its own format too."""
    targets: dict[LayerSpec, list[str]] = {}
    ignore = [_compressed_tensors_name(pattern) for pattern in spec.ignore]
    for pattern, layer in spec.layers:
        name = _compressed_tensors_name(pattern)
        if layer is None:
            ignore.append(name)
        elif layer != spec.layer:
            targets.setdefault(layer, []).append(name)
    groups = [_compressed_tensors_group(layer, names) for layer, names in targets.items()]
    groups.append(_compressed_tensors_group(spec.layer, ["Linear"]))
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
    }


def _compressed_tensors_name(pattern: str) -> str:
    return pattern if is_plain(pattern) or pattern.startswith("re:") else "re:" + glob_to_regex(pattern)


def _compressed_tensors_group(layer: LayerSpec, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": layer.bits,
        "type": "int",
        "symmetric": layer.symmetric,
        "strategy": "channel" if layer.group_size == -1 else "group",
        "dynamic": False,
    }
    if layer.group_size != -1:
        weights["group_size"] = layer.group_size
    group: dict[str, Any] = {
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


_WRITERS = {
    "gptq": _gptq_config,
    "gptq_v2": _gptq_config,
    "awq": _awq_config,
    "awq_gemv": _awq_config,
    "awq_gemv_fast": _awq_config,
    "compressed-tensors": _compressed_tensors_config,
}


# --- reading: everything is somebody else's, and none of it may be taken on trust ----------------------------------


def _unsupported(reason: str) -> AiakqError:
    return error("format_unsupported", reason=reason)


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value under the first spelling present; GPTQ and AWQ tools disagree about names."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
        raise _unsupported(f"{what} is {value!r:.40}")
    return value


def _group(value: Any) -> int:
    """A group size; 0 and None mean one scale per row."""
    size = _whole(-1 if value is None else value, "group_size")
    return size if size > 0 else -1


def _names(value: Any, what: str) -> tuple[str, ...]:
    """A list of names or patterns; null is none."""
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _unsupported(f"{what} is no list of names")
    return tuple(found)


def _object(value: Any, what: str) -> Mapping[str, Any]:
    """A JSON object; null is an empty one."""
    found = {} if value is None else value
    if not isinstance(found, Mapping):
        raise _unsupported(f"{what} is no object")
    return found


def _read_gptq(config: Mapping[str, Any]) -> QuantSpec:
    layout = str(_first(config, "checkpoint_format", "format", default="gptq")).lower()
    if config.get("is_marlin_format"):
        layout = "marlin"
    if layout in ("gemm", "gemv", "gemv_fast"):  # GPTQModel's rounding, exported in AWQ's layout
        return _read_awq({**config, "version": layout, "zero_point": not config.get("sym", False)})
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported(_REPACKED.get(layout) or f"GPTQ checkpoint_format {layout!r:.40}")
    if config.get("pack_dtype", "int32") != "int32":
        raise _unsupported(f"GPTQ codes packed into {config['pack_dtype']!r:.40}")
    bits = _bits(_first(config, "bits", "w_bit", "wbits"), "GPTQ")
    base = LayerSpec(
        bits=bits,
        group_size=_group(_first(config, "group_size", "q_group_size")),
        symmetric=bool(_first(config, "sym", default=not config.get("zero_point", False))),
    )
    return QuantSpec(
        method="gptq",
        format=layout,
        **vars(base),
        desc_act=bool(config.get("desc_act", False)),
        ignore=() if config.get("lm_head") else ("lm_head",),
        layers=tuple(_dynamic(_object(config.get("dynamic"), "dynamic"), base)),
        notes=_quantizer_note(config),
    )


#: Layouts made for one kernel, which nothing else can read.
_REPACKED = {
    "marlin": "its weights are repacked for the Marlin kernel; use the checkpoint from before that",
    "bitblas": "its weights are repacked for BitBLAS; use the checkpoint from before that",
    "exl2": "its weights are packed for ExLlamaV2",
    "exl3": "its weights are packed for ExLlamaV3",
    "gptq_p": "its weights are cut into bit planes (gptq_p); export it as gptq or gptq_v2",
}


def _bits(value: Any, what: str) -> int:
    if isinstance(value, bool) or value not in (2, 3, 4, 8):
        raise _unsupported(f"{what} with {value!r:.40} bits")
    return int(value)


def _dynamic(dynamic: Mapping[str, Any], base: LayerSpec) -> Iterable[tuple[str, LayerSpec | None]]:
    """GPTQModel's overrides: regular expressions after ``+:`` or nothing; after ``-:`` the layer is left alone."""
    for key, values in dynamic.items():
        yield "re:" + key.removeprefix("+:").removeprefix("-:"), None if key.startswith("-:") else _over(values, base)


def _over(values: Any, base: LayerSpec) -> LayerSpec | None:
    """``base`` with one layer's own values; None where they are 16 bits or more."""
    given = _object(values, "the entry of a layer")
    bits = _whole(_first(given, "bits", "w_bit", default=base.bits), "bits")
    if bits >= 16:
        return None
    size = _first(given, "group_size", "q_group_size", default=base.group_size)
    return replace(
        base, bits=_bits(bits, "a layer"), group_size=_group(size), symmetric=bool(given.get("sym", base.symmetric))
    )


def _quantizer_note(config: Mapping[str, Any]) -> dict[str, Any]:
    """Which tool wrote the file, where it says so: asymmetric GPTQ v1 zeros cannot be read without knowing."""
    meta = config.get("meta")
    written_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if isinstance(written_by, list) and written_by:
        written_by = written_by[0]
    return {"quantizer": written_by} if isinstance(written_by, str) else {}


#: AWQ versions and the layout each has on disk; the exllama ones and ipex name a kernel, not a layout.
_AWQ_LAYOUTS = {
    "gemm": "awq",
    "exllama": "awq",
    "exllamav2": "awq",
    "ipex": "awq",
    "gemv": "awq_gemv",
    "llm-awq": "awq_gemv",
    "gemv_fast": "awq_gemv_fast",
}


def _read_awq(config: Mapping[str, Any]) -> QuantSpec:
    bits = _first(config, "bits", "w_bit")
    version = str(_first(config, "version", "checkpoint_format", default="gemm")).lower()
    if version in _REPACKED:
        raise _unsupported(_REPACKED[version])
    if bits != 4 or version not in _AWQ_LAYOUTS:
        raise _unsupported(f"AWQ version {version!r:.40} with {bits!r:.40} bits")
    listed = _names(config.get("modules_to_not_convert"), "modules_to_not_convert") or ("lm_head",)
    return QuantSpec(
        method="awq",
        format=_AWQ_LAYOUTS[version],
        bits=4,
        group_size=_group(_first(config, "group_size", "q_group_size", default=128)),
        symmetric=not config.get("zero_point", True),
        # AutoAWQ leaves alone whatever has one of these in its name.
        ignore=tuple(name if name == "lm_head" else f"*{name}*" for name in listed),
    )


def _read_auto_round(config: Mapping[str, Any]) -> QuantSpec:
    """AutoRound's own method name; the tensors are GPTQ's (without g_idx) or AWQ's, as ``packing_format`` says."""
    packing = str(_first(config, "packing_format", "backend", default="auto_round:auto_gptq")).lower()
    if "awq" in packing:
        spec = _read_awq({"zero_point": not config.get("sym", False), **config, "version": "gemm"})
    elif "gptq" in packing or packing in ("auto", "auto_round", "auto_round:exllamav2", "auto_round:triton"):
        spec = _read_gptq({**config, "checkpoint_format": "gptq"})
    else:
        raise _unsupported(f"auto-round packing_format {packing!r:.40}")
    layers = []
    for key, values in _object(config.get("extra_config"), "extra_config").items():
        plain = re.fullmatch(r"[\w.-]+", key) is not None
        layers.append((key if plain else f"re:.*(?:{key})", _over(values, spec.layer)))
    return replace(spec, layers=tuple(layers))


def _read_compressed_tensors(config: Mapping[str, Any]) -> QuantSpec:
    """Names win over regular expressions (in alphabetical order), those over the class ``Linear``."""
    transforms = _object(config.get("transform_config"), "transform_config")
    if transforms.get("config_groups"):
        raise _unsupported("compressed-tensors with rotations of its activations (transform_config)")
    sparsity = _object(config.get("sparsity_config"), "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise _unsupported(f"compressed-tensors with sparse weights ({sparsity!r:.40})")
    groups = [_object(group, "a config group") for group in _object(config.get("config_groups"), "groups").values()]
    listed: dict[str, LayerSpec] = {}
    for group in groups:
        layer = _compressed_tensors_layer(group, config.get("format"))
        for target in _names(group.get("targets"), "targets"):
            listed.setdefault(target, layer)
    base = listed.pop("Linear", None)
    layers: list[tuple[str, LayerSpec | None]] = [(name, listed[name]) for name in sorted(listed, key=_specific)]
    if base is None:
        if not layers or layers[0][1] is None:
            raise _unsupported(f"compressed-tensors with {len(groups)} config groups and no target")
        base = layers[0][1]
        layers.append(("*", None))
    method = "weight_only_int8" if base.bits == 8 else "gptq"
    return QuantSpec(
        method="smooth_quant" if base.activation_bits else method,
        format="compressed-tensors",
        **vars(base),
        ignore=_names(config.get("ignore"), "ignore"),
        layers=tuple(layers),
    )


def _specific(target: str) -> tuple[bool, str]:
    return target.startswith("re:"), target


def _compressed_tensors_layer(group: Mapping[str, Any], shared_format: Any) -> LayerSpec:
    weights = _object(group.get("weights"), "weights")
    inputs = _object(group.get("input_activations"), "input_activations")
    layout = group.get("format") or shared_format
    if weights.get("type") != "int":
        raise _unsupported(f"compressed-tensors weights of type {weights.get('type')!r:.40}")
    if layout not in ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"):
        raise _unsupported(f"compressed-tensors format {layout!r:.40}")
    if weights.get("strategy") not in (None, "tensor", "channel", "group"):
        raise _unsupported(f"compressed-tensors weights with strategy {weights['strategy']!r:.40}")
    if inputs and (inputs.get("num_bits") != 8 or inputs.get("type") != "int" or not inputs.get("symmetric", True)):
        raise _unsupported("activations other than symmetric 8-bit integers")
    return LayerSpec(
        bits=_bits(weights.get("num_bits"), "compressed-tensors"),
        group_size=_group(weights.get("group_size")),
        symmetric=bool(weights.get("symmetric", True)),
        activation_bits=8 if inputs else None,
        static_input=bool(inputs) and not inputs.get("dynamic", False),
    )


_READERS = {
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
}
