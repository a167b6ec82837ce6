"""Keys of config.json that neither transformers' config class nor its model read."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from aiakq.runtime.config.known_keys import check_unknown


def check_leftovers(raw: Mapping[str, Any], hf_config: Any) -> None:
    """Raise ``config_key_unsupported`` for a key of config.json ``raw`` that transformers would drop.

    The class keeps keys that it does not know as attributes, which its model may read nevertheless.
    """
    known = vars(type(hf_config)())
    source = _source_of_model(type(hf_config))
    for key, value in raw.items():
        is_left_over = key in vars(hf_config) and key not in known and key not in hf_config.attribute_map
        if is_left_over and not re.search(rf"\b{re.escape(key)}\b", source):
            check_unknown(key, value, hf_config.model_type)


def _source_of_model(config_class: type) -> str:
    """Return the source of the module with the model class of a config class; empty without one."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM._model_mapping.get(config_class, None)
    module = None if model is None else sys.modules.get(getattr(model, "__module__", ""))
    try:
        return "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        return ""
