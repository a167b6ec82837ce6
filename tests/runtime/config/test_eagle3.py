"""The config.json of EAGLE-3 heads: the layouts in which they are published, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eagle3_heads import CONFIG

from aiakq.errors import AiakqError
from aiakq.runtime.config.eagle3 import Eagle3Config, is_eagle3


def written(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


LAYER = {name: value for name, value in CONFIG.items() if name not in ("draft_vocab_size", "architectures")}


def test_the_layout_of_the_authors(tmp_path):
    head = Eagle3Config.from_folder(written(tmp_path, architectures=["LlamaForCausalLM"], num_hidden_layers=40))
    assert (head.draft_vocab_size, head.target_hidden_size, head.norm_before_residual) == (256, 128, False)
    assert (head.model.num_layers, head.model.vocab_size) == (1, 320)
    assert head.layers_of(32) == (2, 16, 29)


def test_the_layout_of_speculators(tmp_path):
    raw = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LAYER,
        "draft_vocab_size": 64,
        "target_hidden_size": 256,
        "norm_before_fc": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    head = Eagle3Config.from_folder(tmp_path)
    assert (head.draft_vocab_size, head.target_hidden_size, head.norm_before_residual) == (64, 256, True)
    assert head.model.hidden_size == 128 and is_eagle3(tmp_path)


def test_layers_are_numbered_by_their_input_or_in_eagle_config_by_their_output(tmp_path):
    key = "eagle_aux_hidden_state_layer_ids"
    assert Eagle3Config.from_folder(written(tmp_path, **{key: [2, 8, 13]})).layers_of(16) == (2, 8, 13)
    nested = {"eagle_config": {key: [1, 7, 12], "use_aux_hidden_state": True}}
    assert Eagle3Config.from_folder(written(tmp_path, **nested)).layers_of(16) == (2, 8, 13)


@pytest.mark.parametrize("layers", [[2, 8, 17], [8, 2, 13], [2, 2, 5]], ids=str)
def test_layers_that_the_target_does_not_have_are_refused(layers, tmp_path):
    head = Eagle3Config.from_folder(written(tmp_path, eagle_aux_hidden_state_layer_ids=layers))
    with pytest.raises(AiakqError, match="trained for this model") as caught:
        head.layers_of(16)
    assert caught.value.id == "option_conflict"


def test_a_target_of_few_layers_needs_a_head_that_says_which(tmp_path):
    with pytest.raises(AiakqError, match="2, 1, -1 of 2"):
        Eagle3Config.from_folder(written(tmp_path)).layers_of(2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_config": {"fc_norm": True}}, "fc_norm"),
        ({"norm_output": True}, "norm_output"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary hidden states"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": 3}, "transformer_layer_config"),
    ],
)
def test_variants_and_malformed_configs_are_refused_by_name(changes, named, tmp_path):
    with pytest.raises(AiakqError, match=named) as caught:
        Eagle3Config.from_folder(written(tmp_path, **changes))
    assert caught.value.id in ("unsupported", "model_malformed")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EAGLE-1"),
        ({"architectures": ["MedusaModel"]}, "typical acceptance"),
        ({"model_type": "mlp_speculator"}, "last hidden state"),
        ({"architectures": ["DeepSeekMTPModel"]}, "multi-token prediction"),
        ({"speculators_model_type": "eagle"}, "EAGLE-1"),
    ],
)
def test_heads_of_another_kind_are_refused_with_the_reason(config, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AiakqError, match=reason):
        is_eagle3(tmp_path)


def test_a_model_is_no_head(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert not is_eagle3(tmp_path)
