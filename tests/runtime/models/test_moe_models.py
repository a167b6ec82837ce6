"""Mixtures of experts: fused files and separate ones, numbers that are refused, quantized experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring

FAMILIES = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]


def logits(folder: Path) -> Tensor:
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(3))
    return load_for_scoring(folder, "float32", "cpu").logits(ids)


def fuse(source: Path, folder: Path) -> Path:
    """The model of ``source`` in a file that holds the experts as the transformers model does, under its names."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    for path in source.glob("*.json"):
        if path.name != "model.safetensors.index.json":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_files_give_the_same_logits(family: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model(family)
    fused = fuse(source, tmp_path / "fused")
    names = set(load_file(fused / "model.safetensors"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert torch.equal(logits(source), logits(fused))


@pytest.mark.parametrize(
    "family",
    [f"{name}ForCausalLM" for name in ("DeepseekV3", "Glm4Moe", "Glm4MoeLite", "Dots1", "SolarOpen", "NemotronH")],
)
def test_weights_of_experts_with_scores_near_zero_are_those_of_transformers(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A bias selects experts whose scores are sigmoids of -100 and less for some tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(family, num_experts_per_tok=1), dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if name.endswith("gate.weight"):
            tensor *= 60
        elif name.endswith("e_score_correction_bias"):
            tensor[:] = torch.arange(len(tensor)) * 10.0
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model.eval()(ids).logits
    torch.testing.assert_close(logits(tmp_path).cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name, value", [("num_experts_per_tok", 9), ("num_local_experts", "many")])
def test_impossible_numbers_are_refused(
    name: str, value: object, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model("MixtralForCausalLM").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(AiakqError) as caught:
        logits(folder)
    assert caught.value.id == "model_malformed"


@pytest.fixture(scope="module")
def quantized(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``quantized(family, method, **fields)`` -> folder of the tiny model, calibrated on little."""
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    def make(family: str, method: str, **fields: object) -> Path:
        folder = tmp_path_factory.mktemp("quantized") / method
        settings = {"dtype": "fp16", "samples": 8, "seqlen": 64, "evaluate": False, **fields}
        quantize_checkpoint(QuantizeOptions(str(tiny_model(family)), str(folder), method, **settings))
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "method"),
    [("MixtralForCausalLM", "gptq"), ("Qwen2MoeForCausalLM", "awq"), ("Qwen3MoeForCausalLM", "smooth_quant")],
)
def test_quantized_experts_answer_alike_alone_and_in_a_crowd(
    family: str, method: str, quantized: Callable[..., Path]
) -> None:
    from aiakq import LLM, SamplingParams

    llm = LLM(model=str(quantized(family, method)), dtype="float32", max_model_len=128, enable_prefix_caching=False)
    draw = torch.Generator().manual_seed(0)
    lengths = [1, 2, 3, 7, 16, 50]
    prompts = [{"prompt_token_ids": torch.randint(3, 300, (n,), generator=draw).tolist()} for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=1)
    crowd = llm.generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, crowd, strict=True):
        alone = llm.generate([prompt], params, use_tqdm=False)[0]
        assert alone.outputs[0].logprobs == answer.outputs[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "fields"), [("weight_only_int8", {}), ("gptq", {"format": "compressed-tensors"})], ids=["int8", "gptq"]
)
def test_transformers_reads_packed_experts(
    family: str, method: str, fields: dict[str, str], quantized: Callable[..., Path]
) -> None:
    """What transformers 5.23 reads of quantized experts; of GPTQ and AWQ files it makes random ones, as we warn."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = quantized(family, method, **fields)
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    ours = logits(folder)
    assert float((theirs - ours).norm() / ours.norm()) < 3e-3
