"""Random LoRA adapters of tiny models, made and saved by PEFT, which is also what they are compared with."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from aiakq import LLM
from aiakq.runtime.lora.store import AdapterStore

#: Combinations of the fields that change the function of an adapter.
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16},
    "default rank": {},
    "root of the rank": {"r": 5, "lora_alpha": 7, "use_rslora": True},
    "patterns": {
        "r": 3,
        "lora_alpha": 5,
        "rank_pattern": {"q_proj": 6, "layers.0.mlp.down_proj": 1},
        "alpha_pattern": {r"^model.layers.1.mlp.up_proj": 9, "up_proj": 2, r"layers\.\d+\.self_attn\.(k|v)_proj": 0.5},
    },
    "patterns and root": {
        "r": 2,
        "lora_alpha": 3,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 7},
        "alpha_pattern": {"o_proj": 11},
    },
    "bias of B": {"r": 4, "lora_alpha": 6, "lora_bias": True},
    "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "DoRA and root": {"r": 3, "lora_alpha": 4, "use_dora": True, "use_rslora": True, "rank_pattern": {"k_proj": 1}},
    "some layers": {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "a regex": {"r": 2, "target_modules": r".*\.(gate_proj|v_proj)", "exclude_modules": r".*layers\.0.*"},
}


def adapted(model: Any, seed: int = 0, **fields: Any) -> Any:
    """A PEFT model around ``model`` (which is changed) with random weights in every part of its adapter."""
    from peft import LoraConfig, get_peft_model

    fields = {"target_modules": "all-linear", **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" not in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.1 * noise)
    return wrapped.eval()


def save_adapter(model: Any, path: Path) -> Path:
    """Save the adapter of a PEFT model as PEFT does; returns the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(path))
    return path


def store_of(llm: LLM) -> AdapterStore:
    """Return the adapters in the memory of this process."""
    (store,) = (part for part in llm.engine.executor.runner.parts if isinstance(part, AdapterStore))
    return store
