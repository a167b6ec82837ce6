"""Dispatch of ``quantization_config`` in config.json to the format that reads or writes it.

A *dialect* is a config that covers several layouts, like AutoRound's: a module with ``from_config(config) ->
QuantSpec``, registered under the ``quant_method`` it reads. Every other ``quant_method`` is read by the formats that
list it in QUANT_METHODS (aiakq/formats).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import unread_formats
from aiakq.formats.config_keys import APPLIED, check_keys
from aiakq.formats.config_values import merged, read_flag, read_word, unsupported
from aiakq.formats.model_folder import read_json
from aiakq.registry import Registry
from aiakq.spec import QuantSpec

#: ``quant_method`` -> module.
DIALECTS: Registry[formats.Dialect] = Registry(
    "aiakq.config_dialects",
    {"auto-round": "aiakq.formats.auto_round", "quark": "aiakq.formats.quark"},
)

#: Valid names of methods. The file is untrusted, and the name is displayed.
_METHOD = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
#: Config files of ModelOpt and AutoRound.
_MODELOPT_FILE = "hf_quant_config.json"
_AUTO_ROUND_FILE = "quantization_config.json"

#: Other names of the same files, among them vLLM's names of kernels -> the name that the readers list.
_ALIASES = {
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "autogptq": "gptq",
    "gptqmodel": "gptq",
    "gptq_v2": "gptq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "autoawq": "awq",
    "auto_round": "auto-round",
    "autoround": "auto-round",
    "intel/auto_round": "auto-round",
    "inc": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "sparseml": "compressed-tensors",
    "gpt_oss_mxfp4": "mxfp4",
}
#: Keys of configs without a ``quant_method`` -> the one that they imply: early compressed-tensors, llm-awq, AutoGPTQ.
_IMPLIED = {
    "config_groups": "compressed-tensors",
    "q_group_size": "awq",
    "w_bit": "awq",
    "zero_point": "awq",
    "desc_act": "gptq",
    "sym": "gptq",
    **unread_formats.KEYS,
}
#: Keys of config.json that hold a quantization_config; the second is that of early releases of compressed-tensors.
CONFIG_KEYS = ("quantization_config", "compression_config")
#: The key under which MLX holds the same.
MLX_KEY = "quantization"


def write(spec: QuantSpec) -> dict[str, Any]:
    """Return the ``quantization_config`` that transformers and vLLM read for ``spec``.

    Raises ``option_conflict`` for per-layer settings that the format cannot express, and ``format_unsupported`` for one
    that is only read.
    """
    module = formats.load(spec.format)
    if not hasattr(module, "to_config"):
        raise unsupported(f"{spec.format}, which is read and not written")
    config: dict[str, object] = module.to_config(spec)
    return config


def method_of(config: Mapping[str, object]) -> str:
    """Return the ``quant_method`` of a config as the readers spell it, or which its keys imply; "" if none is known."""
    method = str(config.get("quant_method") or "").strip().lower()
    if not method:
        return next((implied for key, implied in _IMPLIED.items() if config.get(key) is not None), "")
    return _ALIASES.get(method.replace("-", "_"), method)


def _layout_in_method(config: Mapping[str, object]) -> dict[str, str]:
    """Return the checkpoint_format that the method's name states. Raises ``format_unsupported`` for another one."""
    if read_word(config, "quant_method", default="").replace("-", "_") != "gptq_v2":
        return {}
    layout = read_word(config, "checkpoint_format", "format", default="gptq_v2")
    if layout != "gptq_v2":
        raise unsupported(f"quant_method gptq_v2 with checkpoint_format {layout!r:.64}")
    return {"checkpoint_format": layout}


def read(config: Mapping[str, Any]) -> QuantSpec:
    """Return the spec of a ``quantization_config`` written by any tool. Raises ``format_unsupported``."""
    if not isinstance(config, Mapping):
        raise unsupported("quantization_config is not an object")
    method = method_of(config)
    config = {**config, **_layout_in_method(config), "quant_method": method}
    readers = list(_readers(method))
    for reader in readers:
        spec: QuantSpec | None = reader.from_config(config)
        if spec is not None:
            if method in APPLIED:
                check_keys(config, APPLIED[method], "quantization_config")
            return spec
    if not readers:
        named = unread_formats.METHODS.get(method)
        described = f"{named} (quant_method {method})" if named else f"quant_method is {method or 'missing'!r:.80}"
        raise unsupported(described)
    raise _unknown_layout(config, method)


#: Methods of fused tensors that a model family reads itself (aiakq/formats/mxfp4.py) -> that family.
_READ_BY_FAMILY = {"mxfp4": "GptOssForCausalLM"}


def stored_config(config: Mapping[str, object]) -> Any:
    """Return the quantization_config of a config.json, from wherever programs write it; None if there is none."""
    return _of_mlx(config, next((quantization for _, quantization in _stored_configs(config)), None))


def _stored_configs(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the keys under which a config.json holds a quantization_config, and these configs."""
    for outer in ("", "text_config", "llm_config"):
        part = config.get(outer) if outer else config
        if not isinstance(part, Mapping):
            continue
        for key in CONFIG_KEYS:
            if part.get(key):
                yield f"{outer}.{key}".removeprefix("."), _unnested(part[key])


def _of_mlx(config: Mapping[str, object], quantization: object) -> object:
    """Return a config under its method if it is MLX's, which is called ``quantization`` too; else ``quantization``."""
    own = config.get(MLX_KEY)
    if not isinstance(own, Mapping) or not own:
        return quantization
    if quantization is not None and quantization != own:
        raise unsupported(f"{MLX_KEY} and quantization_config that do not say the same")
    return {"quant_method": "mlx", **own}


def _unnested(quantization: Any) -> object:
    """Return a config without the one around it: transformers once wrote it inside itself."""
    inner = quantization.get("quantization_config") if isinstance(quantization, Mapping) else None
    if not isinstance(inner, Mapping):
        return quantization
    outer = {key: value for key, value in quantization.items() if key != "quantization_config"}
    return merged(outer, inner, "quantization_config")


def read_spec(folder: Path, config: Mapping[str, object]) -> QuantSpec | None:
    """Return how the model in ``folder`` is quantized, or None: from config.json, or a file of older tools beside it.

    Its method is the one that aiakq recorded in config.json, if any: formats record few methods, or none. Raises
    ``format_unsupported`` and ``model_malformed``.
    """
    quantization = stored_config(config)
    if quantization is None:
        quantization = _config_file(folder)
    if not quantization:
        return None
    if isinstance(quantization, Mapping):
        method = method_of(quantization)
        if method in _READ_BY_FAMILY and _READ_BY_FAMILY[method] in _families(config):
            check_keys(quantization, APPLIED[method], "quantization_config")
            return None
    spec, recorded = read(quantization), _recorded_method(config)
    _check_others(folder, config, quantization, spec)
    return spec if recorded is None else replace(spec, method=recorded)


def container_of(folder: Path, config: Mapping[str, object]) -> str:
    """Return the ``quant_method`` of the model in ``folder`` as ``method_of`` spells it; empty if it has none.

    ``config`` is its config.json. Raises ``format_unsupported`` and ``model_malformed``.
    """
    quantization = stored_config(config) or _config_file(folder)
    return method_of(quantization) if isinstance(quantization, Mapping) else ""


def _check_others(
    folder: Path, config: Mapping[str, object], quantization: Mapping[str, object], spec: QuantSpec
) -> None:
    """Raise ``format_unsupported`` if another part of config.json, or a file beside it, which some programs read first,
    says that the same tensors are computed in another way. ``quantization`` is what ``spec`` was read from.
    """
    method = method_of(quantization)
    for key, other in _stored_configs(config):
        if isinstance(other, Mapping) and other != quantization:
            _compare(key, read(other), "other parts of config.json", spec)
    for file, own in _own_files(folder):
        if file != _MODELOPT_FILE and method_of(own) not in (method, spec.format.removesuffix("_v2")):
            continue
        if not own.keys() - {"quant_method"}:
            continue
        if file == _MODELOPT_FILE and method.startswith("modelopt"):
            # Only config.json has groups, which say more about activations.
            own = {"config_groups": quantization.get("config_groups"), **own}
        _compare(file, read(own), "config.json", spec, file != _MODELOPT_FILE)


def _compare(where: str, own: QuantSpec, other: str, spec: QuantSpec, layouts: bool = True) -> None:
    """Raise ``format_unsupported`` if two configs differ in how tensors are computed, and ``layouts``, in their format.

    Widths and groups of GPTQ are those of the tensors, whatever the files say.
    """
    is_gptq = spec.format in ("gptq", "gptq_v2")
    mine, named = dict(spec.layers), dict(own.layers)
    compared = {
        "checkpoint_format": own.format == spec.format or not layouts,
        "rotation": own.rotated == spec.rotated,
        "sym": own.symmetric == spec.symmetric,
        "quantization": is_gptq or own.layer == spec.layer,
        "layer": is_gptq or all(mine[name] == named[name] for name in mine.keys() & named.keys()),
    }
    for name, is_same in compared.items():
        if not is_same:
            kinds = f"{own.describe()} and {spec.describe()}"
            raise unsupported(f"a {name} in {where} that is not that of {other} ({kinds}); make both say the same")


def _families(config: Mapping[str, object]) -> set[str]:
    """Return the names by which a config.json says what kind of model it is."""
    architectures = config.get("architectures")
    return {str(config.get("model_type")), *map(str, architectures if isinstance(architectures, list) else ())}


def _config_file(folder: Path) -> Mapping[str, object] | None:
    """Return the config that is stored in a file of its own, or None."""
    return next((config for _, config in _own_files(folder)), None)


def _own_files(folder: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the files beside config.json that hold a config, and these configs."""
    files = {
        file: format.QUANT_METHODS[0] for format in formats.modules() if (file := getattr(format, "CONFIG_FILE", ""))
    }
    for file, method in {**files, _MODELOPT_FILE: "modelopt", _AUTO_ROUND_FILE: "auto-round"}.items():
        if (folder / file).is_file():
            yield file, {"quant_method": method, **read_json(folder / file, file)}


def _recorded_method(config: Mapping[str, object]) -> str | None:
    own = config.get("aiakq")
    method = own.get("method") if isinstance(own, Mapping) else None
    return method if isinstance(method, str) and _METHOD.fullmatch(method) else None


def writer(config: Mapping[str, object]) -> str | None:
    """Return the program that wrote a ``quantization_config``, if recorded."""
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if quantizer:
        return ", ".join(map(str, quantizer)) if isinstance(quantizer, list) else str(quantizer)
    hooks = (getattr(reader, "writer", None) for reader in _readers(method_of(config)))
    return next((name for hook in hooks if hook is not None and (name := hook(config))), None)


def _readers(method: str) -> Iterable[formats.Dialect]:
    """Return the modules that may read a config with this ``quant_method``."""
    if method in DIALECTS:
        return [DIALECTS.load(method)]
    return [format for format in formats.modules() if method in format.QUANT_METHODS]


def _unknown_layout(config: Mapping[str, object], method: str) -> AiakqError:
    """Return the error for a config with a known method but an unknown layout."""
    details = [config[key] for key in ("checkpoint_format", "format", "version") if config.get(key) is not None]
    named = [
        "marlin" if read_flag(config.get("is_marlin_format"), "is_marlin_format") else "",
        *(str(value).lower() for value in details),
    ]
    known = next((unread_formats.METHODS[name] for name in named if name in unread_formats.METHODS), None)
    return unsupported(known or f"quant_method {method} with the layout {' '.join(map(repr, details)):.80}")
