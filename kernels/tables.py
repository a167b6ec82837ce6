"""Tables of the values that 4-bit codes stand for (scheme lut4a16), by name. Standard library only."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

TABLES: Mapping[str, tuple[float, ...]] = {
    # OCP Microscaling Formats, version 1.0: floats of a sign, two bits of exponent and one of fraction.
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    # Quantiles of the normal distribution (Dettmers et al. 2023, arXiv:2305.14314).
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    # llama.cpp's IQ4_NL and IQ4_XS: integers, denser around 0.
    "iq4_nl": (
        *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
        *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
    ),
    # FP4 of bitsandbytes: a sign and 0, 1/16, 8, 12, 4, 6, 2, 3, divided by 12.
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
}

#: The name of tables that are not in TABLES.
OTHER = "other"


def name_of(values: Sequence[float]) -> str:
    """Return the name of the table with these ``values`` of float32, OTHER if it has none."""
    given = tuple(values)
    return next((name for name, known in TABLES.items() if given == _float32(known)), OTHER)


def _float32(values: Sequence[float]) -> tuple[float, ...]:
    return struct.unpack(f"{len(values)}f", struct.pack(f"{len(values)}f", *values))
