"""Quantization methods: named recipes with their defaults. Standard library only."""

from __future__ import annotations

from aiakq.quantizers.recipe import Component, Method
from aiakq.spec import Float8

WEIGHT_ONLY_INT8 = Method(
    summary="Every weight was rounded to the nearest of 256 levels, with one scale per output row.",
    rounder=Component("rtn").with_parameters(scale_search="near"),
    bits=(8,),
)

SMOOTH_QUANT = Method(
    summary="Outliers were moved from activations into weights (SmoothQuant, arXiv:2211.10438), so that both "
    "can be 8-bit integers.",
    transforms=(Component("smooth_quant"),),
    rounder=Component("rtn"),
    bits=(8,),
    symmetric=(True,),
    activation_bits=8,
)

AWQ = Method(
    summary="Inputs that matter were protected by scaling them up before rounding (AWQ, arXiv:2306.00978).",
    transforms=(Component("awq"),),
    rounder=Component("rtn"),
    bits=(4, 8),
    group_size=128,
    symmetric=(False, True),
    format="awq",
)

GPTQ = Method(
    summary="Columns were rounded one after another, the rest making up for the error (GPTQ, arXiv:2210.17323).",
    rounder=Component("gptq"),
    bits=(4, 8, 3, 2),
    group_size=128,
    format="gptq",
)

FP8 = Method(
    summary="Weights are 8-bit floats (e4m3).",
    rounder=Component("rtn"),
    bits=(8,),
    symmetric=(True,),
    activation_bits=8,
    activation_choices=(8, 16),
    float8=Float8(),
)

MXFP4 = Method(
    summary="Weights are 4-bit floats (e2m1), with a power of two for every 32 of them (OCP Microscaling).",
    rounder=Component("rtn"),
    bits=(4,),
    group_size=32,
    symmetric=(True,),
    activation_choices=(16, 4),
    table="e2m1",
    scale_type="e8m0",
)

NVFP4 = Method(
    summary="Weights are 4-bit floats (e2m1), with an 8-bit float for every 16 of them and a number for all.",
    rounder=Component("rtn").with_parameters(scale_search="mse"),
    bits=(4,),
    group_size=16,
    symmetric=(True,),
    activation_choices=(16, 4),
    table="e2m1",
    scale_type="e4m3",
)

GGUF = Method(
    summary="Weights are blocks of a GGUF file, rounded one after another (GPTQ, arXiv:2210.17323).",
    rounder=Component("gptq_blocks"),
    bits=(4,),
    group_size=32,
    symmetric=(False,),
    format="gguf",
    blocks="Q4_K",
)
