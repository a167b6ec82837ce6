"""Formats: how tensors are named and packed on disk. One module per layout, read -> QWeight, write <- QWeight.

A format module offers

    SUFFIXES                                 the tensor suffixes one quantized linear may own, e.g. ``qweight``
    read(tensors, spec, name) -> QWeight     ``tensors`` maps suffix -> tensor of one linear; ``name`` is for messages
    write(weight, spec, dtype) -> tensors    the same map back; ``dtype`` is that of the unquantized tensors

``read`` raises ``tensor_mismatch`` and ``not_finite``; what it returns satisfies every promise of ``QWeight``.
Adding a format is a new module and one line here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

#: name (``QuantSpec.format``) -> module. The two GPTQ versions differ in one constant and share a module.
FORMATS: dict[str, str] = {
    "gptq": "aiakq.formats.gptq",
    "gptq_v2": "aiakq.formats.gptq",
    "awq": "aiakq.formats.awq",
    "awq_gemv": "aiakq.formats.awq_gemv",
    "awq_gemv_fast": "aiakq.formats.awq_gemv_fast",
    "compressed-tensors": "aiakq.formats.compressed_tensors",
}


def load(name: str) -> ModuleType:
    """The module of the format ``name``; KeyError for a name that is not in FORMATS."""
    return importlib.import_module(FORMATS[name])


@functools.cache
def all_suffixes() -> tuple[str, ...]:
    """The tensor suffixes of every format, each once."""
    return tuple(sorted({suffix for name in FORMATS for suffix in load(name).SUFFIXES}))


#: How the shapes of qweight and scales go together in each layout that calls its codes ``qweight``.
_FITS: dict[str, Callable[[Sequence[int], Sequence[int]], bool]] = {
    "gptq": lambda codes, scales: codes[1] == scales[1],
    "awq": lambda codes, scales: codes[1] * 8 == scales[1],
    "awq_gemv": lambda codes, scales: codes[0] == scales[0],
    "awq_gemv_fast": lambda codes, scales: codes[0] * 4 == scales[1],
}


def layout_of(shapes: Mapping[str, Sequence[int]], half_words: bool, label: str) -> str:
    """The format of one linear by its tensors, ``label`` (what the config says) where they do not contradict it.

    shapes      of the tensors, by suffix.
    half_words  whether the codes are 16-bit words.
    Some tools write one method's name over another's layout; the shapes cannot lie.
    """
    if "weight_packed" in shapes or "weight_scale" in shapes:
        return "compressed-tensors"
    codes, scales = shapes.get("qweight", ()), shapes.get("scales", ())
    if len(codes) != 2 or len(scales) != 2:
        return label
    if half_words:
        return "awq_gemv_fast"
    own = "gptq" if label == "gptq_v2" else label
    if own in _FITS and own != "awq_gemv_fast" and _FITS[own](codes, scales):
        return label
    fitting = [name for name in ("gptq", "awq", "awq_gemv") if _FITS[name](codes, scales)]
    return fitting[0] if len(fitting) == 1 else label
