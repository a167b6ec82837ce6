"""The linears of GGUF files: ``format`` gguf.

For one linear with N outputs and K inputs:

    weight   [N, bytes of K values] uint8: rows of blocks, of the kind that the config says (blocks.py)
    bias     [N] float, optional

While aiakq quantizes, such a linear is in safetensors, with the same rows:

    weight_blocks   [N, bytes of K values] uint8

Headers of ``weight`` have the shape [N, K], and the kind as dtype. The ``quantization_config`` is aiakq's own, for the
config.json that gguf_model makes of a file's metadata: ``blocks`` is the kind of most modules, ``modules`` names those
of other kinds, ``not_quantized`` those that are floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import need, read_bias
from aiakq.formats.config_values import read_names, read_object, unsupported
from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.decoding import read_weight
from aiakq.formats.gguf.kinds import KINDS, NUMBERS, Kind
from aiakq.formats.headers import Dimensions, Headers, Shapes, matrix
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec, QuantSpec

SUFFIXES = ("weight", "weight_blocks", "bias")
QUANT_METHODS = ("gguf",)
RECORDS_METHOD = False


def config_for(linears: Mapping[str, str], not_quantized: list[str]) -> dict[str, object] | None:
    """Return the ``quantization_config`` of linears, name -> kind; None if there are none."""
    if not linears:
        return None
    commonest = Counter(linears.values()).most_common(1)[0][0]
    others = {name: kind for name, kind in linears.items() if kind != commonest}
    return {"quant_method": "gguf", "blocks": commonest, "modules": others, "not_quantized": not_quantized}


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config that ``config_for`` made. Raises ``format_unsupported``."""
    modules = read_object(config.get("modules"), "modules")
    layers = {name: _layer_spec(kind) for name, kind in modules.items()}
    return QuantSpec(
        method="gguf",
        format="gguf",
        ignore=read_names(config.get("not_quantized"), "not_quantized"),
        layers=tuple(layers.items()),
        **vars(_layer_spec(config.get("blocks"))),
    )


def _layer_spec(kind: object) -> LayerSpec:
    layout = LAYOUTS.get(kind) if isinstance(kind, str) else None
    if layout is None:
        raise unsupported(f"GGUF with blocks of the kind {kind!r:.40}")
    return LayerSpec(layout.bits, layout.group_size, layout.symmetric, table=layout.table, blocks=str(kind))


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a linear of blocks."""
    if matrix(headers, "weight_blocks", "U8") is not None:
        return True
    weight = headers.get("weight")
    return weight is not None and weight.dtype in LAYOUTS and len(weight.shape) == 2


def matches(headers: Headers) -> bool:
    """Whether shapes and dtypes match this layout."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    if "weight_blocks" in headers:
        return {"weight_blocks": (n, kind_of(spec).row_bytes(k))}
    return {"weight": (n, k)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    if "weight_blocks" in headers:
        n, nbytes = headers["weight_blocks"].shape
        kind = kind_of(spec)
        if nbytes % kind.nbytes:
            raise ValueError("rows are no whole blocks")
        layout, k = LAYOUTS[kind.name], nbytes // kind.nbytes * kind.values
        return Dimensions(n, k, layout.bits, k // layout.group_size)
    n, k = headers["weight"].shape
    layout = LAYOUTS[headers["weight"].dtype]
    return Dimensions(n, k, layout.bits, k // layout.group_size)


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors, suffix -> tensor. Raises ``tensor_mismatch`` and ``not_finite``."""
    stored = "weight_blocks" if "weight_blocks" in tensors else "weight"
    rows = need(tensors, stored, name, 2, torch.uint8)
    return read_weight(rows, kind_of(spec), name, read_bias(tensors, len(rows), name))


def kind_of(spec: QuantSpec) -> Kind:
    """Return the kind of blocks of a spec of this format."""
    assert spec.blocks is not None, "a spec of the format gguf names blocks"
    return KINDS[NUMBERS[spec.blocks]]


# --- while quantizing -------------------------------------------------------------------------------------------------


def supports(spec: QuantSpec) -> str | None:
    """Return why linears of ``spec`` are not blocks, or None."""
    for layer in (spec.layer, *(layer for _, layer in spec.layers if layer is not None)):
        if layer.blocks is None:
            return "it holds the blocks of GGUF files, which -quant_type gguf makes"
        if layer != _layer_spec(layer.blocks):
            return f"blocks of {layer.blocks} hold other numbers"
    return None


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear of N x K is not held in blocks, or None."""
    return f"its {k} inputs are no whole blocks of 32" if k % 32 else None


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the scales of blocks; ``dtype`` is that of unquantized tensors."""
    return torch.float16


def spec_of(
    kinds: Mapping[str, str | None], method: str, ignore: Iterable[str], notes: Mapping[str, object]
) -> QuantSpec:
    """Return the spec of linears, name -> kind; None for one that is not quantized, like those to ``ignore``."""
    commonest = Counter(kind for kind in kinds.values() if kind is not None).most_common(1)[0][0]
    others = {name: _layer_spec(kind) for name, kind in kinds.items() if kind not in (None, commonest)}
    floats = tuple(name for name, kind in kinds.items() if kind is None)
    return QuantSpec(
        method=method,
        format="gguf",
        ignore=(*ignore, *floats),
        layers=tuple(others.items()),
        notes=notes,
        **vars(_layer_spec(commonest)),
    )


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Return the ``quantization_config`` of linears in ``weight_blocks``: that of ``config_for``."""
    modules = {name: layer.blocks for name, layer in spec.layers if layer is not None}
    skipped = [name for name, layer in spec.layers if layer is None]
    return {
        "quant_method": "gguf",
        "blocks": spec.blocks,
        "modules": modules,
        "not_quantized": [*spec.ignore, *skipped],
    }


def tensors_of(rows: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Return suffix -> tensor of a linear with rows of blocks [N, bytes of K values] uint8, and its bias [N]."""
    return {"weight_blocks": rows.contiguous()} | ({} if bias is None else {"bias": bias})
