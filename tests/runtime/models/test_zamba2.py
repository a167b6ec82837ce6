"""Zamba and Zamba 2: weights that layers share, what is refused by name, and rounding at load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops import Ops
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.shared_block import SharedBlockMixer
from aiakq.runtime.loader.required import adaptable_modules
from aiakq.runtime.loader.weights import CheckpointWeights
from aiakq.runtime.models import zamba
from aiakq.runtime.models.stage import Stage
from aiakq.runtime.models.zamba2 import build

NAME = "Zamba2ForCausalLM"


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**json.loads((folder / "config.json").read_text()), **changes})


def built(config: ModelConfig, folder: Path, stage: Stage | None = None) -> Any:
    weights = CheckpointWeights(Checkpoint.open(folder), Ops(torch.device("cpu"), torch.float32))
    weights.stage = stage
    return build(config, weights)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_long_context": True}, "use_long_context"),
        ({"time_step_limit": [0.1, 0.5]}, "time_step_limit"),
        ({"layers_block_type": None}, "layers_block_type"),
        ({"attention_head_dim": 48}, "attention_head_dim"),
        ({"num_key_value_heads": 2}, "adapters of attention whose keys are shared"),
        ({"num_mem_blocks": 0}, "num_mem_blocks"),
        ({"use_memory": 1.5}, "use_memory"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], reason: str, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model(NAME)
    with pytest.raises(AiakqError, match=reason):
        built(config_of(folder, **changes), folder)


def test_pipeline_stages_are_refused(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(NAME)
    with pytest.raises(AiakqError, match="read the embeddings of the first stage") as caught:
        built(config_of(folder), folder, Stage(0, 2, 5))
    assert caught.value.id == "unsupported"


def test_layers_share_the_weights_of_a_block_and_have_caches_of_their_own(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(NAME)
    model = built(config_of(folder), folder)
    first, other, again = (model.blocks[layer].attention for layer in (1, 2, 4))
    assert all(isinstance(mixer, SharedBlockMixer) for mixer in (first, other, again))
    assert first.attention.qkv.base is again.attention.qkv.base is not other.attention.qkv.base
    assert first.attention.output is again.attention.output
    assert first.attention.qkv.parts[0][0] is not again.attention.qkv.parts[0][0]
    one = first.cache_bytes(torch.float32)
    assert one and model.kv_bytes_per_token(torch.float32) == 3 * one


def test_adapters_of_shared_modules_are_refused(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(NAME)
    modules = adaptable_modules(config_of(folder), Checkpoint.open(folder))
    assert "model.layers.1.mamba_decoder.mamba.in_proj" in modules and "model.layers.1.linear" in modules
    assert not [name for name in modules if "shared_transformer" in name]


def test_weights_may_be_rounded_at_load(tiny_model: Callable[..., Path]) -> None:
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 40)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=320)
    found = []
    for method in (None, "int8"):
        llm = LLM(str(tiny_model(NAME)), dtype="float32", max_model_len=64, quantization=method, max_logprobs=-1)
        rows = [answer.outputs[0].logprobs[0] for answer in llm.generate(prompts, params, use_tqdm=False)]
        found.append(torch.tensor([[row[token].logprob for token in range(320)] for row in rows]))
    exact, rounded = found
    assert 0 < float((exact.exp() * (exact - rounded)).sum(-1).max()) < 0.05


def test_files_may_name_the_kinds_of_layers_as_their_authors_do(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model(NAME), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["layers_block_type"] = [kind.replace("linear_attention", "mamba") for kind in config["layers_block_type"]]
    assert ModelConfig.from_hf(config).layer_kinds == config_of(folder).layer_kinds


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_hidden_size": 128}, "attention_hidden_size is 128"),
        ({"hidden_mamba_act": "gelu"}, "hidden_mamba_act"),
        ({"n_mamba_heads": 3}, "n_mamba_heads"),
        ({"attn_layer_period": 0}, "attn_layer_period"),
    ],
)
def test_what_zamba_does_not_compute_is_refused_by_name(
    changes: dict[str, Any], reason: str, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("ZambaForCausalLM")
    weights = CheckpointWeights(Checkpoint.open(folder), Ops(torch.device("cpu"), torch.float32))
    with pytest.raises(AiakqError, match=reason):
        zamba.build(config_of(folder, **changes), weights)


def test_a_file_of_zamba_without_a_list_has_its_pattern(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("ZambaForCausalLM")
    listed = config_of(folder)
    assert config_of(folder, layers_block_type=None).layer_kinds == listed.layer_kinds
    assert [layer for layer, kind in enumerate(listed.layer_kinds) if kind == "hybrid"] == [2, 4]
    LLM(str(folder), dtype="float32", max_model_len=64, quantization="int8")
