"""Kinds: how a tensor of a GGUF file stores its values, by the numbers and names of ggml.

A row of K values is a sequence of blocks, each with the same number of values in the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """How values are stored: ``values`` of them in each block of ``nbytes`` bytes."""

    name: str
    values: int
    nbytes: int

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of K values, a multiple of ``values``."""
        return k // self.values * self.nbytes


#: ggml's number -> kind. Numbers that are missing belong to kinds that were removed from the format.
KINDS: Mapping[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    9: Kind("Q8_1", 32, 36),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
    41: Kind("Q1_0", 128, 18),
    42: Kind("Q2_0", 64, 18),
}
#: Name -> ggml's number.
NUMBERS: Mapping[str, int] = {kind.name: number for number, kind in KINDS.items()}
#: Kinds that once were in files, laid out for certain processors.
REMOVED: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
