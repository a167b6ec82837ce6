"""``quantize --lora``: the checkpoint of the model that PEFT merges, and refusals of what cannot be merged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from lora_adapters import FIELDS, adapted, save_adapter
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError


def load(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapter_of(folder, path, **fields):
    """A random adapter of a model folder, and the folder of the model that PEFT merges it into."""
    import transformers

    wrapped = adapted(load(folder), **fields)
    save_adapter(wrapped, path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.merge_and_unload().save_pretrained(path / "merged")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(path / "merged")
    return path / "adapter", path / "merged"


def tensors(folder):
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal(one, other):
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])] == []


def without_saved_layers(adapter):
    """Remove the whole layers that PEFT saves beside an adapter of the embedding or the output layer."""
    weights = adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if ".lora_" in name}, weights)


def refusal(quantize, source, adapter, path):
    with pytest.raises(AiakqError) as caught:
        quantize(source, path / "out", "weight_only_int8", lora=str(adapter))
    assert not (path / "out").exists()
    return caught.value


@pytest.mark.parametrize("fields", FIELDS)
def test_every_field_gives_the_weights_that_peft_merges(fields, tiny_model, quantize, tmp_path):
    source = tiny_model("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    adapter, merged = adapter_of(source, tmp_path, **FIELDS[fields])
    quantize(source, tmp_path / "one", "weight_only_int8", lora=str(adapter))
    quantize(merged, tmp_path / "other", "weight_only_int8")
    quantize(source, tmp_path / "without", "weight_only_int8")
    assert equal(tmp_path / "one", tmp_path / "other") and not equal(tmp_path / "one", tmp_path / "without")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in ("awq", "gptq", "smooth_quant")),
        ("gptq", {"bits": 2, "rotate": "hadamard", "importance": "gradient", "tune": "8steps"}),
    ],
)
def test_calibration_sees_the_merged_model(method, options, tiny_model, quantize, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    adapter, merged = adapter_of(source, tmp_path, **FIELDS["DoRA"])
    report = quantize(source, tmp_path / "one", method, lora=str(adapter), **options)
    quantize(merged, tmp_path / "other", method, **options)
    assert equal(tmp_path / "one", tmp_path / "other")
    said = json.loads((tmp_path / "one" / "config.json").read_text())["aiakq"]["lora"]
    assert said["name"] == "adapter" == report.lora and len(said["digest"]) == 32
    card = (tmp_path / "one" / "README.md").read_text()
    assert "--lora adapter" in card and said["digest"] in card


def test_weights_that_are_stored_transposed(tiny_model, quantize, tmp_path):
    source = tiny_model("GPT2LMHeadModel")
    adapter, merged = adapter_of(source, tmp_path, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    quantize(source, tmp_path / "one", "weight_only_int8", lora=str(adapter))
    quantize(merged, tmp_path / "other", "weight_only_int8")
    assert equal(tmp_path / "one", tmp_path / "other")


def test_workers_merge_it_too(tiny_model, quantize, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    adapter, _ = adapter_of(source, tmp_path)
    quantize(source, tmp_path / "one", "gptq", lora=str(adapter))
    quantize(source, tmp_path / "two", "gptq", lora=str(adapter), workers=2)
    assert equal(tmp_path / "one", tmp_path / "two")


def test_the_merged_model_is_the_reference_of_the_evaluation(tiny_model, quantize, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    adapter, merged = adapter_of(source, tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    asked = {"evaluate": True, "eval_text": str(text)}
    one = quantize(source, tmp_path / "one", "weight_only_int8", lora=str(adapter), **asked)
    other = quantize(merged, tmp_path / "other", "weight_only_int8", **asked)
    without = quantize(source, tmp_path / "without", "weight_only_int8", **asked)
    assert one.perplexity_before == pytest.approx(other.perplexity_before, rel=1e-4)
    assert one.perplexity_before != pytest.approx(without.perplexity_before, rel=1e-2)
    assert one.kl == pytest.approx(other.kl, rel=0.05)


@pytest.mark.parametrize("arguments", [{}, {"lm_head": 8}], ids=["floats", "quantized"])
def test_an_output_layer_of_its_own_is_merged(arguments, tiny_model, quantize, tmp_path):
    source = tiny_model("LlamaForCausalLM", tie_word_embeddings=False)
    adapter, merged = adapter_of(source, tmp_path, target_modules=["q_proj", "lm_head"], **FIELDS["DoRA"])
    without_saved_layers(adapter)
    quantize(source, tmp_path / "one", "weight_only_int8", lora=str(adapter), **arguments)
    quantize(merged, tmp_path / "other", "weight_only_int8", **arguments)
    quantize(source, tmp_path / "without", "weight_only_int8", **arguments)
    assert equal(tmp_path / "one", tmp_path / "other")
    one, without = tensors(tmp_path / "one"), tensors(tmp_path / "without")
    assert {name for name in one if "lm_head" in name and not torch.equal(one[name], without[name])}
    assert torch.equal(one["model.embed_tokens.weight"], without["model.embed_tokens.weight"])


def test_an_output_layer_that_is_the_embedding_is_refused(tiny_model, quantize, tmp_path):
    """PEFT's merged model has the changed weight as its embedding too, and other outputs than its adapter."""
    source = tiny_model("LlamaForCausalLM", tie_word_embeddings=True)
    adapter, merged = adapter_of(source, tmp_path, target_modules=["q_proj", "lm_head"])
    before, after = tensors(source), tensors(merged)
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    without_saved_layers(adapter)
    refused = refusal(quantize, source, adapter, tmp_path)
    assert refused.id == "adapter_unmergeable" and "lm_head shares its weight with the embedding" in str(refused)
    assert "--enable-lora" in str(refused)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ensure_weight_tying", [False, True])
def test_embeddings_are_refused(tied, ensure_weight_tying, tiny_model, quantize, tmp_path):
    source = tiny_model("LlamaForCausalLM", tie_word_embeddings=tied)
    targets = ["q_proj", "embed_tokens"]
    adapter, _ = adapter_of(source, tmp_path, target_modules=targets, ensure_weight_tying=ensure_weight_tying)
    for _ in range(2):
        refused = refusal(quantize, source, adapter, tmp_path)
        assert refused.id == "adapter_unsupported" and "embed" in str(refused)
        without_saved_layers(adapter)


def test_what_cannot_be_merged_is_refused(tiny_model, quantize, tmp_path):
    plain, other = tiny_model("LlamaForCausalLM"), tiny_model("LlamaForCausalLM", intermediate_size=128)
    adapter, _ = adapter_of(other, tmp_path / "wide")
    assert "outputs in the adapter" in str(refusal(quantize, plain, adapter, tmp_path))
    assert "There is no adapter" in str(refusal(quantize, plain, tmp_path / "nowhere", tmp_path))
    biased = save_adapter(adapted(load(plain), **FIELDS["bias of B"]), tmp_path / "biased")
    refused = refusal(quantize, plain, biased, tmp_path)
    assert refused.id == "adapter_unmergeable" and "has a bias, and the layer has none" in str(refused)


def test_an_adapter_that_changes_meanwhile(tiny_model, quantize, tmp_path, monkeypatch):
    from aiakq.quantizers.prepared import Prepared

    source = tiny_model("LlamaForCausalLM")
    adapter, _ = adapter_of(source, tmp_path)
    inner = Prepared.check_unchanged

    def changed(prepared):
        weights = adapter / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
        inner(prepared)

    monkeypatch.setattr(Prepared, "check_unchanged", changed)
    with pytest.raises(AiakqError, match="adapter_model.safetensors"):
        quantize(source, tmp_path / "out", "weight_only_int8", lora=str(adapter))
    assert not (tmp_path / "out").exists()
