"""MiMo for transformers, which has no class for it: Qwen2's, under the names that MiMo's files have."""

from __future__ import annotations

from typing import Any


def register_mimo() -> None:
    """Make transformers' Auto classes know ``model_type`` mimo, unless they know it already.

    The layer for multi-token prediction is no part of the class, as in the authors' own ``generate``.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if "mimo" in CONFIG_MAPPING:
        return
    config: Any = type("MiMoConfig", (Qwen2Config,), {"model_type": "mimo", "__module__": __name__})
    members = {"config_class": config, "_keys_to_ignore_on_load_unexpected": [r"mtp_layers\."], "__module__": __name__}
    AutoConfig.register("mimo", config)
    AutoModelForCausalLM.register(config, type("MiMoForCausalLM", (Qwen2ForCausalLM,), members))
