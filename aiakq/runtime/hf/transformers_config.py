"""The config of a model that transformers runs, and keys of config.json that neither its class nor its model reads."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.runtime.config import families, known_keys
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.rope import is_nested
from aiakq.runtime.hf.mimo import register_mimo
from aiakq.runtime.models import FAMILIES


def unsupported(config: EngineConfig, reason: str) -> AiakqError:
    """Return the error for a model that cannot run through transformers."""
    reason = reason.rstrip(".")
    return error("model_unsupported", architecture=config.model.architecture, reason=reason, known=FAMILIES)


def read_transformers_config(config: EngineConfig) -> Any:
    """Return the config as transformers' class, from config.json with aiakq's changes (see hf_config.py).

    Raises ``remote_code``, ``model_unsupported``, ``config_key_unsupported``, and what transformers' class raises.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    register_mimo()
    raw = dict(config.model.raw)
    if "auto_map" in raw:
        if not config.load.trust_remote_code:
            raise error("remote_code", path=config.load.path)
        family: Any = type(AutoConfig.from_pretrained(config.load.path, trust_remote_code=True))
        return family.from_dict(raw)
    if str(raw.get("model_type")) not in CONFIG_MAPPING:
        raise unsupported(config, f"transformers does not know the model type {raw.get('model_type')!r}")
    hf_config = CONFIG_MAPPING[str(raw.get("model_type"))].from_dict(raw)
    if hf_config.model_type not in families.FAMILIES:
        check_leftovers(raw, hf_config)
    return hf_config


def has_class(hf_config: Any) -> bool:
    """Whether transformers, or the code of the model itself, has a causal language model for this config."""
    from transformers import AutoModelForCausalLM

    names = getattr(hf_config, "auto_map", None) or {}
    return type(hf_config) in AutoModelForCausalLM._model_mapping or AutoModelForCausalLM.__name__ in names


def rope_refusal(model: ModelConfig) -> str | None:
    """Return why transformers' rotary embedding cannot be used, because it differs from text to text; else None."""
    for rope in model.rope.values() if is_nested(model.rope) else [model.rope]:
        short = int(rope.get("original_max_position_embeddings") or model.max_position)
        if rope.get("rope_type") == "longrope" and short < model.context:
            reason = "its rotary factors depend on the longest text of a batch (LongRoPE)"
            return f"{reason}; --max-model-len {short} avoids that"
        if rope.get("grows_from") is not None:
            return "transformers computes --rope-scaling of the type dynamic otherwise; yarn is the same everywhere"
    return None


def check_leftovers(raw: Mapping[str, object], hf_config: Any) -> None:
    """Raise ``config_key_unsupported`` for a key of config.json ``raw`` that transformers would drop.

    The class keeps keys that it does not know as attributes, which its model may read nevertheless.
    """
    known = vars(type(hf_config)())
    source = _source_of_model(type(hf_config))
    for key, value in raw.items():
        is_left_over = key in vars(hf_config) and key not in known and key not in hf_config.attribute_map
        if is_left_over and not re.search(rf"\b{re.escape(key)}\b", source):
            known_keys.check_unknown(key, value, hf_config.model_type)


def _source_of_model(config_class: type) -> str:
    """Return the source of the module with the model class of a config class; empty without one."""
    from transformers import AutoModelForCausalLM

    model: object = AutoModelForCausalLM._model_mapping.get(config_class, None)
    module = None if model is None else sys.modules.get(getattr(model, "__module__", ""))
    try:
        return "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        return ""
