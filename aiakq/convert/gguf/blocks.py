"""Rows of blocks for a weight: its own numbers where blocks can hold them, else rounded if that is allowed."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from aiakq.convert.exact import Abilities, Inexact, expressed
from aiakq.errors import AiakqError, error
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.decoding import PLAIN
from aiakq.formats.gguf.encoding import encode, exact_blocks, nearest_offsets
from aiakq.kernels.types import InputRounding, QWeight
from aiakq.spec import LayerSpec

#: Bits and symmetry -> kind of blocks of 32 with a float16 scale.
_KINDS = {(4, True): "Q4_0", (4, False): "Q4_1", (5, True): "Q5_0", (5, False): "Q5_1", (8, True): "Q8_0"}
#: Widths that a kind holds, from the narrowest on.
_WIDTHS = {True: (4, 5, 8), False: (4, 5)}
NO_ROUNDING = "activations are no longer rounded"


def own_kind(layer: LayerSpec, k: int) -> str:
    """Return the kind of blocks that holds the codes of a linear with K inputs, judging by its header; F16 if none."""
    if layer.blocks is not None:
        return layer.blocks
    if layer.table is None and layer.float8 is None:
        for bits in _WIDTHS[layer.symmetric]:
            if layer.bits <= bits and k % 32 == 0:
                return _KINDS[bits, layer.symmetric]
    return "Q8_0" if k % 32 == 0 else "F16"


def rows_of_blocks(weight: QWeight | DecodedWeight, kind: str, name: str, lossy: bool) -> tuple[Tensor, str]:
    """Return a quantized linear as rows of blocks [N, bytes of a row] and what was done to it; empty if its numbers
    are the same.

    Raises ``conversion_inexact`` unless ``lossy`` or ``kind`` is one of floats, and ``not_finite``.
    """
    change = ""
    if isinstance(weight, QWeight) and not weight.scheme.endswith("a16"):
        change = NO_ROUNDING
        if not lossy and kind not in PLAIN:
            raise _inexact(name, kind, "its activations are rounded")
        bits = "lut4" if weight.table is not None else "fp8" if weight.code_type is not None else f"w{weight.bits}"
        weight = replace(weight, scheme=f"{bits}a16", input_scale=None, rounding=InputRounding())
    if kind in PLAIN:
        return encode(as_floats(weight), kind, name), change
    reason = weight.reason if isinstance(weight, DecodedWeight) else ""
    if isinstance(weight, QWeight):
        try:
            return _exact(weight, kind), change
        except Inexact as problem:
            reason = str(problem)
    if not lossy:
        raise _inexact(name, kind, reason)
    if isinstance(weight, QWeight) and (near := _near(weight, kind)) is not None:
        return near, "; ".join(filter(None, (change, "scales were rounded")))
    return encode(as_floats(weight), kind, name), "; ".join(filter(None, (change, "weights were rounded again")))


def _expressed(weight: QWeight, kind: str) -> QWeight:
    """Return a weight in the codes of ``kind``. Raises ``Inexact``."""
    layout = LAYOUTS[kind]
    if weight.k % 32:
        raise Inexact(f"its {weight.k} inputs are no whole blocks of 32")
    if kind not in _KINDS.values():
        raise Inexact(f"codes of {kind} are chosen when weights are rounded")
    symmetric = layout.symmetric
    if _has_minima(weight) and not symmetric and weight.bits == layout.bits and not _is_moved(weight):
        return weight
    if symmetric and weight.zeros is not None:
        weight = _without_zeros(weight)
    return expressed(weight, LayerSpec(layout.bits, 32, symmetric), Abilities())


def _has_minima(weight: QWeight) -> bool:
    """Whether groups have offsets, or zero points that are floats."""
    zeros = weight.zeros
    return weight.offsets is not None or (zeros is not None and zeros.is_floating_point())


def _is_moved(weight: QWeight) -> bool:
    """Whether inputs are changed or have another order, or groups are no whole blocks of 32."""
    changed = weight.rotated or weight.factors is not None
    return weight.perm is not None or changed or bool(weight.group_size % 32)


def _without_zeros(weight: QWeight) -> QWeight:
    """Return the weight without zero points if they are all half of the range."""
    zeros = weight.zeros
    assert zeros is not None
    return replace(weight, zeros=None) if bool((zeros.float() == 2 ** (weight.bits - 1)).all()) else weight


def _exact(weight: QWeight, kind: str) -> Tensor:
    found = exact_blocks(_expressed(weight, kind))
    if found is None or found[0] != kind:
        what = "scales" if LAYOUTS[kind].symmetric else "scales or minima"
        raise Inexact(f"not all of its {what} are float16 numbers for each 32 inputs")
    return found[1]


def _near(weight: QWeight, kind: str) -> Tensor | None:
    """Return blocks with the codes of ``weight`` and scales rounded to float16, or None if they do not fit."""
    try:
        return nearest_offsets(_expressed(weight, kind), kind)
    except Inexact:
        return None


def _inexact(name: str, kind: str, reason: str) -> AiakqError:
    hint = "Write floats (--gguf-type bf16), or allow rounding with --lossy, which reports the error of every layer."
    return error("conversion_inexact", layer=name, to=kind, reason=reason, hint=hint)
