"""torchao: what the metadata of its files says of each tensor, and its config.

Classes and attributes are those of torchao/prototype/safetensors and torchao/quantization/quantize_/workflows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from aiakq.errors import error
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_flag, read_integer, read_names, read_object, says_nothing, unsupported
from aiakq.formats.headers import Headers
from aiakq.spec import Float8, LayerSpec, QuantSpec

QDATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
SCALE_AND_ZERO, INPUT_SCALE = "_weight_scale_and_zero", "_weight_act_quant_scale"
INPUT_ZERO, FACTORS = "_weight_act_quant_zero_point", "_weight_act_pre_scale"
#: Suffixes of the tensors that a weight is made of.
PARTS = (QDATA, SCALE, ZERO, SCALE_AND_ZERO, INPUT_SCALE, INPUT_ZERO, FACTORS)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Classes.
INT8, INTX, FLOAT8 = "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"
INT4, TILES = "Int4Tensor", "Int4TilePackedTo4dTensor"
#: Class -> its attributes.
_ATTRIBUTES: Mapping[str, frozenset[str]] = {
    INT8: frozenset("block_size dtype act_quant_kwargs reduce_range".split()),
    INTX: frozenset("target_dtype block_size dtype activation_quantization".split()),
    FLOAT8: frozenset("block_size dtype act_quant_kwargs mm_config kernel_preference".split()),
    INT4: frozenset("block_size shape activation_dtype".split()),
    TILES: frozenset("block_size shape".split()),
}
#: Attributes of act_quant_kwargs; mm_config and kernel_preference choose kernels.
_INPUTS = frozenset(
    "granularity mapping_type reduce_range float8_dtype hp_value_lb hp_value_ub mm_config kernel_preference".split()
)


@dataclass(frozen=True)
class TorchaoTensor:
    """What the metadata says of a weight: its class, shape [N, K], the block of R x G that shares a scale, the dtype to
    which it is decoded, and whether there is a scale of all activations."""

    kind: str
    shape: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype
    static: bool


# --- metadata ---------------------------------------------------------------------------------------------------------


def described(headers: Headers, spec: QuantSpec, name: str) -> QuantSpec:
    """Return how the linear ``name`` is stored, as the metadata of its file says.

    Raises ``format_unsupported``, and ``model_malformed`` without a tensor that the metadata list.
    """
    info = next(headers[suffix] for suffix in PARTS if suffix in headers)
    text = info.metadata.get(f"{name}.weight")
    try:
        document = json.loads(text or "")
    except (ValueError, RecursionError):
        raise unsupported(f"torchao without metadata about {name:.200} in {info.file}; save the model again") from None
    document = read_object(document, f"the metadata about {name:.200}")
    kind = str(document.get("_type"))
    if kind not in _ATTRIBUTES:
        raise unsupported(f"{name:.200} of torchao's class {kind!r:.60}; read are {', '.join(_ATTRIBUTES)}")
    values = read_object(document.get("_data"), f"the metadata about {name:.200}")
    check_keys(values, _ATTRIBUTES[kind], f"{kind} {name:.200}")
    listed = read_names(document.get("_tensor_data_names"), "_tensor_data_names")
    for suffix in (QDATA, *(f"_weight_{part}" for part in listed)):
        if suffix not in headers:
            raise error("model_malformed", file=info.file, reason=f"it is without {name:.200}.{suffix:.60}")
    stored = _stored(kind, values, headers, name)
    layer = _LAYERS[kind](stored, values, name)
    return replace(spec, **vars(layer), notes={"stored": stored})


def _stored(kind: str, values: Mapping[str, object], headers: Headers, name: str) -> TorchaoTensor:
    shape = values.get("shape") if kind in (INT4, TILES) else list(headers[QDATA].shape)
    block = values.get("block_size")
    sizes = (shape, shape if kind == FLOAT8 and says_nothing(block) else block)
    (n, k), (rows, group) = (
        _sizes(value, f"{kind} {name:.200} with the {what}")
        for what, value in zip(("shape", "block_size"), sizes, strict=True)
    )
    if n % rows or k % group or (kind in (INT4, TILES) and rows != 1):
        raise unsupported(f"{kind} {name:.200} with blocks of {rows} x {group} in {n} x {k} weights")
    if kind not in (FLOAT8, INT4, TILES) and rows != 1 and (rows, group) != (n, k):
        raise unsupported(f"{kind} {name:.200} with blocks of {rows} x {group}")
    dtype = "bfloat16" if kind in (INT4, TILES) else _value(values.get("dtype"), "torch.dtype")
    if dtype not in _DTYPES:
        raise unsupported(f"{kind} {name:.200} with the dtype {dtype!r:.40}")
    return TorchaoTensor(kind, (n, k), (rows, group), _DTYPES[str(dtype)], INPUT_SCALE in headers)


def _sizes(value: object, what: str) -> tuple[int, int]:
    """Return two positive sizes. Raises ``format_unsupported`` for anything else."""
    sizes: list[object] = value if isinstance(value, list) else []
    found = tuple(size for size in sizes if type(size) is int and 0 < size < 2**31)
    if len(sizes) != 2 or len(found) != 2:
        raise unsupported(f"{what} {value!r:.60}")
    return found


def _value(encoded: object, kind: str) -> object:
    """Return what torchao encoded as an object with a type, which must be ``kind``; a plain value is returned as is."""
    if not isinstance(encoded, Mapping):
        return encoded
    return encoded.get("_data") if encoded.get("_type") == kind else encoded


def _group(stored: TorchaoTensor) -> int:
    return -1 if stored.block[1] == stored.shape[1] else stored.block[1]


def _int8_layer(stored: TorchaoTensor, values: Mapping[str, object], name: str) -> LayerSpec:
    if read_flag(values.get("reduce_range"), "reduce_range") and not says_nothing(values.get("act_quant_kwargs")):
        raise unsupported(f"{name:.200} of torchao with reduce_range")
    layer = LayerSpec(8, _group(stored))
    inputs = _inputs(stored, values, "QuantizeTensorToInt8Kwargs", name)
    if not inputs:
        return layer
    kinds = {"SYMMETRIC": "int8", "ASYMMETRIC": "uint8"}
    mapping = _value(inputs.get("mapping_type", "SYMMETRIC"), "MappingType")
    if mapping not in kinds or read_flag(inputs.get("reduce_range"), "reduce_range"):
        raise unsupported(f"{name:.200} of torchao with reduce_range, or activations of mapping_type {mapping!r:.40}")
    return replace(layer, activation_bits=8, static_input=stored.static, activation_type=kinds[str(mapping)])


def _inputs(stored: TorchaoTensor, values: Mapping[str, object], kind: str, name: str) -> Mapping[str, object]:
    """Return how activations are rounded, with one scale per token or a stored one; empty if they are not."""
    if says_nothing(values.get("act_quant_kwargs")):
        return {}
    inputs = _value(values["act_quant_kwargs"], kind)
    if not isinstance(inputs, Mapping):
        raise unsupported(f"{name:.200} of torchao with act_quant_kwargs {inputs!r:.60}")
    check_keys(inputs, _INPUTS, f"act_quant_kwargs of {name:.200}")
    granularity = read_object(inputs.get("granularity"), "granularity")
    word, detail = granularity.get("_type"), read_object(granularity.get("_data"), "granularity")
    if not stored.static and (word != "PerRow" or detail.get("dim", -1) != -1):
        raise unsupported(
            f"{name:.200} of torchao with activations rounded {word!r:.40}, not PerRow, that is per token"
        )
    return inputs


def _intx_layer(stored: TorchaoTensor, values: Mapping[str, object], name: str) -> LayerSpec:
    word = str(_value(values.get("target_dtype"), "torch.dtype"))
    bits = int(word[3:]) if word in {f"int{bits}" for bits in range(1, 9)} else 0
    inputs = values.get("activation_quantization")
    inputs = inputs.get("_data") if isinstance(inputs, Mapping) else inputs
    if not bits or (inputs is not None and str(inputs).lower() != "int8_asym_per_token"):
        raise unsupported(f"{name:.200} of torchao with codes of {word!r:.40} and activations {inputs!r:.40}")
    layer = LayerSpec(max(2, bits), _group(stored), symmetric=False)
    return layer if inputs is None else replace(layer, activation_bits=8, activation_type="uint8")


def _float8_layer(stored: TorchaoTensor, values: Mapping[str, object], name: str) -> LayerSpec:
    rows = -1 if stored.block == stored.shape else stored.block[0]
    layer = LayerSpec(8, _group(stored), float8=Float8(rows))
    inputs = _inputs(stored, values, "QuantizeTensorToFloat8Kwargs", name)
    if not inputs:
        return layer
    kind = _value(inputs.get("float8_dtype", "float8_e4m3fn"), "torch.dtype")
    bounds = [key for key in ("hp_value_lb", "hp_value_ub") if inputs.get(key) is not None]
    if kind != "float8_e4m3fn" or bounds:
        raise unsupported(f"{name:.200} of torchao with activations in {kind!r:.40} {' '.join(bounds)}".rstrip())
    return replace(layer, activation_bits=8)


def _int4_layer(stored: TorchaoTensor, values: Mapping[str, object], name: str) -> LayerSpec:
    kind = _value(values.get("activation_dtype"), "torch.dtype")
    if kind not in (None, "bfloat16"):
        raise unsupported(f"{name:.200} of torchao with 4-bit weights and activations in {kind!r:.40}")
    return LayerSpec(4, _group(stored), symmetric=False)


_LAYERS: Mapping[str, Callable[[TorchaoTensor, Mapping[str, object], str], LayerSpec]] = {
    INT8: _int8_layer,
    INTX: _intx_layer,
    FLOAT8: _float8_layer,
    INT4: _int4_layer,
    TILES: _int4_layer,
}


# --- config -----------------------------------------------------------------------------------------------------------

#: Classes of configs -> how such layers are stored; their attributes are in the metadata of the files.
_CONFIGS: Mapping[str, LayerSpec] = {
    "Int8WeightOnlyConfig": LayerSpec(8),
    "Int8DynamicActivationInt8WeightConfig": LayerSpec(8, activation_bits=8, activation_type="int8"),
    "Int8StaticActivationInt8WeightConfig": LayerSpec(8, -1, True, 8, True, activation_type="int8"),
    "IntxWeightOnlyConfig": LayerSpec(4, symmetric=False),
    "Int8DynamicActivationIntxWeightConfig": LayerSpec(4, -1, False, 8, activation_type="uint8"),
    "Int4WeightOnlyConfig": LayerSpec(4, 128, False),
    "Float8WeightOnlyConfig": LayerSpec(8, float8=Float8()),
    "Float8DynamicActivationFloat8WeightConfig": LayerSpec(8, activation_bits=8, float8=Float8()),
}
#: Attributes of configs: what the metadata of the files say of each tensor, and how numbers were chosen. One that is
#: missing is ``weight_only_decode``, with which single tokens are not rounded.
_SETTINGS = frozenset(
    "act_mapping_type act_quant_scale act_quant_zero_point activation_dtype activation_value_lb activation_value_ub "
    "alg_id granularity group_size int4_choose_qparams_algorithm int4_packing_format int4_tile_packed_ntile "
    "intx_choose_qparams_algorithm intx_packing_format kernel_preference layout mapping_type mm_config packing_format "
    "preserve_zero reduce_range scale_dtype set_inductor_config use_hqq weight_dtype weight_granularity "
    "weight_mapping_type weight_scale_dtype zero_point_domain".split()
)
#: Classes of configs around another one, whose files have act_pre_scale, and their attributes.
_SCALED: Mapping[str, frozenset[str]] = {
    "AWQConfig": frozenset({"base_config", "step", "scale_search_space_size"}),
    "SmoothQuantConfig": frozenset({"base_config", "step", "alpha", "use_running_absmax"}),
}
#: Keys of an object of torchao.
_ENCODED = ("_type", "_version", "_data")


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of transformers' TorchAoConfig, of which the files say more. Raises ``format_unsupported``."""
    stored = config.get("quant_type")
    if not isinstance(stored, Mapping):
        raise unsupported(f"torchao with quant_type {stored!r:.40}, whose files are pickles; save it with torchao 0.15")
    entry = read_object(stored.get("default"), "quant_type of torchao")
    check_keys(stored, {"default"}, "quant_type of torchao")
    layers: list[tuple[str, LayerSpec | None]] = []
    if entry.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        values = _attributes(entry, frozenset({"fqn_to_config", "module_fqn_to_config"}))
        both = [values[key] for key in sorted(values) if not says_nothing(values[key])]
        if both and both[0] != both[-1]:
            raise unsupported("torchao with fqn_to_config and module_fqn_to_config that do not say the same")
        named = read_object(both[0] if both else None, "fqn_to_config")
        others = named.get("_default")
        plain = sorted((name for name in named if name != "_default"), key=lambda name: name.startswith("re:"))
        layers = [(_pattern(name), _layer_or_none(named[name])) for name in plain]
        layers.append(("*", _layer_or_none(others)))
    else:
        layers.append(("*", _layer(entry)))
    base = next((layer for _, layer in layers if layer is not None), None)
    if base is None:
        raise unsupported("torchao with a FqnToConfig that quantizes nothing")
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return QuantSpec(
        method="torchao",
        format="torchao",
        **vars(base),
        ignore=tuple(f"*{name}*" for name in skipped),
        layers=tuple(layers) if len(layers) > 1 else (),
    )


def _pattern(name: str) -> str:
    """Return a pattern for modules of one for modules or their weights."""
    return name if name.startswith("re:") else name.removesuffix(".weight")


def _layer_or_none(entry: object) -> LayerSpec | None:
    return None if entry is None else _layer(read_object(entry, "quant_type of torchao"))


def _attributes(entry: Mapping[str, object], known: frozenset[str]) -> Mapping[str, object]:
    """Return the attributes of a config. Raises ``format_unsupported`` for others than those that are known."""
    kind = f"torchao's {entry.get('_type')!s:.60}"
    check_keys(entry, _ENCODED, kind)
    values = read_object(entry.get("_data"), kind)
    check_keys(values, known, kind)
    return values


def _layer(entry: Mapping[str, object]) -> LayerSpec:
    kind = str(entry.get("_type"))
    if kind in _SCALED:
        inner = _attributes(entry, _SCALED[kind])
        return _layer(read_object(inner.get("base_config"), f"the base_config of {kind}"))
    if kind not in _CONFIGS:
        raise unsupported(f"torchao with {kind!r:.60}; read are {', '.join(_CONFIGS)}")
    values = _attributes(entry, _SETTINGS)
    layer, size = _CONFIGS[kind], values.get("group_size")
    word = str(_value(values.get("weight_dtype"), "torch.dtype"))
    if word in {f"int{bits}" for bits in range(1, 9)}:
        layer = replace(layer, bits=max(2, int(word[3:])))
    granularity = values.get("weight_granularity") or values.get("granularity")
    if isinstance(granularity, Mapping) and granularity.get("_type") == "PerGroup":
        size = read_object(granularity.get("_data"), "granularity").get("group_size")
    return layer if size is None else replace(layer, group_size=read_integer(size, "group_size"))
