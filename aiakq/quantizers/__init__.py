"""Quantizers: methods that choose the codes, scales and zero points of a quantized checkpoint.

A recipe (recipe.py) is a list of transforms, which prepare a block, and one rounder, which converts its weights to
integer codes. A method is a named recipe with defaults. The pipeline does the rest: loading, calibration, streaming the
output and the report. Installed packages extend the three registries through entry points (docs/adding.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.registry import Registry

if TYPE_CHECKING:
    from aiakq.quantizers.recipe import Method, Rounder, Transform

#: name -> a ``recipe.Method``.
METHODS: Registry[Method] = Registry(
    "aiakq.methods",
    {
        "weight_only_int8": "aiakq.quantizers.methods:WEIGHT_ONLY_INT8",
        "smooth_quant": "aiakq.quantizers.methods:SMOOTH_QUANT",
        "awq": "aiakq.quantizers.methods:AWQ",
        "gptq": "aiakq.quantizers.methods:GPTQ",
        "fp8": "aiakq.quantizers.methods:FP8",
        "mxfp4": "aiakq.quantizers.methods:MXFP4",
        "nvfp4": "aiakq.quantizers.methods:NVFP4",
        "gguf": "aiakq.quantizers.methods:GGUF",
    },
)

#: name -> a subclass of ``recipe.Transform``.
TRANSFORMS: Registry[type[Transform]] = Registry(
    "aiakq.transforms",
    {
        "smooth_quant": "aiakq.quantizers.transforms.smooth_quant:SmoothQuant",
        "awq": "aiakq.quantizers.transforms.awq:Awq",
        "input_scales": "aiakq.quantizers.transforms.input_scales:InputScales",
    },
)

#: name -> a subclass of ``recipe.Rounder``.
ROUNDERS: Registry[type[Rounder]] = Registry(
    "aiakq.rounders",
    {
        "rtn": "aiakq.quantizers.rounders.rtn:Rtn",
        "gptq": "aiakq.quantizers.rounders.gptq:Gptq",
        "gptaq": "aiakq.quantizers.rounders.gptq:Gptaq",
        "gptq_blocks": "aiakq.quantizers.rounders.blocks:GptqBlocks",
        "nearest_blocks": "aiakq.quantizers.rounders.blocks:NearestBlocks",
    },
)
