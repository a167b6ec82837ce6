"""Dispatch of ``quantization_config`` in config.json to the format that reads or writes it.

A *dialect* is a config that covers several layouts, like AutoRound's: a module with ``from_config(config) ->
QuantSpec``, registered under the ``quant_method`` it reads. Every other ``quant_method`` is read by the formats that
list it in QUANT_METHODS (aiakq/formats).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats.config_values import unsupported
from aiakq.formats.model_folder import read_json
from aiakq.registry import Registry
from aiakq.spec import QuantSpec

#: ``quant_method`` -> module.
DIALECTS = Registry(
    "aiakq.config_dialects",
    {"auto-round": "aiakq.formats.auto_round", "intel/auto-round": "aiakq.formats.auto_round"},
)

#: Valid names of methods. The file is untrusted, and the name is displayed.
_METHOD = re.compile(r"[A-Za-z0-9_.+-]{1,64}")

#: Layouts for a single kernel, which nothing else can read -> the message about them.
_KERNEL_LAYOUTS = {
    "marlin": "its weights are repacked for the Marlin kernel; use the checkpoint from before that",
    "bitblas": "its weights are repacked for BitBLAS; use the checkpoint from before that",
    "exl2": "its weights are packed for ExLlamaV2",
    "exl3": "its weights are packed for ExLlamaV3",
    "gptq_p": "its weights are cut into bit planes (gptq_p); export it as gptq or gptq_v2",
}


def write(spec: QuantSpec) -> dict[str, Any]:
    """Return the ``quantization_config`` that transformers and vLLM read for ``spec``.

    Raises ``option_conflict`` for per-layer settings that the format cannot express.
    """
    config: dict[str, Any] = formats.load(spec.format).to_config(spec)
    return config


def read(config: Mapping[str, Any]) -> QuantSpec:
    """Return the spec of a ``quantization_config`` written by any tool. Raises ``format_unsupported``."""
    if not isinstance(config, Mapping):
        raise unsupported("quantization_config is not an object")
    method = str(config.get("quant_method", "")).lower()
    readers = list(_readers(method))
    for reader in readers:
        spec: QuantSpec | None = reader.from_config(config)
        if spec is not None:
            return spec
    if not readers:
        raise unsupported(_KERNEL_LAYOUTS.get(method) or f"quant_method is {method or 'missing'!r:.80}")
    raise _unknown_layout(config, method)


#: Methods without a format here that a model family reads as floats (aiakq/runtime/models/gpt_oss.py).
DEQUANTIZED_AT_LOAD = frozenset({"mxfp4"})


def read_spec(folder: Path, config: Mapping[str, Any]) -> QuantSpec | None:
    """Return how the model in ``folder`` is quantized, or None: from config.json, or a file of older tools beside it.

    Its method is the one that aiakq recorded in config.json, if any: formats record few methods, or none. Raises
    ``format_unsupported`` and ``model_malformed``.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        for format in formats.modules():
            file = getattr(format, "CONFIG_FILE", None)
            if file is not None and (folder / file).is_file():
                quantization = {"quant_method": format.QUANT_METHODS[0], **read_json(folder / file, file)}
                break
    if not quantization or (
        isinstance(quantization, Mapping) and str(quantization.get("quant_method")) in DEQUANTIZED_AT_LOAD
    ):
        return None
    spec, method = read(quantization), _recorded_method(config)
    return spec if method is None else replace(spec, method=method)


def _recorded_method(config: Mapping[str, Any]) -> str | None:
    own = config.get("aiakq")
    method = own.get("method") if isinstance(own, Mapping) else None
    return method if isinstance(method, str) and _METHOD.fullmatch(method) else None


def writer(config: Mapping[str, Any]) -> str | None:
    """Return the program that wrote a ``quantization_config``, if recorded."""
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if quantizer:
        return ", ".join(map(str, quantizer)) if isinstance(quantizer, list) else str(quantizer)
    hooks = (getattr(reader, "writer", None) for reader in _readers(str(config.get("quant_method", "")).lower()))
    return next((name for hook in hooks if hook is not None and (name := hook(config))), None)


def _readers(method: str) -> Iterable[ModuleType]:
    """Return the modules that may read a config with this ``quant_method``."""
    if method in DIALECTS:
        return [DIALECTS.load(method)]
    return [format for format in formats.modules() if method in format.QUANT_METHODS]


def _unknown_layout(config: Mapping[str, Any], method: str) -> AiakqError:
    """Return the error for a config with a known method but an unknown layout."""
    details = [config[key] for key in ("checkpoint_format", "format", "version") if config.get(key) is not None]
    named = ["marlin" if config.get("is_marlin_format") else "", *(str(value).lower() for value in details)]
    known = next((_KERNEL_LAYOUTS[name] for name in named if name in _KERNEL_LAYOUTS), None)
    return unsupported(known or f"quant_method {method} with the layout {' '.join(map(repr, details)):.80}")
