"""Memory of GPUs by name, for ``aiakq inspect --fit``: what their makers state, in units of 10**9 bytes.

Drivers report a little more or less; aiakq computes with the stated number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiakq.errors import error


@dataclass(frozen=True)
class Machine:
    """A device: its name, bytes of memory, and where the number is from."""

    name: str
    nbytes: int
    source: str


#: Name -> (gigabytes, source). Names are compared without case, spaces, hyphens and the words NVIDIA and GeForce.
_GPUS: dict[str, tuple[float, str]] = {
    "T4": (16, "NVIDIA T4 data sheet"),
    "L4": (24, "NVIDIA L4 data sheet"),
    "L40": (48, "NVIDIA L40 data sheet"),
    "L40S": (48, "NVIDIA L40S data sheet"),
    "A10": (24, "NVIDIA A10 data sheet"),
    "A16-16": (16, "NVIDIA A16 data sheet, each of 4 GPUs"),
    "A30": (24, "NVIDIA A30 data sheet"),
    "A40": (48, "NVIDIA A40 data sheet"),
    "A100": (80, "NVIDIA A100 data sheet, 80GB"),
    "A100-40": (40, "NVIDIA A100 data sheet, 40GB PCIe"),
    "A100-80": (80, "NVIDIA A100 data sheet, 80GB"),
    "H100": (80, "NVIDIA H100 data sheet, SXM"),
    "H100-NVL": (94, "NVIDIA H100 data sheet, NVL"),
    "H200": (141, "NVIDIA H200 data sheet"),
    "V100-16": (16, "NVIDIA V100 data sheet, 16GB"),
    "V100-32": (32, "NVIDIA V100 data sheet, 32GB"),
    "RTX 3060": (12, "NVIDIA GeForce RTX 3060 specifications, 12GB"),
    "RTX 3090": (24, "NVIDIA GeForce RTX 3090 specifications"),
    "RTX 4060": (8, "NVIDIA GeForce RTX 4060 specifications"),
    "RTX 4070": (12, "NVIDIA GeForce RTX 4070 specifications"),
    "RTX 4080": (16, "NVIDIA GeForce RTX 4080 specifications"),
    "RTX 4090": (24, "NVIDIA GeForce RTX 4090 specifications"),
    "RTX 5090": (32, "NVIDIA GeForce RTX 5090 specifications"),
    "RTX A6000": (48, "NVIDIA RTX A6000 data sheet"),
}
#: The letter alone is a power of ten, the smaller of the two meanings that people give it.
_UNITS = {"m": 10**6, "g": 10**9, "t": 10**12, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"mib": 2**20, "gib": 2**30, "tib": 2**40}


def machine(word: str, here: int) -> Machine:
    """Return what a user calls ``word``: a size like 24GiB, ``here``, or a GPU. Raises ``bad_option``.

    here  free bytes of the device on this machine.
    """
    if word.strip().lower() == "here":
        return Machine("here", here, "free memory of this machine, measured now")
    size = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}) ?([mgt](?:i?b)?)", word.strip().lower())
    if size is not None and float(size[1]) > 0:
        return Machine(word.strip(), int(float(size[1]) * _UNITS[size[2]]), "as given")
    names = {_key(name): name for name in _GPUS}
    name = names.get(_key(word))
    if name is None:
        known = ", ".join(_GPUS)
        expected = f"a size (8GB, 24GiB), here, or one of {known}"
        raise error("bad_option", option="--fit", value=word, expected=expected, hint="")
    gigabytes, source = _GPUS[name]
    return Machine(name, int(gigabytes * 10**9), f"{source}: {gigabytes:g} GB")


def _key(name: str) -> str:
    plain = re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())
    return re.sub(r"^(\w+?)(16|32|40|80)gb?$", r"\1\2", plain)
