"""Adapters of an original model on bases that quantization changed: folded scales, and MLPs padded for ``-tp``.

The oracle is PEFT on the original model with the weights that the codes stand for, folds taken back.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import in_floats, with_signed_scales
from lora_adapters import adapted, save_adapter, store_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.folded_scales import LinearScales, read_scales
from aiakq.formats.model_folder import FOLDED_SCALES as FILE
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.spec import QuantSpec

QUICK = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}
ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 128,
    "cpu_math": "exact",
    "dequantize": "always",
    "num_gpu_blocks_override": 65,
    "max_logprobs": -1,
    "enable_lora": True,
    "max_loras": 4,
}
PROMPTS = [[5, 9, 13, 200, 7, 31, 8], [3], [44, 45] * 12, [9] * 17]
FIELDS: list[dict[str, Any]] = [{"r": 4}, {"r": 3, "use_dora": True}, {"r": 5, "use_rslora": True, "lora_bias": True}]
#: Nats; float32 sums in another order.
TOLERANCE = 3e-4


def quantized(source: Path, output: Path, method: str, **fields: Any) -> Path:
    if method in ("awq", "gptq"):
        fields.setdefault("group_size", 32)
    quantize_checkpoint(QuantizeOptions(str(source), str(output), method, **{**QUICK, **fields}))
    return output


def of_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def unfolded(source: Path, folder: Path) -> Any:
    """The original model with the weights that the codes of ``folder`` stand for, without folds and padding."""
    checkpoint = Checkpoint.open(folder)
    scales, model = read_scales(folder, checkpoint.config), of_transformers(source)
    for name in checkpoint.quantized_linears():
        own, stored = scales.get(name, LinearScales()), checkpoint.read_linear(name)
        weight, module = own.unfolded(dequantize(stored)), model.get_submodule(name)
        if "gate_up_proj" in name and len(weight) != len(module.weight):  # each half was padded at its end
            weight = torch.cat([half[: len(module.weight) // 2] for half in weight.chunk(2)])
        turned = type(module).__name__ == "Conv1D"
        n, k = module.weight.shape[::-1] if turned else module.weight.shape
        module.weight.data.copy_(weight[:n, :k].T if turned else weight[:n, :k])
        if stored.bias is not None:
            module.bias.data.copy_((stored.bias if own.rows is None else stored.bias * own.rows)[:n])
    return model


def scores_of_peft(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([each]), use_cache=False).logits[0].log_softmax(-1) for each in PROMPTS]


def scores(llm: LLM, request: LoRARequest | None) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=320, logprobs=320)
    given = [{"prompt_token_ids": each} for each in PROMPTS]
    answers = llm.generate(given, params, use_tqdm=False, lora_request=request)
    rows = [[*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]] for answer in answers]
    return [torch.tensor([[row[token].logprob for token in range(320)] for row in each]) for each in rows]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def check_equality(source: Path, folder: Path, tmp_path: Path) -> None:
    """Every kind of adapter gives on ``folder`` what PEFT gives on the original model."""
    served = in_floats(folder, tmp_path / "floats") if "smooth" in folder.name else folder
    llm = LLM(str(served), **ARGUMENTS)
    plain = scores_of_peft(unfolded(source, folder))
    assert difference(scores(llm, None), plain) < TOLERANCE
    for number, fields in enumerate(FIELDS):
        targets = [name for name in llm.engine.limits.adapters.modules if name != "lm_head"]
        model = adapted(unfolded(source, folder), seed=number, target_modules=targets, **fields)
        request = LoRARequest(f"a{number}", number + 1, str(save_adapter(model, tmp_path / str(number))))
        expected = scores_of_peft(model)
        assert difference(expected, plain) > 0.05
        assert difference(scores(llm, request), expected) < TOLERANCE, fields


#: Family -> methods and options. Fused projections, biases, transposed weights, shared keys, experts, normed heads.
CASES = [
    ("LlamaForCausalLM", "awq", {}),
    ("LlamaForCausalLM", "smooth_quant", {}),
    ("LlamaForCausalLM", "gptq", {"awq_scaling": True}),
    ("Qwen2ForCausalLM", "awq", {}),
    ("Qwen2ForCausalLM", "smooth_quant", {"smooth_alpha": "auto"}),
    ("GPT2LMHeadModel", "awq", {}),
    ("OPTForCausalLM", "smooth_quant", {}),
    ("Phi3ForCausalLM", "awq", {}),
    ("Gemma2ForCausalLM", "smooth_quant", {}),
    ("FalconForCausalLM", "awq", {}),
]


@pytest.mark.parametrize(("family", "method", "fields"), CASES, ids=[f"{f}-{m}" for f, m, _ in CASES])
def test_adapters_of_the_original_model_fit_a_base_with_folded_scales(family, method, fields, tiny_model, tmp_path):
    source = tiny_model(family)
    folder = quantized(source, tmp_path / method, method, **fields)
    folded = read_scales(folder, json.loads((folder / "config.json").read_text()))
    columns = [each.columns for each in folded.values() if each.columns is not None]
    assert any(float((each - 1).abs().max()) > 0.02 for each in columns), "nothing was folded"
    check_equality(source, folder, tmp_path)


def test_adapters_fit_a_base_whose_scales_have_both_signs(tiny_model, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    check_equality(source, with_signed_scales(source, tmp_path / "q", QuantSpec("gptq", "gptq", 4, 32)), tmp_path)


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_ranks_change_adapters_alike(ranks, tiny_model, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    folder = quantized(source, tmp_path / "q", "awq")
    request = LoRARequest("a", 1, str(save_adapter(adapted(of_transformers(source), r=4), tmp_path / "a")))
    arguments = {**ARGUMENTS, "dequantize": "auto"}
    alone, shared = (scores(LLM(str(folder), **arguments, **more), request) for more in ({}, ranks))
    assert difference(alone, shared) == 0


@pytest.mark.parametrize(("family", "method"), [("LlamaForCausalLM", "gptq"), ("Phi3ForCausalLM", "awq")])
def test_adapters_of_the_original_model_fit_padded_layers(family, method, tiny_model, tmp_path):
    source = tiny_model(family, intermediate_size=176)
    folder = quantized(source, tmp_path / "q", method, tp=2)
    config = json.loads((folder / "config.json").read_text())
    assert config["intermediate_size"] > 176 == config["aiakq"]["padded"]["intermediate_size"]["from"]
    check_equality(source, folder, tmp_path)


@pytest.mark.parametrize(("method", "tolerance"), [("awq", 1e-4), ("smooth_quant", 0.05)])
def test_adapters_on_codes_are_close_to_those_on_the_weights_that_they_stand_for(
    method, tolerance, tiny_model, tmp_path
):
    source = tiny_model("LlamaForCausalLM")
    model = adapted(of_transformers(source), r=4, use_dora=True)
    request = LoRARequest("a", 1, str(save_adapter(model, tmp_path / "a")))
    folder = quantized(source, tmp_path / "q", method)
    codes, weights = (
        scores(LLM(str(each), **{**ARGUMENTS, "dequantize": "never"}), request)
        for each in (folder, in_floats(folder, tmp_path / "floats"))
    )
    mean = sum(float((one - other).abs().mean()) for one, other in zip(codes, weights, strict=True)) / len(codes)
    assert mean < tolerance


def test_changed_tensors_are_not_rounded(tiny_model, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    folder = quantized(source, tmp_path / "q", "awq")
    path = save_adapter(adapted(of_transformers(source), r=4), tmp_path / "a")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "adapter_model.safetensors").items()}
    save_file(tensors, path / "adapter_model.safetensors")
    sizes = {}
    for base in (source, folder):
        llm = LLM(str(base), **ARGUMENTS)
        scores(llm, LoRARequest("a", 1, str(path)))
        sizes[base] = sum(store_of(llm).nbytes.values())
    assert sizes[folder] > 1.8 * sizes[source]


def test_a_checkpoint_that_lost_its_file_or_has_another_one_is_refused(tiny_model, tmp_path):
    folder = quantized(tiny_model("LlamaForCausalLM"), tmp_path / "q", "awq")

    def refusal(change) -> AiakqError:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        change(copy / FILE)
        with pytest.raises(AiakqError) as caught:
            LLM(str(copy), **ARGUMENTS)
        assert LLM(str(copy), **{**ARGUMENTS, "enable_lora": False})
        return caught.value

    name = next(iter(load_file(folder / FILE)))
    assert refusal(Path.unlink).id == "model_incomplete"
    assert "its header" in str(refusal(lambda path: path.write_bytes(b"\xff" * 100)))
    assert "not positive" in str(refusal(lambda path: save_file({name: torch.zeros(3)}, path)))
    assert "is F32 [2, 2]" in str(refusal(lambda path: save_file({name: torch.ones(2, 2)}, path)))
    assert "is F32 [3]" in str(refusal(lambda path: save_file({"other": torch.ones(3)}, path)))


def test_factors_of_another_size_than_the_layer_are_refused(tiny_model, tmp_path):
    folder = quantized(tiny_model("LlamaForCausalLM"), tmp_path / "q", "awq")
    tensors = load_file(folder / FILE)
    name = next(name for name in tensors if name.endswith("q_proj.columns"))
    save_file({**tensors, name: torch.ones(7)}, folder / FILE)
    with pytest.raises(AiakqError, match="folded_scales.*7 factors for the .* columns of .*q_proj"):
        LLM(str(folder), **ARGUMENTS)
