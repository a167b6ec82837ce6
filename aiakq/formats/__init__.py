"""Formats: how tensors are named and packed on disk. One module per layout, read -> QWeight, write <- QWeight.

A format module offers

    SUFFIXES                                 the tensor suffixes one quantized linear may own, e.g. ``qweight``
    read(tensors, spec, name) -> QWeight     ``tensors`` maps suffix -> tensor of one linear; ``name`` is for messages
    write(weight, spec, dtype) -> tensors    the same map back; ``dtype`` is that of the unquantized tensors

``read`` raises ``tensor_mismatch`` and ``not_finite``; what it returns satisfies every promise of ``QWeight``.
Adding a format is a new module and one line here.
"""

from __future__ import annotations

import importlib
from types import ModuleType

#: name (``QuantSpec.format``) -> module. The two GPTQ versions differ in one constant and share a module.
FORMATS: dict[str, str] = {
    "gptq": "aiakq.formats.gptq",
    "gptq_v2": "aiakq.formats.gptq",
    "awq": "aiakq.formats.awq",
    "awq_gemv": "aiakq.formats.awq_gemv",
    "compressed-tensors": "aiakq.formats.compressed_tensors",
}


def load(name: str) -> ModuleType:
    """The module of the format ``name``; KeyError for a name that is not in FORMATS."""
    return importlib.import_module(FORMATS[name])
