"""What quantize publishes can be loaded, or it refuses the source before any work."""

from __future__ import annotations

import json
import logging
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.quantizers import pipeline
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint


def changed(source, target, tensors):
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)
    return target


def quantized(source, output):
    return quantize_checkpoint(QuantizeOptions(str(source), str(output), "weight_only_int8", evaluate=False))


@pytest.mark.parametrize("head", ["v_head.summary", "medusa_head.0.0.linear", "value_head"])
def test_additional_heads_do_not_keep_the_output_from_loading(tiny_model, tmp_path, head):
    extra = {f"{head}.weight": torch.zeros(1, 128), f"{head}.bias": torch.zeros(1)}
    report = quantized(changed(tiny_model("LlamaForCausalLM"), tmp_path / "in", extra), tmp_path / "out")
    assert any(head.partition(".")[0] in warning for warning in report.warnings)
    assert load_for_scoring(tmp_path / "out", "float32", "cpu").logits(torch.arange(9)[None]).isfinite().all()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.7.mlp.up_proj.weight", torch.zeros(2, 2)),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(128)),
        ("model.embed_tokens.weight", torch.zeros(320, 128, dtype=torch.int8)),
    ],
    ids=str,
)
def test_a_source_that_does_not_match_its_config_is_refused_before_any_work(
    tiny_model, tmp_path, monkeypatch, name, tensor
):
    folder = changed(tiny_model("LlamaForCausalLM"), tmp_path / "in", {name: tensor})
    monkeypatch.setattr(pipeline, "quantize_blocks", lambda *_: pytest.fail("work was started"))
    with pytest.raises(AiakqError) as caught:
        quantized(folder, tmp_path / "out")
    assert caught.value.id == "tensor_inventory" and name in str(caught.value.details)
    assert not (tmp_path / "out").exists()


def test_integers_in_a_model_that_only_transformers_runs_are_refused(tiny_model, tmp_path):
    name = "gpt_neox.embed_in.weight"
    source = tiny_model("GPTNeoXForCausalLM")
    folder = changed(source, tmp_path / "in", {name: load_file(source / "model.safetensors")[name].to(torch.int8)})
    with pytest.raises(AiakqError, match="embed_in.weight holds I8") as caught:
        quantized(folder, tmp_path / "out")
    assert caught.value.id == "tensor_mismatch"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"generation": {"temperature": -1.0}}, "generation_config.json sets temperature to -1.0"),
        ({"generation": {"top_k": "50"}}, "generation_config.json sets top_k to '50'"),
        ({"generation": {"eos_token_id": [[1, 2]]}}, "generation_config.json sets eos_token_id to"),
        ({"config": {"eos_token_id": "end"}}, "config.json sets eos_token_id to 'end'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_generation_values_that_end_the_start_of_a_server_are_refused_before_any_work(
    tiny_model, tmp_path, monkeypatch, architecture, values, said
):
    folder = changed(tiny_model(architecture), tmp_path / "in", {})
    if "generation" in values:
        (folder / "generation_config.json").write_text(json.dumps(values["generation"]))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values.get("config", {})))
    monkeypatch.setattr(pipeline, "quantize_blocks", lambda *_: pytest.fail("work was started"))
    with pytest.raises(AiakqError, match=re.escape(said)) as caught:
        quantized(folder, tmp_path / "out")
    assert caught.value.id == "generation_config" and caught.value.remedy == "Correct the file."


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_an_empty_or_damaged_generation_config_is_ignored_with_a_warning(tiny_model, tmp_path, content, caplog):
    folder = changed(tiny_model("LlamaForCausalLM"), tmp_path / "in", {})
    (folder / "generation_config.json").write_text(content)
    quantized(folder, tmp_path / "out")
    with caplog.at_level(logging.WARNING, logger="aiakq.runtime"):
        load_for_scoring(tmp_path / "out", "float32", "cpu")
    assert any("generation_config.json is ignored" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "changes",
    [{"logit_scale": 0.5}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
    ids=["unknown key", "two scalings"],
)
def test_a_config_that_every_server_refuses_is_refused_before_any_work(tiny_model, tmp_path, monkeypatch, changes):
    folder = changed(tiny_model("LlamaForCausalLM"), tmp_path / "in", {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    monkeypatch.setattr(pipeline, "quantize_blocks", lambda *_: pytest.fail("work was started"))
    with pytest.raises(AiakqError) as caught:
        quantized(folder, tmp_path / "out")
    assert caught.value.id == "config_key_unsupported" and next(iter(changes)) in str(caught.value)
    assert not (tmp_path / "out").exists()
