"""DeviceConfig: device and dtypes, with ``auto`` resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error
from aiakq.kernels.cpu import library

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
    "fp32": torch.float32,
}
_DTYPE_NAMES: dict[torch.dtype, Literal["float16", "bfloat16", "float32"]] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}
#: Dtypes of keys and values in the KV cache.
KV_DTYPES = DTYPES | {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class DeviceConfig:
    """The device and dtype that the model runs with.

    dtype         dtype of activations and of weights that are not quantized.
    dtype_reason  why ``auto`` selected it, for the start-up table.
    """

    device: torch.device
    dtype: torch.dtype
    dtype_reason: str

    @property
    def dtype_name(self) -> Literal["float16", "bfloat16", "float32"]:
        """The dtype as a value of --dtype."""
        return _DTYPE_NAMES[self.dtype]

    @staticmethod
    def from_args(args: EngineArguments, raw: Mapping[str, object]) -> DeviceConfig:
        """Create it from --device and --dtype; ``raw`` is config.json. Raises ``device``."""
        device = pick_device(args.device)
        return DeviceConfig(device, *pick_dtype(args.dtype, raw, device))


def pick_device(name: str) -> torch.device:
    """Return the device that the option names. Raises ``device``."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise error(
            "device",
            device="cuda",
            reason="torch finds no NVIDIA GPU",
            hint="Use --device cpu, or install a CUDA torch.",
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _cpu_has_bf16() -> bool:
    """Whether this processor multiplies bf16 natively (AVX-512 BF16 or AMX)."""
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def pick_dtype(name: str, raw: Mapping[str, object], device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of activations, and the reason for it; ``raw`` is config.json."""
    if name != "auto":
        return DTYPES[name], "set by --dtype"
    stored = DTYPES.get(
        str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."), torch.float32
    )
    if device.type == "cuda":
        if stored == torch.float32:
            return torch.float16, "the checkpoint is float32; 16 bits are twice as fast on a GPU"
        return stored, "the checkpoint's own"
    if library.unavailable() is None:
        return torch.float32, "the native kernels compute in float32; weights stay as they are stored"
    if _cpu_has_bf16() and stored != torch.float32:
        return torch.bfloat16, "this processor multiplies bf16 natively"
    return torch.float32, "fastest and most exact on this processor, which has no bf16 arithmetic"


def pick_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of keys and values. Raises ``bad_option`` if the GPU does not support it."""
    if name.startswith("fp8") and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise error(
            "bad_option",
            option="--kv-cache-dtype",
            value=name,
            expected="supported by this GPU",
            hint="GPUs before compute capability 8.9 have no 8-bit floats; int8 takes the same memory.",
        )
    return KV_DTYPES.get(name, dtype)
