"""A stored output layer beside ``tie_word_embeddings`` counts where it differs from the embedding, in every path."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.separate_head import separate_head
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint

EMBEDDING = "model.embed_tokens.weight"
IDS = torch.arange(3, 30)[None]


def with_head(source, target, head, keep_embedding=True, **config):
    """A copy of the tied model whose file holds an output layer of its own."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] = head(tensors[EMBEDDING])
    if not keep_embedding:
        del tensors[EMBEDDING]
    save_file(tensors, target / "model.safetensors")
    document = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**document, **config}))
    return target


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    """One folder that says tied, and one that says what is true."""
    here, source = tmp_path_factory.mktemp("heads"), tiny_model("Qwen2ForCausalLM")

    def other(embedding):
        return embedding.flip(0) + 0.01

    return with_head(source, here / "tied", other), with_head(source, here / "true", other, tie_word_embeddings=False)


def logits(folder):
    return load_for_scoring(folder, "float32", "cpu").logits(IDS)


def test_a_stored_head_that_differs_from_the_embedding_is_used_with_one_warning(folders, caplog):
    with caplog.at_level(logging.WARNING, logger="aiakq.runtime"):
        found = logits(folders[0])
    assert torch.equal(found, logits(folders[1]))
    [record] = [each for each in caplog.records if "tie_word_embeddings" in each.getMessage()]
    assert "lm_head" in record.getMessage()


@pytest.mark.parametrize("impl", ["aiakq", "transformers"])
def test_both_implementations_write_with_the_stored_head(folders, impl):
    params = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    written = []
    for folder in folders:
        llm = LLM(str(folder), dtype="float32", cpu_math="exact", skip_tokenizer_init=True, model_impl=impl)
        written.append(llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert written[0] == written[1]


def test_quantize_keeps_the_stored_head_and_corrects_the_flag(folders, tmp_path):
    report = quantize_checkpoint(
        QuantizeOptions(str(folders[0]), str(tmp_path / "out"), "weight_only_int8", evaluate=False)
    )
    stored, kept = (
        load_file(folder / "model.safetensors")["lm_head.weight"] for folder in (folders[0], tmp_path / "out")
    )
    assert torch.equal(stored, kept)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("lm_head is stored" in warning for warning in report.warnings)


def test_inspect_reports_the_stored_head(folders, tiny_model):
    assert inspect_checkpoint(str(folders[0])).stored_head == "lm_head"
    assert not inspect_checkpoint(str(folders[0])).tied_embeddings
    assert inspect_checkpoint(str(folders[1])).stored_head == ""


def test_a_stored_head_equal_to_the_embedding_is_tied(tiny_model, tmp_path):
    folder = with_head(tiny_model("Qwen2ForCausalLM"), tmp_path / "equal", torch.clone)
    assert separate_head(Checkpoint.open(folder)) == ""
    assert EngineConfig.from_args({"model": str(folder), "device": "cpu"}).model.has_tied_head


def test_a_tied_weight_may_be_stored_under_the_name_of_the_head(tiny_model, tmp_path):
    source = tiny_model("Qwen2ForCausalLM")
    folder = with_head(source, tmp_path / "head", torch.clone, keep_embedding=False)
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize("architecture", ["GPTJForCausalLM", "PhiForCausalLM"])
def test_a_tied_head_keeps_its_own_bias(architecture, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_model(architecture, tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored and stored["lm_head.bias"].any()
    found = logits(folder)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits[0]
    torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
    shutil.copytree(folder, tmp_path / "without")
    save_file(
        {name: tensor for name, tensor in stored.items() if name != "lm_head.bias"},
        tmp_path / "without" / "model.safetensors",
    )
    torch.testing.assert_close(
        logits(tmp_path / "without") + stored["lm_head.bias"], found, rtol=1e-4, atol=1e-4, msg="no bias is zero"
    )
    quantize_checkpoint(QuantizeOptions(str(folder), str(tmp_path / "out"), "weight_only_int8", evaluate=False))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.bias"], stored["lm_head.bias"])
    params = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
    llm = LLM(str(tmp_path / "out"), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=20)
    assert llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)[0].finished
