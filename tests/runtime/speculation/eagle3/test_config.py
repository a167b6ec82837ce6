"""The config.json of EAGLE-3 heads: the layouts in which they are published, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eagle3_heads import CONFIG

from aiakq.errors import AiakqError
from aiakq.runtime.speculation.eagle3.config import Eagle3Config, is_eagle3


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
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"eagle_config": {"parallel_drafting": True}}, "parallel_drafting"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary hidden states"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"compression_config": {"format": "pack-quantized"}}, "quantized"),
        ({"transformer_layer_config": {**LAYER, "quantization_config": {"quant_method": "awq"}}}, "quantized"),
        ({"transformer_layer_config": {**LAYER, "num_hidden_layers": 4}}, "4 layers"),
        ({"transformer_layer_config": {**LAYER, "model_type": "gemma3_text"}}, "gemma3_text"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}, "logit_scale": 0.5}, "logit_scale"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"norm_before_fc": "false"}, "norm_before_fc is 'false'"),
        ({"norm_before_residual": 1}, "norm_before_residual is 1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "2", 3]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 3}, "num_aux_hidden_states"),
        ({"transformer_layer_config": 3}, "transformer_layer_config"),
    ],
)
def test_variants_and_malformed_configs_are_refused_by_name(changes, named, tmp_path):
    with pytest.raises(AiakqError, match=named) as caught:
        Eagle3Config.from_folder(written(tmp_path, **changes))
    assert caught.value.id in ("unsupported", "model_malformed")
    assert "\n" not in str(caught.value) and "Take" in str(caught.value) or caught.value.id == "model_malformed"


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json"])
def test_a_head_with_a_separate_quantization_config_is_refused(file, tmp_path):
    (written(tmp_path) / file).write_text("{}")
    with pytest.raises(AiakqError, match="quantized"):
        Eagle3Config.from_folder(tmp_path)


def test_norms_of_later_variants_are_read(tmp_path):
    def norms(**changes: object) -> tuple[bool, bool, bool]:
        head = Eagle3Config.from_folder(written(tmp_path, **changes))
        return head.norm_before_fc, head.fc_norm, head.norm_output

    assert norms() == (False, False, False)
    assert norms(norm_before_fc=True, norm_output=False) == (True, False, False)
    assert norms(fc_norm=True, norm_output=True) == (False, True, True)
    assert norms(eagle_config={"norm_before_fc": True}) == (True, False, False)


def test_a_null_in_eagle_config_leaves_the_setting_to_the_config(tmp_path):
    config = Eagle3Config.from_folder(written(tmp_path, fc_norm=True, eagle_config={"fc_norm": None}))
    assert config.fc_norm


def test_the_layer_is_llamas_also_in_a_copy_of_another_familys_config(tmp_path):
    """SpecForge writes them for Gemma 3 and Phi-4; a window counts only with layer_types."""
    head = Eagle3Config.from_folder(written(tmp_path, model_type="gemma3_text", sliding_window=512))
    assert head.model.sliding_windows == (None,) and head.model.rope["rope_theta"] == 10000.0
    sliding = {"sliding_window": 512, "layer_types": ["sliding_attention"]}
    assert Eagle3Config.from_folder(written(tmp_path, **sliding)).model.sliding_windows == (512,)


def test_a_head_may_read_any_number_of_layers(tmp_path):
    head = Eagle3Config.from_folder(written(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 3, 5, 7]))
    assert head.num_aux_layers == 4 and head.layers_of(16) == (1, 3, 5, 7)
    assert Eagle3Config.from_folder(written(tmp_path)).num_aux_layers == 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, "EAGLE-1"),
        ({"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"]}, "EAGLE-1"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 4}, "typical acceptance"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "v"}, "typical acceptance"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "an MLP speculator"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "an LSTM speculator"),
        ({"architectures": ["DeepSeekMTPModel"], "num_nextn_predict_layers": 1}, "multi-token prediction"),
        ({"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]}, "multi-token prediction"),
        ({"speculators_model_type": "peagle", "draft_vocab_size": 64, "mask_token_id": 3}, "P-EAGLE"),
        ({"architectures": ["PEagleDraftModel"], "draft_vocab_size": 64, "num_hidden_layers": 4}, "P-EAGLE"),
        ({"speculators_model_type": "dflash", "draft_vocab_size": 64, "block_size": 8}, "DFlash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}, "model_type": "qwen3"}, "DFlash"),
        ({"speculators_model_type": "dspark", "draft_vocab_size": 64}, "DSpark"),
        ({"architectures": ["DominoDraftModel"], "dflash_config": {}}, "Domino"),
        ({"speculators_model_type": "independent", "draft_vocab_size": 64}, "independent"),
    ],
)
def test_heads_of_another_kind_are_refused_with_the_reason(config, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AiakqError, match=reason):
        is_eagle3(tmp_path)


def test_a_model_is_no_head(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert not is_eagle3(tmp_path)
