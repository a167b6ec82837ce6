"""Keys of generation_config.json: applied, without effect, or named in the start-up table."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from aiakq import LLM
from aiakq.runtime.config.generation_keys import APPLIED, describe, not_applied, of_model_config

#: Keys that change what transformers answers, with values that do.
CHANGING: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 4,
    "num_beam_groups": 2,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "top_h": 0.4,
    "penalty_alpha": 0.6,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "bad_words_ids": [[5]],
    "suppress_tokens": [7],
    "begin_suppress_tokens": [7],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 2,
    "min_new_tokens": 5,
    "min_length": 5,
    "exponential_decay_length_penalty": [5, 1.5],
    "sequence_bias": [[[5], -10.0]],
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "dola_layers": "high",
    "stop_strings": ["x"],
    "token_healing": True,
    "a_key_of_next_year": 2,
}


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_changes_the_answer_is_named(key: str) -> None:
    config = {"temperature": 0.7, key: CHANGING[key]}
    assert not_applied(config) == {key: CHANGING[key]}
    assert key in describe(not_applied(config))


def test_the_token_0_is_not_a_value_that_is_off() -> None:
    forced = {"forced_bos_token_id": 0, "forced_eos_token_id": 0}
    assert not_applied(forced) == forced


def test_0_and_false_turn_off_only_what_they_are_known_to_turn_off() -> None:
    off = dict.fromkeys(("min_length", "no_repeat_ngram_size", "epsilon_cutoff", "diversity_penalty"), 0)
    assert not_applied(off | {"token_healing": False, "early_stopping": False, "min_new_tokens": 0.0}) == {}
    named = {"guidance_scale": 0, "typical_p": 0.0, "enable_thinking": False, "a_key_of_next_year": 0, "num_beams": 0}
    assert not_applied(named) == named
    assert not_applied({"num_beams": 2, "length_penalty": 0.0}) == {"num_beams": 2, "length_penalty": 0.0}


def test_values_that_are_off_and_keys_without_effect_are_not_named() -> None:
    neutral = {"do_sample": True, "num_beams": 1, "typical_p": 1.0, "min_length": 0, "guidance_scale": 1, "top_h": 1.0}
    effectless = {"transformers_version": "4.40.0", "_from_model_config": True, "pad_token_id": 2, "use_cache": True}
    beams = {"length_penalty": 1.2, "early_stopping": True}
    off = dict.fromkeys(CHANGING)
    assert not_applied(off | neutral | effectless | beams | dict.fromkeys(APPLIED, 1)) == {}
    assert set(not_applied({"num_beams": 2, **beams})) == {"num_beams", *beams}


def test_every_key_of_transformers_is_decided_on() -> None:
    from transformers import GenerationConfig

    keys = vars(GenerationConfig())
    beams = {"length_penalty", "early_stopping", "diversity_penalty", "constraints", "force_words_ids"}
    named = not_applied(dict.fromkeys(keys, 3))
    assert set(named) <= set(CHANGING) | beams


def test_a_long_list_is_cut() -> None:
    line = describe({f"key_{number}": "x" * 1000 for number in range(100)})
    assert "92 more" in line and len(line) < 1000


def test_old_files_have_sampling_values_in_config_json() -> None:
    raw = {"temperature": 0.3, "top_p": 1.0, "top_k": 50, "repetition_penalty": None, "hidden_size": 3}
    assert of_model_config(raw) == {"temperature": 0.3}


def test_the_start_up_table_names_what_is_not_applied(tiny_model, tmp_path) -> None:
    folder = shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4, "temperature": 0.5}))
    llm = LLM(str(folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=17)
    assert llm.engine.facts["tokenizer"] == llm.tokenizer.describe()
    assert llm.engine.facts["generation_config.json"] == "not applied: num_beams 4"
    assert llm.get_default_sampling_params().temperature == 0.5
    (folder / "generation_config.json").unlink()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "temperature": 0.25}))
    llm = LLM(str(folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=17)
    assert "generation_config.json" not in llm.engine.facts
    assert llm.get_default_sampling_params().temperature == 0.25
