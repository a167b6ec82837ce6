"""AutoRound's ``quantization_config``, whose tensors use another layout: GPTQ's (without g_idx) or AWQ's.

``packing_format`` selects the layout, ``extra_config`` holds per-layer overrides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from aiakq.formats import quantization_config
from aiakq.formats.config_keys import layer_override
from aiakq.formats.config_values import read_flag, read_object, read_word, unsupported
from aiakq.spec import QuantSpec


def from_config(config: Mapping[str, object]) -> QuantSpec:
    """Return the spec of a config, read by the format whose tensors it describes. Raises ``format_unsupported``."""
    spec = quantization_config.read(_translated(config))
    layers = []
    for key, values in read_object(config.get("extra_config"), "extra_config").items():
        plain = re.fullmatch(r"[\w.-]+", key) is not None
        layers.append((key if plain else f"re:.*(?:{key})", layer_override(values, spec.layer)))
    return replace(spec, layers=tuple(layers))


def _translated(config: Mapping[str, object]) -> dict[str, object]:
    """Translate the config to that of the format named by ``packing_format``."""
    packing = read_word(config, "packing_format", "backend", default="auto_round:auto_gptq")
    config = {key: value for key, value in config.items() if key not in ("packing_format", "extra_config")}
    if "awq" in packing:
        asymmetric = not read_flag(config.get("sym"), "sym")
        return {"zero_point": asymmetric, **config, "quant_method": "awq", "version": "gemm"}
    if "gptq" in packing or packing in (
        "auto",
        "auto_round",
        "auto_round:exllamav2",
        "auto_round:triton",
        "auto_round:auto_round",
    ):
        return {**config, "quant_method": "gptq", "checkpoint_format": "gptq"}
    raise unsupported(f"auto-round packing_format {packing!r:.40}")
