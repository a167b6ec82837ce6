"""Arguments that say which files a model comes from, and what holds over its config."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats import safetensors_file
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.quantization import checked_spec

LLAMA = "LlamaForCausalLM"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(model: Path | str, prompt: list[int] | None = None, **arguments: Any) -> list[int]:
    llm = LLM(model=str(model), dtype="float32", num_gpu_blocks_override=40, **arguments)
    answer = llm.generate({"prompt_token_ids": prompt or [5, 60, 7, 80, 9]}, GREEDY, use_tqdm=False)[0]
    return answer.outputs[0].token_ids


def config(model: Path | str, **arguments: Any) -> EngineConfig:
    return EngineConfig.from_args({"model": str(model), **arguments})


def refusal(model: Path | str, **arguments: Any) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        config(model, **arguments)
    return caught.value


@pytest.fixture
def edited(tiny_model, tmp_path) -> Callable[..., Path]:
    """``edited(name, architecture, **changes)`` -> a tiny model whose config.json says something else."""

    def make(name: str, architecture: str = LLAMA, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model(architecture), folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return make


@pytest.fixture
def hub(tiny_model, tmp_path) -> Path:
    """A cache of the hub with org/tiny in two revisions; the tokenizer of v2 has one token more."""
    from transformers import AutoTokenizer

    repository = tmp_path / "cache" / "models--org--tiny"
    for revision, commit in (("main", "1" * 40), ("v2", "2" * 40)):
        shutil.copytree(tiny_model(LLAMA), repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    newer = repository / "snapshots" / ("2" * 40)
    tokenizer = AutoTokenizer.from_pretrained(newer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(newer)
    return tmp_path / "cache"


def test_a_hub_model_is_found_where_it_was_downloaded_to_and_by_revision(hub):
    cache = str(hub)
    assert config("org/tiny", download_dir=cache).load.path.name == "1" * 40
    second = config("org/tiny", download_dir=cache, revision="v2")
    assert second.load.path.name == Path(second.tokenizer.folder).name == "2" * 40
    assert refusal("org/tiny").id == "model_hub", "it is nowhere else"
    assert refusal("org/tiny", download_dir=cache, revision="v3").id == "model_hub"


def test_the_hub_gets_the_access_token(hub, monkeypatch):
    import huggingface_hub

    tokens, folder = [], str(hub / "models--org--tiny" / "snapshots" / ("1" * 40))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, token, **__: tokens.append(token) or folder)
    given = {"hf_token": "secret", "tokenizer": "org/other", "hf_config_path": "org/third"}
    found = config("org/tiny", **given)
    assert tokens == ["secret"] * 3 and "secret" not in repr(found)
    config("org/tiny")
    config("org/tiny", hf_token="")
    assert tokens[3:] == [None, True], "the stored token if there is one, and the stored token that must be there"


def test_a_tokenizer_may_be_of_another_revision_or_another_model(hub, example_model):
    both = {"download_dir": str(hub), "num_gpu_blocks_override": 20}
    sizes = [len(LLM("org/tiny", **both, **more).get_tokenizer()) for more in ({}, {"tokenizer_revision": "v2"})]
    assert sizes[1] == sizes[0] + 1
    found = config("org/tiny", download_dir=str(hub), revision="v2", tokenizer_revision="main")
    assert (found.load.path.name, Path(found.tokenizer.folder).name) == ("2" * 40, "1" * 40)
    other = LLM("org/tiny", tokenizer=str(example_model), **both)
    assert len(other.get_tokenizer()) > 1000


def test_ignored_files_are_not_read(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(LLAMA), folder)
    wanted = tokens(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    shutil.copy(folder / "weights.safetensors", folder / "consolidated.safetensors")
    with pytest.raises(AiakqError, match="2 files"):
        LLM(str(folder))
    assert tokens(folder, ignore_patterns=["consolidated*", "original/**/*"]) == wanted
    assert tokens(folder, ignore_patterns="consolidated*") == wanted
    assert tokens(folder, ignore_patterns=["consolidated*"], model_impl="transformers") == wanted


def test_load_format_selects_the_kind_of_file(tiny_model, tmp_path):
    from safetensors.torch import load_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model(LLAMA), folder)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors | {"lm_head.weight": -tensors["lm_head.weight"]}, folder / "pytorch_model.bin")
    kinds = {kind: tokens(folder, load_format=kind) for kind in ("auto", "safetensors", "pt")}
    assert kinds["auto"] == kinds["safetensors"] != kinds["pt"]
    assert tokens(folder, load_format="npcache") == kinds["pt"]
    assert tokens(folder, load_format="hf") == tokens(folder, load_format="fastsafetensors") == kinds["auto"]
    (folder / "model.safetensors").unlink()
    assert tokens(folder) == kinds["pt"]
    with pytest.raises(AiakqError, match=r"holds no \*\.safetensors"):
        LLM(str(folder), load_format="safetensors")
    assert refusal(folder, load_format="other").id == "bad_option"
    assert "params.json is missing" in str(refusal(folder, load_format="mistral"))
    for kind in ("tensorizer", "sharded_state"):
        assert f"--load-format {kind} is not available: " in str(refusal(folder, load_format=kind))


def test_files_are_read_by_several_threads(tiny_model, monkeypatch):
    monkeypatch.setattr(safetensors_file, "_SMALLEST_PART", 1 << 10)
    parts: list[int] = []
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, data, start: (parts.append(len(data[0])), read(file, data, start))[1]
    )
    folder = tiny_model(LLAMA)
    plain, threads = tokens(folder), {"enable_multithread_load": True, "num_threads": 3}
    assert not parts, "files are mapped"
    assert tokens(folder, model_loader_extra_config=threads) == plain
    largest = max(parts)
    assert tokens(folder, load_format="runai_streamer", model_loader_extra_config={"concurrency": 9}) == plain
    assert largest > 2 * max(parts[parts.index(largest) + 1 :][-20:])
    for wrong in ({"concurrency": 0}, {"num_threads": 2}, {"concurrency": True}, {"distributed": True}):
        caught = refusal(folder, load_format="runai_streamer", model_loader_extra_config=wrong)
        assert caught.id == "bad_option" and "concurrency" in str(caught)


def test_dummy_weights_depend_only_on_the_seed(tiny_model):
    made = [tokens(tiny_model(LLAMA), load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_gpt_is_an_alias_of_gptq(edited):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    folder = edited("quantized", quantization_config=settings)
    for name in ("gptq", "gpt", None, "None"):
        assert config(folder, quantization=name).spec.method == "gptq"
    assert refusal(folder, quantization="awq").id == "quantization_mismatch"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}


@pytest.mark.parametrize(
    ("settings", "accepted", "refused"),
    [
        (
            GPTQ,
            ["gptq_marlin", "auto_gptq", "marlin", "ipex", "moe_wna16", "gptq_bitblas", "humming", "GPTQ-Marlin"],
            ["awq_marlin", "compressed-tensors", "auto-round", "inc", "fp8", "bitsandbytes", "gptq_marlin_24"],
        ),
        (AWQ, ["awq_marlin", "auto_awq", "marlin", "ipex", "moe_wna16"], ["gptq_marlin", "gptq", "gguf"]),
        (AUTO_ROUND, ["auto-round", "inc", "auto_round", "gptq"], ["awq_marlin", "gptq_marlin", "modelopt"]),
        (COMPRESSED, ["compressed-tensors", "compressed_tensors", "humming"], ["awq_marlin", "mxfp4", "quark"]),
    ],
    ids=["gptq", "awq", "auto-round", "compressed-tensors"],
)
def test_names_of_containers_and_kernels_match_the_checkpoints_that_vllm_accepts_with_them(
    settings, accepted, refused, edited
):
    folder = edited("quantized", quantization_config=settings)
    for name in accepted:
        assert config(folder, quantization=name).spec is not None
    for name in refused:
        problem = refusal(folder, quantization=name)
        assert problem.id == "quantization_mismatch" and problem.fields["wanted"] == name


def test_the_name_matches_a_config_in_a_file_of_its_own(edited):
    folder = edited("quantized")
    (folder / "quantize_config.json").write_text(json.dumps(GPTQ))
    assert config(folder, quantization="gptq_marlin").spec.method == "gptq"
    assert refusal(folder, quantization="awq_marlin").id == "quantization_mismatch"


@pytest.mark.parametrize("name", ["fp8", "experts_int8", "tpu_int8", "bitsandbytes", "weight_only_int8", "online"])
def test_names_that_round_do_so_for_16_bit_weights_of_models_alone(name, edited):
    folder = edited("plain")
    assert config(folder, quantization=name).load.rounds
    with pytest.raises(AiakqError) as caught:  # as for a draft head
        checked_spec(folder, {}, name)
    assert caught.value.id == "rounding_at_load" and "\n" not in str(caught.value).strip()


def test_a_calibrated_method_does_not_match_16_bit_weights(edited):
    problem = refusal(edited("plain"), quantization="gptq_marlin")
    assert (problem.id, problem.fields["found"]) == ("quantization_mismatch", "unquantized weights")


def test_a_format_that_is_not_read_is_named_whatever_the_expected_name(edited):
    folder = edited("quantized", quantization_config={"quant_method": "quark"})
    for name in ("quark", "gptq", None):
        problem = refusal(folder, quantization=name)
        assert problem.id == "format_unsupported" and "AMD Quark" in problem.message
    assert "Quantize the original" in problem.remedy


def test_packed_floats_of_gpt_oss_match_their_name(edited):
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    raw = {"architectures": ["GptOssForCausalLM"], "quantization_config": settings}
    folder = edited("quantized", quantization_config=settings, architectures=["GptOssForCausalLM"])
    for name in ("mxfp4", "gpt_oss_mxfp4"):
        assert checked_spec(folder, raw, name) is None
    with pytest.raises(AiakqError, match="contains mxfp4"):
        checked_spec(folder, raw, "fp8")


def test_an_unknown_name_is_refused_with_the_closest(edited):
    problem = refusal(edited("plain"), quantization="gptq_marlni")
    assert problem.id == "bad_option" and "Did you mean gptq_marlin?" in str(problem)


def test_the_method_that_quantize_recorded_is_known_and_may_be_expected(edited):
    """Methods of packages, which no format knows."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    folder = edited("quantized", quantization_config=settings, aiakq={"method": "trimmed_rtn"})
    # Other tools mean the format, which holds awq's and gptq's weights alike.
    for name in ("trimmed_rtn", "gptq", "awq", None):
        assert config(folder, quantization=name).spec.method == "trimmed_rtn"
    assert refusal(folder, quantization="smooth_quant").fields["found"] == "trimmed_rtn"
    for number, unusable in enumerate(({"method": "[red]"}, {"method": 4}, {}, "trimmed_rtn")):
        folder = edited(f"unusable-{number}", quantization_config=settings, aiakq=unusable)
        assert config(folder).spec.method == "gptq", unusable


@pytest.mark.parametrize("impl", ["aiakq", "transformers"])
def test_hf_overrides_act_as_if_written_in_the_config(impl, edited, tiny_model):
    changes = {"rms_norm_eps": 0.5, "max_position_embeddings": 256}
    plain = tokens(tiny_model(LLAMA), model_impl=impl)
    over = tokens(tiny_model(LLAMA), model_impl=impl, hf_overrides=changes)
    assert over == tokens(edited("written", **changes), model_impl=impl) != plain
    assert config(tiny_model(LLAMA), hf_overrides=json.dumps(changes)).max_model_len == 256
    assert refusal(tiny_model(LLAMA), hf_overrides="[1]").id == "bad_option"
    assert refusal(tiny_model(LLAMA), hf_overrides={"num_hidden_layers": -1}).id == "model_malformed"


def test_hf_config_path_names_another_config(edited, tiny_model, tmp_path):
    there = edited("there", rms_norm_eps=0.5)
    wanted = tokens(there)
    (tmp_path / "config").mkdir()
    (there / "config.json").rename(tmp_path / "config" / "config.json")
    assert tokens(there, hf_config_path=str(tmp_path / "config")) == wanted
    assert tokens(tiny_model(LLAMA), hf_config_path=str(tmp_path / "config")) == wanted
    assert refusal(there).id == "model_incomplete"


def test_hf_overrides_may_be_a_function_of_the_config(edited):
    def shortened(given):
        given.max_position_embeddings, given.rms_norm_eps = 77, 0.5
        return given

    folder = edited("function", rope_scaling=None)
    found = config(folder, hf_overrides=shortened)
    assert (
        found.max_model_len == 77
        and found.model == config(folder, hf_overrides={"max_position_embeddings": 77, "rms_norm_eps": 0.5}).model
    )
    assert found.parallel.arguments.hf_overrides["max_position_embeddings"] == 77, "other processes get the values"
    by_theta = config(folder, hf_overrides=lambda given: given.rope_parameters.update(rope_theta=5.0) or given)
    assert by_theta.model.rope == config(folder, rope_theta=5.0).model.rope != config(folder).model.rope
    assert config(folder, hf_overrides=lambda given: given).model == config(folder).model
    for wrong in (lambda given: None, lambda given: given.missing):
        problem = refusal(folder, hf_overrides=wrong)
        assert problem.id == "bad_option" and problem.fields["option"] == "hf_overrides"


@pytest.mark.parametrize("impl", ["aiakq", "transformers"])
def test_rotary_settings_are_as_if_written_in_the_config(impl, edited, tiny_model):
    folder, far = tiny_model(LLAMA), [int(x) for x in torch.arange(300) % 250 + 5]
    theta = tokens(folder, far, rope_theta=300.0, model_impl=impl)
    written = {"rope_type": "default", "rope_theta": 300.0}
    assert theta == tokens(edited("theta", rope_parameters=written), far, model_impl=impl) != tokens(folder, far)
    assert theta == tokens(folder, far, hf_overrides={"rope_theta": 300.0}, model_impl=impl)
    scaling = {"rope_type": "linear", "factor": 4.0}
    written = {**scaling, "rope_theta": 10000.0}
    wanted = tokens(edited("linear", rope_parameters=written), far, model_impl=impl)
    for arguments in ({"rope_scaling": scaling}, {"hf_overrides": {"rope_scaling": {"type": "linear", "factor": 4.0}}}):
        assert tokens(folder, far, model_impl=impl, **arguments) == wanted


def test_a_scaled_context_is_longer_by_the_factor(edited, tiny_model):
    folder = tiny_model(LLAMA)
    assert config(folder, rope_scaling={"rope_type": "linear", "factor": 4.0}).max_model_len == 2048
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 300}
    assert config(folder, rope_scaling=yarn).max_model_len == 600
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert config(folder, rope_scaling=llama3).max_model_len == 512, "which says nothing about the context"
    partial = edited("partial", rope_parameters={"rope_theta": 7.0, "partial_rotary_factor": 0.5, "rope_type": "yarn"})
    kept = config(partial, rope_scaling={"rope_type": "linear", "factor": 2.0}).model.rope
    assert (kept["rope_theta"], kept["partial_rotary_factor"], kept["rope_type"]) == (7.0, 0.5, "linear")
    twice = edited("twice", rope_scaling=yarn)  # which is refused without an option
    assert config(twice, rope_scaling={"rope_type": "linear", "factor": 2.0}).model.rope["rope_type"] == "linear"
    other = edited("other", rope_theta=500.0)  # which is refused without an option
    assert refusal(other).id == "config_key_unsupported" and config(other, rope_theta=7.0).model.rope["rope_theta"] == 7
    older = edited("older", rope_parameters=None, rope_theta=5000.0)
    found = config(older, rope_scaling='{"type": "dynamic", "factor": 2.5}')
    assert found.max_model_len == 1280 and found.model.rope["rope_theta"] == 5000.0
    assert found.model.rope["rope_type"] == "dynamic"
    assert len(tokens(folder, [9] * 600, rope_scaling={"rope_type": "dynamic", "factor": 2.0})) == 12
    assert refusal(folder, rope_scaling={"rope_type": "linear", "factor": 0}).id == "bad_option"
    assert refusal(folder, rope_theta=0).id == "bad_option"
    layers = edited("layers", rope_parameters={"full_attention": {"rope_theta": 5.0}})
    assert "kinds of layers" in str(refusal(layers, rope_theta=5.0))


def test_disabling_the_sliding_window_limits_the_context_to_it(tiny_model):
    folder = tiny_model("MistralForCausalLM")
    found = config(folder, disable_sliding_window=True)
    assert found.max_model_len == 24 and set(found.model.sliding_windows) == {None}
    assert "--disable-sliding-window" in str(refusal(folder, disable_sliding_window=True, max_model_len=25))
    assert config(folder).max_model_len == 512
    prompt = [5, 6, 7]
    assert tokens(folder, prompt, disable_sliding_window=True) == tokens(folder, prompt)


def test_auto_max_model_len_is_the_longest_context_that_fits(tiny_model):
    folder = str(tiny_model(LLAMA))
    for given in ("auto", -1, "-1"):
        limits = LLM(folder, max_model_len=given, num_gpu_blocks_override=9).engine.limits
        assert limits.max_model_len == 8 * 16
    assert LLM(folder, max_model_len="auto", num_gpu_blocks_override=90).engine.limits.max_model_len == 512
    assert config(folder, max_model_len="0.1k").max_model_len == 100
    assert config(folder, max_num_batched_tokens="1K").scheduler.max_num_batched_tokens == 1024


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic"])
def test_tables_are_no_longer_than_what_is_served(edited, kind):
    """A config.json may claim any number of positions: gigabytes, of which no request could use more than fits."""
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    usual = edited("usual", rope_parameters=rope)
    huge = edited("huge", rope_parameters=rope, max_position_embeddings=2**31 - 1)
    expected = tokens(usual)
    for lengths in ({"max_model_len": 200}, {}, {"max_model_len": "auto"}):
        llm = LLM(model=str(huge), dtype="float32", num_gpu_blocks_override=40, **lengths)
        (tables,) = {id(block.attention.spec.rotary): block.attention.spec.rotary for block in blocks_of(llm)}.values()
        assert len(tables.cosines) == len(tables.sines) == (200 if lengths.get("max_model_len") == 200 else 39 * 16)
        answer = llm.generate({"prompt_token_ids": [5, 60, 7, 80, 9]}, GREEDY, use_tqdm=False)[0]
        assert answer.outputs[0].token_ids == expected
    with pytest.raises(AiakqError) as caught:
        LLM(model=str(huge), dtype="float32")
    assert caught.value.id == "no_memory" and "--max-model-len" in str(caught.value)


def blocks_of(llm: LLM) -> Any:
    return llm.engine.executor.runner.model.blocks


def test_sources_of_default_sampling_values(edited, tmp_path):
    folder = edited("model")
    own = {"temperature": 0.25, "top_k": 7, "eos_token_id": [1, 5], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(own))
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "max_new_tokens": 3}))
    assert config(folder).generation.sampling == {"temperature": 0.25, "top_k": 7}
    none = config(folder, generation_config="vllm")
    assert none.generation.sampling == {} and none.generation.eos_token_ids == (1, 5)
    there = config(folder, generation_config=str(other))
    assert there.generation.sampling == {"top_p": 0.5} and there.generation.max_new_tokens == 3
    over = config(folder, override_generation_config={"temperature": 0.5, "min_p": 0.1})
    assert over.generation.sampling == {"temperature": 0.5, "top_k": 7, "min_p": 0.1}
    assert LLM(str(folder), override_generation_config='{"top_k": 3}').get_default_sampling_params().top_k == 3
    assert "beams" in str(refusal(folder, override_generation_config={"beams": 4}))
    assert refusal(folder, generation_config=str(tmp_path / "nothing")).id == "bad_option"


def test_a_limit_in_the_generation_config_holds_for_every_answer(tiny_model):
    llm = LLM(str(tiny_model(LLAMA)), override_generation_config={"max_new_tokens": 3}, num_gpu_blocks_override=40)
    for wanted, got in ((None, 3), (50, 3), (2, 2)):
        params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
        output = llm.generate("ab", params, use_tqdm=False)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (got, "length")
    with pytest.raises(AiakqError) as caught:
        llm.generate("ab", SamplingParams(max_tokens=9, min_tokens=4), use_tqdm=False)
    assert caught.value.param == "min_tokens"


def test_floats_that_json_has_no_word_for_are_read(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("Mamba2ForCausalLM"), tmp_path / "limits")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "time_step_limit": [0.0, {"__float__": "Infinity"}]}))
    assert config(folder).model.raw["time_step_limit"] == [0.0, float("inf")]


def test_recurrent_models_have_larger_pages_fewer_sequences_and_no_limit(tiny_model):
    """Their states are as large as many tokens; where no layer has positions, the context is what is asked for."""
    mamba, lfm2 = tiny_model("Mamba2ForCausalLM"), tiny_model("Lfm2ForCausalLM")
    for folder, length in ((mamba, 2048), (lfm2, 512)):
        found = config(folder)
        assert (found.cache.block_size, found.scheduler.max_num_seqs, found.max_model_len) == (256, 32, length)
    found = config(mamba, max_model_len=100_000, block_size=16, max_num_seqs=3)
    assert (found.cache.block_size, found.scheduler.max_num_seqs, found.max_model_len) == (16, 3, 100_000)
    assert "at most 512" in str(refusal(lfm2, max_model_len=513))
