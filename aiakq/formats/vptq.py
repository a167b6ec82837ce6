"""VPTQ (Liu et al. 2024, arXiv:2409.17066): weights that are vectors from code books, decoded at load.

For one linear with N outputs and K inputs, of which O are outliers, with C code books for S inputs each, K = O + C * S.
Vectors run along V outputs; indices have b bits, and those of residual vectors r:

    centroids.weight           [C, 2**b * V] float, the code books
    res_centroids.weight       [C, 2**r * V] float, optional: vectors that are added
    indices                    [C, ceil(N/V), ceil(S * (b + r) / 32)] int32, a stream of bits along S: b, then r
    outlier_centroids.weight   [1, M * U] float, optional: M vectors along U outputs, for the first O inputs
    outlier_indices            [1, ceil(N/U), O] int16 without sign
    perm                       [K] int16 without sign, or int64, optional: input perm[j] is multiplied by column j
    weight_scale, weight_bias  [K] float, optional: columns are multiplied by the one, and the other is added
    bias                       [N] float, optional

The formula is ``dequant`` of vptq/ops/quant_gemm.py, computed in float32. The config says the sizes of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_flag, read_integer, read_names, read_object, read_word, unsupported
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.spec import LayerSpec, QuantSpec

_BOOKS, _RESIDUALS, _OUTLIERS = "centroids.weight", "res_centroids.weight", "outlier_centroids.weight"
_INDICES, _OUTLIER_INDICES = "indices", "outlier_indices"
_NORMS = ("weight_scale", "weight_bias")
SUFFIXES = (_BOOKS, _RESIDUALS, _OUTLIERS, _INDICES, _OUTLIER_INDICES, "res_indices", "perm", *_NORMS, "bias")
QUANT_METHODS = ("vptq",)
RECORDS_METHOD = False

_KEYS = frozenset(
    "quant_method config_for_layers shared_layer_config enable_proxy_error modules_to_not_convert".split()
)
_LAYER = frozenset(
    "bias enable_norm enable_perm group_num group_size in_features indices_as_float is_indice_packed num_centroids "
    "num_res_centroids out_features outlier_size vector_lens vector_quant_dim".split()
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Dtypes of integers of 16 bits, whose sign does not count.
_WORDS = (torch.int16, torch.uint16)
_REASON = "VPTQ's weights are vectors from code books"


@dataclass(frozen=True)
class VptqLayer:
    """What the config says of a linear, in the letters above; ``residual_bits`` and ``outlier_width`` are 0 if it has
    no residuals and no outliers.
    """

    n: int
    k: int
    books: int
    size: int
    width: int
    bits: int
    residual_bits: int = 0
    outliers: int = 0
    outlier_width: int = 0
    outlier_vectors: int = 0
    permuted: bool = True
    normed: bool = True

    @property
    def vectors(self) -> int:
        """The vectors of one input."""
        return -(-self.n // self.width)

    @property
    def stored_bits(self) -> int:
        return self.bits + self.residual_bits


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    return _BOOKS in headers or _INDICES in headers


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    layer: VptqLayer = spec.notes["stored"]
    layer = replace(layer, n=n, k=k)
    return _shapes(layer)


def _shapes(layer: VptqLayer) -> Shapes:
    words = -(-layer.size * layer.stored_bits // 32)
    shapes: Shapes = {
        _BOOKS: (layer.books, layer.width << layer.bits),
        _INDICES: (layer.books, layer.vectors, words),
    }
    if layer.residual_bits:
        shapes[_RESIDUALS] = layer.books, layer.width << layer.residual_bits
    if layer.outlier_width:
        shapes[_OUTLIERS] = 1, layer.outlier_vectors * layer.outlier_width
        shapes[_OUTLIER_INDICES] = 1, -(-layer.n // layer.outlier_width), layer.outliers
    if layer.permuted:
        shapes["perm"] = (layer.k,)
    return shapes | (dict.fromkeys(_NORMS, (layer.k,)) if layer.normed else {})


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups."""
    layer: VptqLayer = spec.notes["stored"]
    return Dimensions(layer.n, layer.k, spec.bits, 1)


def decoded(headers: Headers, spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear is decoded at load: all are."""
    return _REASON


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers("vptq")


# --- config -----------------------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config by VPTQ. Raises ``format_unsupported``."""
    check_keys(config, _KEYS, "the quantization_config of VPTQ")
    named, shared = (
        {name: _layer(read_object(entry, name), name) for name, entry in read_object(config.get(key), key).items()}
        for key in ("config_for_layers", "shared_layer_config")
    )
    if not named and not shared:
        raise unsupported("VPTQ with no config_for_layers")
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    first = next(iter((named or shared).values()))
    return QuantSpec(
        method="vptq",
        format="vptq",
        bits=_nearest_bits(first),
        ignore=skipped or ("lm_head",),
        layers=tuple((name, LayerSpec(_nearest_bits(layer))) for name, layer in named.items()),
        notes={"named": named, "shared": shared},
    )


def described(headers: Headers, spec: QuantSpec, name: str) -> QuantSpec:
    """Return how the linear ``name`` is stored. Raises ``format_unsupported`` if the config does not say."""
    named, shared = spec.notes.get("named", {}), spec.notes.get("shared", {})
    layer: VptqLayer | None = named.get(name) or shared.get(name.rpartition(".")[2])
    if layer is None:
        raise unsupported(f"VPTQ, and its config says nothing about {name:.200}, which has code books")
    return replace(spec, bits=_nearest_bits(layer), notes={"stored": layer})


def _nearest_bits(layer: VptqLayer) -> int:
    """Return the width that describes the layer best, rounded up to one that there are names for."""
    nearest = min(8, round(layer.stored_bits / layer.width))
    return next(bits for bits in (2, 3, 4, 5, 6, 8) if bits >= nearest)


def _layer(entry: Mapping[str, object], name: str) -> VptqLayer:
    """Return what the config says of one layer. Raises ``format_unsupported``."""
    what = f"VPTQ, whose entry {name!r:.80}"
    check_keys(entry, _LAYER, f"the entry {name!r:.80} of VPTQ")
    if not read_flag(entry.get("is_indice_packed"), "is_indice_packed"):
        raise unsupported(f"{what} has indices that are not packed; export it with vptq's pack_model")
    if read_flag(entry.get("indices_as_float"), "indices_as_float"):
        raise unsupported(f"{what} has indices_as_float")
    if (along := read_word(entry, "vector_quant_dim", default="out")) != "out":
        raise unsupported(f"{what} has vectors along {along!r:.20}, not along outputs")
    (outlier_width, width), (outlier_vectors, vectors), (outlier_residuals, residuals) = (
        _pair(entry.get(key), key, what) for key in ("vector_lens", "num_centroids", "num_res_centroids")
    )
    n, k, books, size, outliers = (
        read_integer(entry.get(key, 0), key)
        for key in ("out_features", "in_features", "group_num", "group_size", "outlier_size")
    )
    has_outliers = outlier_width > 1 and outlier_vectors > 0
    if not has_outliers:
        outliers = outlier_width = outlier_vectors = 0
    elif outlier_residuals > 0 or outliers < 1:
        raise unsupported(f"{what} has {outliers} outliers and {outlier_residuals} residual vectors for them")
    if min(n, k, books, size, width) < 1 or outliers + books * size != k:
        raise unsupported(f"{what} has {books} groups of {size} inputs and {outliers} outliers, of {k} inputs")
    bits, residual_bits = (_bits(count, what) for count in (vectors, max(1, residuals)))
    if not 1 <= bits <= 16 or bits + residual_bits > 32:
        raise unsupported(f"{what} has code books of {vectors} and {residuals} vectors")
    flags = [read_flag(entry.get(key), key) for key in ("enable_perm", "enable_norm")]
    return VptqLayer(n, k, books, size, width, bits, residual_bits, outliers, outlier_width, outlier_vectors, *flags)


def _pair(value: object, key: str, what: str) -> tuple[int, int]:
    """Return two integers, of outliers and of all other inputs. Raises ``format_unsupported``."""
    if not isinstance(value, list) or len(value) != 2:
        raise unsupported(f"{what} has {key} {value!r:.40}, not two numbers")
    outlier, main = (read_integer(each, key) for each in value)
    return outlier, main


def _bits(count: int, what: str) -> int:
    if count < 1 or count & (count - 1):
        raise unsupported(f"{what} has code books of {count} vectors, which is no power of two")
    return count.bit_length() - 1


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> DecodedWeight:
    """Read one linear from its tensors: values [N, K] float32.

    spec  what ``described`` returned. Raises ``tensor_mismatch`` and ``not_finite``.
    """
    layer: VptqLayer = spec.notes["stored"]
    shapes = _shapes(layer)
    books = _vectors(tensors, _BOOKS, layer.width, shapes, name)
    words = shaped(need(tensors, _INDICES, name, 3, torch.int32), shapes[_INDICES], _INDICES, name)
    residuals = _vectors(tensors, _RESIDUALS, layer.width, shapes, name) if layer.residual_bits else None
    values = torch.empty(layer.n, layer.k)
    for book in range(layer.books):
        codes = _unpack(words[book], layer)
        vectors = books[book][codes & ((1 << layer.bits) - 1)]
        if residuals is not None:
            vectors += residuals[book][codes >> layer.bits]
        first = layer.outliers + book * layer.size
        values[:, first : first + layer.size] = vectors.transpose(1, 2).flatten(0, 1)[: layer.n]
    if layer.outlier_width:
        values[:, : layer.outliers] = _outliers(tensors, layer, shapes, name)
    if layer.permuted:
        values = values[:, _inverse_order(tensors, layer.k, name)]
    if layer.normed:
        scale, offset = (_numbers(tensors, suffix, (layer.k,), name) for suffix in _NORMS)
        values = values * scale + offset
    return DecodedWeight(values, read_bias(tensors, layer.n, name), _REASON)


def _numbers(tensors: Mapping[str, Tensor], suffix: str, shape: tuple[int, ...], name: str) -> Tensor:
    stored = shaped(need(tensors, suffix, name, len(shape), *_FLOATS), shape, suffix, name)
    return finite(stored, suffix, name).to(torch.float32)


def _vectors(tensors: Mapping[str, Tensor], suffix: str, width: int, shapes: Shapes, name: str) -> Tensor:
    """Return code books [C, vectors, width] float32."""
    numbers = _numbers(tensors, suffix, shapes[suffix], name)
    return numbers.view(len(numbers), -1, width)


def _unpack(words: Tensor, layer: VptqLayer) -> Tensor:
    """Return the codes [ceil(N/V), S] int64 of streams of bits [ceil(N/V), W] int32, the lowest bits first."""
    unsigned = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    places = torch.arange(layer.size) * layer.stored_bits
    at, shift = places // 32, places % 32
    return ((unsigned[:, at] | unsigned[:, at + 1] << 32) >> shift) & ((1 << layer.stored_bits) - 1)


def _outliers(tensors: Mapping[str, Tensor], layer: VptqLayer, shapes: Shapes, name: str) -> Tensor:
    """Return the columns [N, O] of the outliers."""
    vectors = _vectors(tensors, _OUTLIERS, layer.outlier_width, shapes, name)[0]
    stored = need(tensors, _OUTLIER_INDICES, name, 3, *_WORDS)
    indices = shaped(stored, shapes[_OUTLIER_INDICES], _OUTLIER_INDICES, name)[0].to(torch.int64) & 0xFFFF
    if int(indices.max()) >= layer.outlier_vectors:
        raise mismatch(name, f"{_OUTLIER_INDICES} has {int(indices.max())}, of {layer.outlier_vectors} vectors")
    return vectors[indices].transpose(1, 2).flatten(0, 1)[: layer.n]


def _inverse_order(tensors: Mapping[str, Tensor], k: int, name: str) -> Tensor:
    """Return the column [K] of each input. Raises ``tensor_mismatch`` unless ``perm`` is an order of K inputs."""
    stored = shaped(need(tensors, "perm", name, 1, *_WORDS, torch.int64), (k,), "perm", name)
    order = stored.to(torch.int64)
    order = order if stored.dtype == torch.int64 else order & 0xFFFF
    if not torch.equal(order.sort().values, torch.arange(k)):
        raise mismatch(name, f"perm is no order of {k} inputs")
    return torch.argsort(order)
