"""Dimensions and expected tensor shapes of a packed linear layer, from tensor headers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiakq.formats.safetensors_file import TensorInfo
from aiakq.spec import QuantSpec

#: The suffix of a bias in every format: quantization tools do not pack it, so its name and shape [N] are unchanged.
BIAS = "bias"
#: The suffix of a weight that is not quantized.
WEIGHT = "weight"
#: suffix -> header of the tensors of one linear.
Headers = Mapping[str, TensorInfo]
#: suffix -> shape.
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of one packed linear: N outputs, K inputs, bits per code and groups along K.

    has_perm      whether the file stores an order of the inputs (act-order).
    static_input  whether the file stores a scale for the activations.
    """

    n: int
    k: int
    bits: int
    groups: int
    has_perm: bool = False
    static_input: bool = False


def matrix(headers: Headers, suffix: str, *dtypes: str) -> TensorInfo | None:
    """Return the header of ``suffix`` if it exists with two dimensions and one of ``dtypes`` (any if none given)."""
    info = headers.get(suffix)
    if info is None or len(info.shape) != 2 or (dtypes and info.dtype not in dtypes):
        return None
    return info


def present(headers: Headers, **shapes: tuple[int, ...]) -> Shapes:
    """Return those of ``shapes`` whose optional tensor is present."""
    return {suffix: shape for suffix, shape in shapes.items() if suffix in headers}


def expected_groups(spec: QuantSpec, k: int) -> int:
    """Return the number of groups along K inputs according to the config."""
    return 1 if spec.group_size == -1 else -(-k // spec.group_size)


def stored_size(
    headers: Headers, suffixes: Sequence[str], dim: int, expected: int, possible: Callable[[int], bool]
) -> int:
    """Return the size of the tensors ``suffixes`` along ``dim``.

    ``expected`` if one of them has it, else the first size that is ``possible``, else ``expected``.
    """
    sizes = [headers[suffix].shape[dim] for suffix in suffixes if matrix(headers, suffix) is not None]
    if expected in sizes:
        return expected
    return next((size for size in sizes if size > 0 and possible(size)), expected)
