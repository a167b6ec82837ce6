"""The config of AMD Quark (quant_method quark) for 8-bit floats, whose tensors are those of the format ``fp8``.

What the keys mean is what Quark's export (quark/torch/export) writes and vLLM
(vllm/model_executor/layers/quantization/quark) reads: ``per_channel`` along ``ch_axis`` 0 is a scale per output, and
along 1, dynamic, a scale per token. Scales of outputs belong to the KV cache, and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import (
    first_of,
    read_flag,
    read_integer,
    read_names,
    read_object,
    read_word,
    says_nothing,
    unsupported,
)
from aiakq.spec import Float8, LayerSpec, QuantSpec

_CONFIG = frozenset(
    "quant_method global_quant_config layer_quant_config layer_type_quant_config exclude algo_config export quant_mode "
    "version kv_cache_quant_config kv_cache_post_rope softmax_quant_spec".split()
)
_LAYER = frozenset("weight input_tensors output_tensors bias target_device".split())
#: Settings that were needed to choose scales, and those that other kinds of numbers than floats have.
_TENSOR = frozenset(
    "dtype qscheme ch_axis is_dynamic group_size symmetric observer_cls round_method scale_type scale_format "
    "scale_calculation_mode mx_element_dtype qat_spec is_scale_quant zero_point_type".split()
)
#: Values of those that may change numbers, besides null; -1 and 0 are no groups.
_VALUES: Mapping[str, tuple[object, ...]] = {
    "group_size": (-1, 0),
    "symmetric": (True,),
    "scale_format": ("float", "float32"),
    "mx_element_dtype": (),
    "qat_spec": (),
    "is_scale_quant": (False,),
    "zero_point_type": ("int32", "int"),
}
_EXPORT = frozenset("kv_cache_group min_kv_scale pack_method weight_format weight_merge_groups".split())
#: Algorithms that leave nothing but other weights.
_FOLDED = ("awq", "gptq", "smooth", "smoothquant", "autosmoothquant")
_FP8 = ("fp8_e4m3", "float8_e4m3fn")


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config. Raises ``format_unsupported``, naming kinds of numbers that are not read."""
    check_keys(config, _CONFIG, "the config of AMD Quark")
    if not says_nothing(config.get("softmax_quant_spec")):
        raise unsupported("AMD Quark with a rounded softmax (softmax_quant_spec)")
    _check_algorithms(config.get("algo_config"))
    export = read_object(config.get("export"), "export of AMD Quark")
    check_keys(export, _EXPORT, "export of AMD Quark")
    if (layout := read_word(export, "weight_format", default="real_quantized")) != "real_quantized":
        raise unsupported(f"AMD Quark with weight_format {layout!r:.40}; export it with real_quantized")
    if not says_nothing(config.get("layer_type_quant_config")):
        raise unsupported("AMD Quark with settings for types of layers (layer_type_quant_config)")
    base = _layer(read_object(config.get("global_quant_config"), "global_quant_config"), "global_quant_config")
    entries = read_object(config.get("layer_quant_config"), "layer_quant_config")
    layers = [(name, _layer(read_object(entry, name), name)) for name, entry in entries.items()]
    return QuantSpec(
        method="fp8",
        format="fp8",
        **vars(base),
        ignore=read_names(config.get("exclude"), "exclude"),
        layers=tuple(layers),
    )


def _check_algorithms(stored: object) -> None:
    """Raise ``format_unsupported`` for algorithms that change what a model computes, like rotations."""
    for entry in stored if isinstance(stored, list) else [] if says_nothing(stored) else [stored]:
        name = read_word(read_object(entry, "algo_config"), "name", default="none")
        if name not in _FOLDED:
            raise unsupported(f"AMD Quark with the algorithm {name!r:.40}, which may change activations")


def _layer(entry: Mapping[str, object], name: str) -> LayerSpec:
    """Return how the layers of an entry are stored."""
    check_keys(entry, _LAYER, f"{name:.80} of AMD Quark")
    outputs, is_cache = entry.get("output_tensors"), name.rstrip("*").endswith(("k_proj", "v_proj", "kv_proj"))
    if not says_nothing(entry.get("bias")) or not (says_nothing(outputs) or is_cache):
        raise unsupported(f"AMD Quark with rounded biases or outputs ({name!r:.60})")
    weight = read_object(entry.get("weight"), f"the weight of {name:.60}")
    inputs = entry.get("input_tensors")
    scheme = _scheme(weight, f"weights ({name:.60})")
    if read_flag(weight.get("is_dynamic"), "is_dynamic") or scheme not in (("per_tensor", None), ("per_channel", 0)):
        raise unsupported(
            f"AMD Quark with FP8 weights that have a scale {scheme[0]} along {scheme[1]}, or computed ones"
        )
    float8 = Float8(-1 if scheme[0] == "per_tensor" else 1)
    if says_nothing(inputs):
        return LayerSpec(8, float8=float8)
    arguments = read_object(inputs, f"the input_tensors of {name:.60}")
    dynamic = read_flag(arguments.get("is_dynamic"), "is_dynamic")
    scheme = _scheme(arguments, f"activations ({name:.60})")
    if scheme != (("per_channel", 1) if dynamic else ("per_tensor", None)):
        when = "computed" if dynamic else "stored"
        raise unsupported(f"AMD Quark with activations that have {when} scales {scheme[0]} along {scheme[1]}")
    return LayerSpec(8, activation_bits=8, static_input=not dynamic, float8=float8)


def _scheme(arguments: Mapping[str, object], of: str) -> tuple[str, int | None]:
    """Return what shares a scale, and the axis of channels. Raises ``format_unsupported`` unless numbers are e4m3."""
    check_keys(arguments, _TENSOR, f"{of} of AMD Quark")
    if (kind := read_word(arguments, "dtype", default="none")) not in _FP8:
        raise unsupported(
            f"AMD Quark with {of} of type {kind!r:.40}; fp8_e4m3 is read. Export an FP8 or ModelOpt version"
        )
    if (scales := read_word(arguments, "scale_type", default="float")) not in ("float", "float32", "none"):
        raise unsupported(f"AMD Quark with {of} whose scales are {scales!r:.40}")
    for key, allowed in _VALUES.items():
        if (value := arguments.get(key)) is not None and value not in allowed:
            raise unsupported(f"AMD Quark with {of} that have {key} {value!r:.40}")
    scheme = read_word(arguments, "qscheme", default="per_tensor")
    axis = None if scheme != "per_channel" else read_integer(first_of(arguments, "ch_axis", default=0), "ch_axis")
    return scheme, axis
