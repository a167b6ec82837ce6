"""InputRounding: how a layer rounds its inputs to small floats or integers."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Schemes whose inputs are rounded before any kernel -> that of the kernel.
WEIGHT_ONLY = {"lut4a8": "lut4a16", "lut4a4": "lut4a16", **{f"w{bits}a8": f"w{bits}a16" for bits in (2, 3, 4, 5, 6)}}


@dataclass(frozen=True)
class InputRounding:
    """How a layer rounds its inputs, and computes the scales of each group; the default also stands for symmetric
    int8 in the kernels of w8a8.

    group          inputs that share a scale, counted from the first; 0: all K of a row.
    powers_of_two  whether scales are rounded up to powers of two.
    bound          the largest max|x| that counts; larger inputs are cut off. Infinity: all count.
    min_scale      the smallest scale; 0: any.
    elements       what inputs divided by their scale are rounded to: e4m3, e2m1, or as compressed-tensors does, int8
                   (symmetric, max|x| / 127.5) or uint8 (with a zero point).
    scales         float32: max|x| / 448. e8m0: powers of two, of the exponent of max|x| (MXFP4, MXFP8). e4m3: these, in
                   units of ``input_scale`` (NVFP4). See ops/block_floats.py.
    reciprocal     whether scales in e4m3 are divided by ``input_scale``, instead of multiplied.
    zero           the zero point of uint8, -128 .. 127, that belongs to ``input_scale``.
    inverse        whether inputs are multiplied by 1 / scale, and rounded before a zero point is added, to int8 and
                   uint8, as torchao does.
    """

    group: int = 0
    powers_of_two: bool = False
    bound: float = math.inf
    min_scale: float = 0.0
    elements: str = "e4m3"
    scales: str = "float32"
    reciprocal: bool = False
    zero: int = 0
    inverse: bool = False

    @property
    def is_separate(self) -> bool:
        """Whether no kernel rounds inputs so: they are rounded before."""
        return self.scales != "float32" or self.elements in ("int8", "uint8")


def kernel_scheme(scheme: str, rounding: InputRounding) -> str:
    """Return the scheme of the kernel that computes a layer: a weight-only one if inputs are rounded before it, and
    that of 8 bits for codes of 7, which are held in 8.
    """
    name = scheme.replace("w7", "w8") if scheme.startswith("w7") else scheme
    if name.endswith("a8") and rounding.is_separate:
        return name.removesuffix("a8") + "a16"
    return WEIGHT_ONLY.get(name, name)
