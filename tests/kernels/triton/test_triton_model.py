"""A whole model on Triton's kernels: where there is no GPU, in the interpreter, layer by layer as on one."""

from __future__ import annotations

import pytest
import torch
from checkpoint_copies import with_mxfp4_experts, with_signed_scales

from aiakq import LLM, SamplingParams
from aiakq.kernels.selection import BACKENDS
from aiakq.kernels.triton import linear, linear_int8
from aiakq.kernels.triton.experts import TritonExperts
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.spec import QuantSpec

CPU = torch.device("cpu")


@pytest.fixture
def on_triton(device, monkeypatch):
    """``on_triton()``: from now on everything that has a kernel in Triton runs there, nothing in the native library."""

    def begin() -> None:
        if device.type != "cuda":
            monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cuda"])
            monkeypatch.setenv("AIAKQ_KERNELS", "triton,triton-fp8,triton-floats,triton-w8a8")

    return begin


def answers(folder, device, lengths=((3, 1), (10, 9), (40, 20)), **arguments):
    llm = LLM(str(folder), dtype="float16", device=device.type, max_model_len=64, **arguments)
    prompts = [{"prompt_token_ids": list(range(start, start + length))} for start, length in lengths]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5)
    return llm, [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]


def compare(found, wanted, tolerance):
    """The same tokens, and their log-probabilities to what float16 leaves."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        for token, row, other in zip(ours.token_ids, ours.logprobs, theirs.logprobs, strict=True):
            assert abs(row[token].logprob - other[token].logprob) < tolerance


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM", "Gemma4ForCausalLM"]
)
def test_the_same_as_on_a_cpu(architecture, device, on_triton, tiny_model):
    folder = tiny_model(architecture)
    _, wanted = answers(folder, CPU)
    on_triton()
    _, found = answers(folder, device)
    compare(found, wanted, 0.03)


@pytest.mark.parametrize(
    ("architecture", "operations"),
    [
        ("DeepseekV3ForCausalLM", {"attention", "experts"}),
        ("Qwen3NextForCausalLM", {"attention", "convolution", "recurrence", "gated_norm", "experts"}),
        ("Mamba2ForCausalLM", {"convolution", "recurrence", "gated_norm"}),
        ("FalconMambaForCausalLM", {"convolution", "selective_scan", "norm"}),
        ("GptOssForCausalLM", {"attention", "experts"}),
    ],
)
def test_latents_states_and_experts_are_the_same_as_on_a_cpu(architecture, operations, device, on_triton, tiny_model):
    """Prompts in chunks of 16 tokens, one of which begins where the other's first page ends."""
    folder = tiny_model(architecture)
    settings = {"lengths": ((3, 19), (3, 17)), "max_num_batched_tokens": 16, "block_size": 16}
    _, wanted = answers(folder, CPU, **settings)
    on_triton()
    llm, found = answers(folder, device, **settings)
    model = llm.engine.executor.runner.model
    assert all(model.ops.selected(operation) == {"triton"} for operation in operations)
    mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, SparseMLP)]
    assert bool(mixtures) == ("experts" in operations)
    assert all(mixture.experts.host_reason is None for mixture in mixtures)
    compare(found, wanted, 0.05)


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_caches_of_eight_bits(stored, device, on_triton, tiny_model):
    folder = tiny_model("LlamaForCausalLM")
    _, wanted = answers(folder, CPU, kv_cache_dtype=stored)
    on_triton()
    llm, found = answers(folder, device, kv_cache_dtype=stored)
    assert llm.engine.facts["attention"].startswith("triton")
    # Near a border between two values of 8 bits the last bit of a key decides: tokens may differ, how likely not much.
    for ours, theirs in zip(found, wanted, strict=True):
        row, other = ours.logprobs[0], theirs.logprobs[0]
        common = row.keys() & other.keys()
        assert len(common) > 2
        assert all(abs(row[token].logprob - other[token].logprob) < 0.15 for token in common)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("gptq", {"group_size": 32}), ("awq", {"group_size": 32}), ("weight_only_int8", {}), ("smooth_quant", {})],
)
def test_quantized_models_give_the_tokens_of_the_cpu(
    method, settings, device, on_triton, tiny_model, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(str(3 + (7 * row + at) % 300) for at in range(32)) for row in range(8)))
    options = QuantizeOptions(
        str(tiny_model("LlamaForCausalLM")), str(out), method, token_ids=ids, seqlen=32, evaluate=False, **settings
    )
    quantize_checkpoint(options)
    _, wanted = answers(out, CPU, cpu_math="exact")
    on_triton()
    prepared = []
    quantize, pack = linear_int8.quantize, linear.pack_activation
    monkeypatch.setattr(linear_int8, "quantize", lambda x, given: prepared.append(x) or quantize(x, given))
    monkeypatch.setattr(linear, "pack_activation", lambda x, layout: prepared.append(x) or pack(x, layout))
    llm, found = answers(out, device)
    assert "triton" in llm.engine.facts["linear layers"]
    compare(found, wanted, 0.2 if method == "smooth_quant" else 0.03)
    # Norms and gates prepare their rows for the products behind them: only what attention returns is left, once a
    # layer, in three steps for integers, and in the two of few rows for weights whose scales come after the product.
    steps = {"smooth_quant": 3, "weight_only_int8": 2}.get(method, 0)
    assert len(prepared) == steps * llm.config.model.num_layers


@pytest.mark.parametrize(
    "settings",
    [{}, {"activation_bits": 16}, {"activation_scales": "tensor"}, {"method": "nvfp4"}],
    ids=str,
)
def test_small_floats_stay_codes_and_give_the_tokens_of_the_cpu(settings, device, on_triton, tiny_model, tmp_path):
    """Per token and channel, weights alone, and stored scales of activations; and 4 bits."""
    out, ids = tmp_path / "out", tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(str(3 + (7 * row + at) % 300) for at in range(32)) for row in range(8)))
    settings = {"method": "fp8", "token_ids": ids, "seqlen": 32, "evaluate": False, **settings}
    quantize_checkpoint(QuantizeOptions(str(tiny_model("LlamaForCausalLM")), str(out), **settings))
    _, wanted = answers(out, CPU, cpu_math="exact")
    on_triton()
    llm, found = answers(out, device)
    rounds = settings["method"] == "fp8" and "activation_bits" not in settings
    assert ("triton-fp8" if rounds else "triton-floats") in llm.engine.facts["linear layers"]
    assert "decoded" not in str(llm.engine.facts)
    compare(found, wanted, 0.1)


def test_experts_in_mxfp4_stay_codes_and_give_the_tokens_of_the_cpu(device, on_triton, tiny_model, tmp_path):
    # Every token uses all experts: with 2 of 6, a rounding error chooses another one for a token whose scores differ by
    # 1e-5, in floats and in MXFP4 alike, and a later token is then 1 nat off.
    floats = tiny_model("GptOssForCausalLM", num_local_experts=3, num_experts_per_tok=3)
    folder = with_mxfp4_experts(floats, tmp_path / "codes")
    _, wanted = answers(folder, CPU, cpu_math="exact")
    on_triton()
    llm, found = answers(folder, device)
    assert "decoded" not in str(llm.engine.facts)
    experts = [block.mlp.experts for block in llm.engine.executor.runner.model.blocks]
    assert all(isinstance(each, TritonExperts) and each.host_reason is None for each in experts)
    compare(found, wanted, 0.03)


@pytest.mark.parametrize(
    "spec",
    [QuantSpec("gptq", "gptq", 4, 32), QuantSpec("smooth_quant", "compressed-tensors", 8, activation_bits=8)],
    ids=["w4", "w8a8"],
)
def test_scales_of_either_sign_give_the_tokens_of_the_cpu(spec, device, on_triton, tiny_model, tmp_path):
    folder = with_signed_scales(tiny_model("LlamaForCausalLM"), tmp_path / "signed", spec)
    _, wanted = answers(folder, CPU, cpu_math="exact")
    on_triton()
    llm, found = answers(folder, device)
    assert "triton" in llm.engine.facts["linear layers"]
    compare(found, wanted, 0.2 if spec.activation_bits else 0.03)
