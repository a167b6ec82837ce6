"""SqueezeLLM (Kim et al. 2023, arXiv:2306.07629): codes that index a table of each output, decoded at load.

For one linear with N outputs, K inputs and b bits, 3 or 4:

    qweight            [K*b/32, N] int32, a stream of bits along K, the lowest bits first
    lookup_table       [N, 2**b] float: W = lookup_table[output, code]
    rows, cols, vals   [N + 1] int32, [V] int32, [V] float, optional: a sparse matrix [N, K] (CSR) that is added to W
    startrows          how a kernel divides that matrix among its threads, optional
    bias               [N] float, optional
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats.bit_stream import unpack_stream
from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import first_of, read_integer, read_names, unsupported
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.spec import QuantSpec

_SPARSE = ("rows", "cols", "vals")
_DENSE_ROWS = ("full_rows", "full_row_indices")
SUFFIXES = ("qweight", "lookup_table", *_SPARSE, "startrows", *_DENSE_ROWS, "bias")
QUANT_METHODS = ("squeezellm",)
RECORDS_METHOD = False

_BITS = (3, 4)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_REASON = "SqueezeLLM has a table of values for each output"


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or without codes."""
    return "lookup_table" in headers


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    return {"qweight": (k // 32 * spec.bits, n), "lookup_table": (n, 2**spec.bits)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    words, n = headers["qweight"].shape
    return Dimensions(n, words // spec.bits * 32, spec.bits, 1)


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config. Raises ``format_unsupported``."""
    check_keys(config, {"quant_method", "wbits", "bits", "w_bit"}, "the quantization_config of SqueezeLLM")
    bits = read_integer(first_of(config, "wbits", "bits", "w_bit", default=4), "wbits")
    if bits not in _BITS:
        raise unsupported(f"SqueezeLLM with {bits} bits; read are 3 and 4")
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return QuantSpec(
        method="squeezellm",
        format="squeezellm",
        bits=bits,
        ignore=tuple(f"*{name}*" for name in skipped) or ("lm_head",),
    )


def decoded(headers: Headers, spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear is decoded at load: all are."""
    return _REASON


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers()


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> DecodedWeight:
    """Read one linear from its tensors: values [N, K] float32.

    Raises ``tensor_mismatch``, ``not_finite``, and ``format_unsupported`` for rows of inputs that are kept dense.
    """
    if any(suffix in tensors and tensors[suffix].numel() for suffix in _DENSE_ROWS):
        raise unsupported(f"SqueezeLLM with dense rows beside its codes ({name:.200}.full_rows)")
    words = need(tensors, "qweight", name, 2, torch.int32)
    n = words.shape[1]
    table = shaped(need(tensors, "lookup_table", name, 2, *_FLOATS), (n, 2**spec.bits), "lookup_table", name)
    if words.shape[0] % spec.bits:
        raise mismatch(name, f"qweight has shape {list(words.shape)}, which holds no codes of {spec.bits} bits")
    codes = unpack_stream(words.T, spec.bits).to(torch.int64)
    values = finite(table, "lookup_table", name).to(torch.float32).gather(1, codes)
    if any(suffix in tensors for suffix in _SPARSE):
        _add_sparse(values, tensors, name)
    return DecodedWeight(values, read_bias(tensors, n, name), _REASON)


def _add_sparse(values: Tensor, tensors: Mapping[str, Tensor], name: str) -> None:
    """Add the sparse matrix to ``values`` [N, K]. Raises ``tensor_mismatch`` for one of other sizes."""
    n, k = values.shape
    rows, cols = (_indices(tensors, suffix, name) for suffix in ("rows", "cols"))
    numbers = tensors.get("vals")
    if numbers is None or numbers.dtype not in _FLOATS or rows.shape != (n + 1,) or numbers.shape != cols.shape:
        raise mismatch(name, f"rows, cols and vals are no sparse matrix of {n} x {k}")
    counts = rows.diff()
    if int(rows[0]) or int(rows[-1]) != len(cols) or bool((counts < 0).any()):
        raise mismatch(name, "rows does not rise from 0 to the number of values")
    if len(cols) and not 0 <= int(cols.min()) <= int(cols.max()) < k:
        raise mismatch(name, f"cols names an input outside 0..{k - 1}")
    outputs = torch.arange(n).repeat_interleave(counts)
    values.index_put_((outputs, cols), finite(numbers, "vals", name).to(torch.float32), accumulate=True)


def _indices(tensors: Mapping[str, Tensor], suffix: str, name: str) -> Tensor:
    stored = tensors.get(suffix)
    if stored is None or stored.dim() != 1 or stored.dtype not in (torch.int32, torch.int64):
        raise mismatch(name, f"{suffix} is missing, or no list of integers")
    return stored.to(torch.int64)
