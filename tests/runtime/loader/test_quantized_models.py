"""The example model quantized four ways: our runtime's logits are those of transformers, and every mode agrees."""

from __future__ import annotations

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.quantizers import METHODS as ALL_METHODS
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.text.tokenizer import Tokenizer

#: Methods whose output is a folder; gguf writes a file.
METHODS = sorted(set(ALL_METHODS) - {"gguf"})


@pytest.fixture(scope="module")
def quantized(example_model, tmp_path_factory):
    """``quantized(method)`` -> folder of the example model, calibrated on little."""
    made = {}

    def make(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp("quantized") / method
            options = QuantizeOptions(
                str(example_model), str(made[method]), method, dtype="bf16", samples=16, seqlen=128, evaluate=False
            )
            quantize_checkpoint(options)
        return made[method]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "gptq", "smooth_quant", "weight_only_int8"])
def test_logits_are_those_of_transformers(method, quantized, example_model, heldout_text):
    pytest.importorskip("gptqmodel" if method in ("awq", "gptq") else "compressed_tensors")
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([Tokenizer.load(example_model).encode(heldout_text[:3000])[:256]])
    theirs = AutoModelForCausalLM.from_pretrained(quantized(method), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        wanted = theirs(ids).logits[0].float()
    found = load_for_scoring(quantized(method), "bfloat16", "cpu").logits(ids)[0]
    exact = load_for_scoring(quantized(method), "float32", "cpu").logits(ids)[0]

    def away(a, b):
        return ((a - b).norm() / b.norm()).item()

    # Both round to bf16 after every operation; neither may be further from exact arithmetic than that explains.
    # Rounding activations to 8 bits turns a last-bit difference into a whole step.
    limit = 0.03 if method == "smooth_quant" else 0.015
    assert away(found, exact) < limit and away(wanted, exact) < limit and away(found, wanted) < limit


@pytest.mark.parametrize("dequantize", ["always", "never"])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_do_not_depend_on_concurrent_requests(method, dequantize, quantized, heldout_text):
    llm = LLM(model=str(quantized(method)), dtype="float32", dequantize=dequantize, num_gpu_blocks_override=60)
    words = heldout_text.split()
    prompts = [" ".join(words[at * 70 : at * 70 + 2 + 9 * at]) for at in range(8)]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    crowd = llm.generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, crowd, strict=True):
        alone = llm.generate(prompt, params, use_tqdm=False)[0]
        assert alone.outputs[0].logprobs == answer.outputs[0].logprobs
    llm.engine.check()


@pytest.mark.parametrize("method", METHODS)
def test_weights_can_be_made_up_from_the_config(method, quantized, tmp_path):
    """Of the right kinds and finite, from config.json and the tokenizer alone; the same for the same seed."""
    folder = tmp_path / "shape"
    folder.mkdir()
    for path in quantized(method).iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    real = LLM(str(quantized(method)), dtype="float32", dequantize="never")
    tokens = []
    for seed in (0, 0, 1):
        llm = LLM(str(folder), dtype="float32", load_format="dummy", seed=seed)
        assert llm.engine.facts["linear layers"].split(" (")[0] == real.engine.facts["linear layers"].split(" (")[0]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [result] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        tokens.append(result.outputs[0].token_ids)
    assert tokens[0] == tokens[1] != tokens[2]
