"""Architectures that aiakq has no model of its own for: quantized, refused, and forced onto transformers."""

from __future__ import annotations

import json
import shutil

import pytest
from model_cases import CASES, SIZES

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize("method", ["gptq", "weight_only_int8"])
def test_quantized_architecture_without_a_model_of_its_own(tiny_model, tmp_path, method):
    source = tiny_model("GPTNeoXForCausalLM")
    options = QuantizeOptions(
        input=str(source), output=str(tmp_path / "out"), method=method, samples=8, seqlen=64, evaluate=False
    )
    report = quantize_checkpoint(options)
    assert report.mean_error < 0.1
    llm = LLM(model=str(tmp_path / "out"), dtype="float32")
    assert "8 x w" in llm.engine.facts["linear layers"] and "inside transformers" in llm.engine.facts["linear layers"]
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 5, 30)]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, crowded in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == crowded.outputs[0].token_ids


def test_a_native_family_gives_the_same_tokens_through_transformers(tiny_model):
    folder = str(tiny_model("LlamaForCausalLM"))
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (2, 40)]
    tokens = []
    for impl in ("aiakq", "transformers"):
        llm = LLM(model=folder, dtype="float32", model_impl=impl)
        tokens.append([r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert tokens[0] == tokens[1]


def test_an_architecture_with_other_state_is_refused(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "xlstm", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_blocks=1, num_heads=1, pad_token_id=0
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(AiakqError) as caught:
        _load(tmp_path / "model")
    assert caught.value.id == "model_unsupported"


def _load(folder, **arguments):
    from aiakq.runtime.build.model_loader import load_model
    from aiakq.runtime.config.engine import EngineConfig

    return load_model(EngineConfig.from_args({"model": str(folder), **arguments}))


#: Why a case of model_cases.py cannot run, as its config alone tells.
REFUSED = {
    "kimi_linear": "linear_attention", "zamba2": "layers of the type hybrid",
    "inkling_text": "layers of the type hybrid", "inkling2_text": "layers of the type hybrid",
    "qwen4_exp_text": "layers of the type indexed_attention", "hy_v4": "layers of the type indexed_attention",
    "axk2": "layers of the type indexed_attention", "dots3_note_text": "layers of the type indexed_attention",
    "deepseek_v4": "layers of the type compressed_sparse_attention", "zaya": "layers of the type hybrid",
    "minimax_m3_vl_text, sparse": "layers of the type minimax_m3_sparse", "hrm_text": "calls attention twice",
    "cpmant": "no way to replace its attention", "git": "no way to replace its attention",
    "reformer": "no way to replace its attention", "big_bird": "no way to replace its attention",
    "bert, not a decoder": "its attention mask is neither causal nor a sliding window",
    "xlm": "no hidden_size", "bart": "no num_attention_heads", "whisper": "no num_attention_heads",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_paged_attention_cannot_compute_is_refused_by_the_config_alone(name, tmp_path):
    from transformers import CONFIG_MAPPING

    kind, config = CASES[name]
    keys = {key: value for key, value in {**SIZES, **config}.items() if value is not ...}
    CONFIG_MAPPING[kind](**keys, architectures=["SomeForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(AiakqError, match=REFUSED[name]) as caught:
        _load(tmp_path, load_format="dummy", dtype="float32")
    assert caught.value.id in ("model_unsupported", "architecture_unsupported")
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


@pytest.mark.parametrize("kind", ["t5", "emu3_text_model", "mllama_text_model"])
def test_a_model_without_a_causal_class_is_refused_in_one_sentence(kind, tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": kind, **sizes}))
    with pytest.raises(AiakqError, match=f"no causal language model of the type {kind}") as caught:
        _load(tmp_path, load_format="dummy")
    assert caught.value.id == "model_unsupported"


def test_remote_code_is_refused_without_the_flag(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("LlamaForCausalLM"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["OddForCausalLM"]
    config["model_type"] = "odd"
    config["auto_map"] = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (folder / "odd.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(AiakqError) as caught:
        _load(folder)
    assert caught.value.id == "remote_code"
    assert not marker.exists(), "the folder's code must not run"


def test_a_key_that_transformers_would_drop_is_refused_by_name(tiny_model, tmp_path):
    """Its class keeps unknown keys as attributes, and its model does not read them."""
    folder = shutil.copytree(tiny_model("GPTNeoXForCausalLM"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    for key, value in (("logit_scale", 0.5), ("a_key_of_its_own", "on"), ("norm_type", "x")):
        (folder / "config.json").write_text(json.dumps({**raw, key: value}))
        with pytest.raises(AiakqError) as caught:
            LLM(str(folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=17)
        assert caught.value.id == "config_key_unsupported" and key in str(caught.value)
    (folder / "config.json").write_text(json.dumps({**raw, "unsloth_version": "1", "logit_scale": None}))
    LLM(str(folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=17)
