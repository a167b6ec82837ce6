"""Quantizers: how the numbers of a quantized checkpoint are chosen. One module per method.

A method module offers ``quantize_block(work: BlockWork) -> None`` (see aiakq/quantizers/block.py): it quantizes every
linear of one decoder block, and may first fold scales into the block. Everything around it (loading, calibration,
streaming the output, the report) is the pipeline's. Adding a method is a new module, one line here, and its defaults
in aiakq/quantizers/options.py.
"""

from __future__ import annotations

import importlib
from types import ModuleType

#: method name -> module.
METHODS: dict[str, str] = {
    "weight_only_int8": "aiakq.quantizers.rounders.rtn",
    "smooth_quant": "aiakq.quantizers.transforms.smooth_quant",
    "awq": "aiakq.quantizers.transforms.awq",
    "gptq": "aiakq.quantizers.rounders.gptq",
}


def load(name: str) -> ModuleType:
    """The module of the method ``name``; KeyError for a name that is not in METHODS."""
    return importlib.import_module(METHODS[name])
