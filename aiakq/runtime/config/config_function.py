"""``hf_overrides`` as a function, as vLLM has it: it is called with the config of transformers, and returns another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from aiakq.arguments.spelling import merged
from aiakq.errors import error, one_line

#: Two older keys whose values transformers moves into ``rope_parameters``.
_ROPE = ("rope_theta", "rope_scaling")


def changes_by(function: Callable[[Any], object], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json ``raw`` that ``function`` changes, with new values; None for those it deletes.

    It gets the configuration class of the model's ``model_type``, or PretrainedConfig if transformers has none. Code of
    the model is not run. Raises ``bad_option`` if it fails, or returns anything but a config.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig  # imported late, because it takes seconds

    kind: Any = raw.get("model_type")
    config_class = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PretrainedConfig
    config = config_class.from_dict(dict(raw))
    before = config.to_dict()
    try:
        result = function(copy.deepcopy(config))
    except Exception as problem:
        raise _bad(function, f"a function that does not fail ({one_line(problem)})") from problem
    if not isinstance(result, PretrainedConfig):
        raise _bad(function, "a function that returns the config")
    changed = _differences(before, result.to_dict())
    if "rope_parameters" in changed:
        changed = {**dict.fromkeys(key for key in _ROPE if key in raw), **changed}
    return {
        key: merged(raw[key], value) if isinstance(value, dict) and isinstance(raw.get(key), dict) else value
        for key, value in changed.items()
    }


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``after`` with other values than in ``before``, objects key by key; None for missing keys."""
    changed: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            if inner := _differences(old, value):
                changed[key] = inner
        elif key not in before or old != value:
            changed[key] = value
    return changed


def _bad(function: Callable[[Any], object], expected: str) -> Exception:
    name = getattr(function, "__name__", type(function).__name__)
    return error("bad_option", option="hf_overrides", value=name, expected=expected, hint="See docs/arguments.md.")
