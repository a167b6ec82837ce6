"""InputRounding: how a layer rounds its inputs to small floats."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class InputRounding:
    """How a layer of scheme fp8a8, lut4a8 or lut4a4 rounds its inputs, and computes the scales of each group.

    group          inputs that share a scale, counted from the first; 0: all K of a row.
    powers_of_two  whether scales are rounded up to powers of two.
    bound          the largest max|x| that counts; larger inputs are cut off. Infinity: all count.
    min_scale      the smallest scale; 0: any.
    elements       what inputs divided by their scale are rounded to, e4m3 or e2m1.
    scales         float32: max|x| / 448. e8m0: powers of two, of the exponent of max|x| (MXFP4, MXFP8). e4m3: these, in
                   units of ``input_scale`` (NVFP4). See ops/block_floats.py.
    reciprocal     whether scales in e4m3 are divided by ``input_scale``, instead of multiplied.
    """

    group: int = 0
    powers_of_two: bool = False
    bound: float = math.inf
    min_scale: float = 0.0
    elements: str = "e4m3"
    scales: str = "float32"
    reciprocal: bool = False
