"""``rotation`` of GPTQModel: the inputs of its down projections are rotated, or the file is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats import gptq
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.hadamard import rotate
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import QWeight

CONFIG = {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True}


def quantized(folder, target, config, skip="none", **changes):
    """A Llama with weights of 8 bits, its down projections for rotated inputs; returns its float weights by name."""
    spec = gptq.from_config(CONFIG)
    target.mkdir()
    tensors, floats = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" not in name or skip in name:
            tensors[name] = floats[name] = tensor
            continue
        rotated = "down_proj" in name
        weight = rotate(tensor.float()) if rotated else tensor.float()
        scales = (weight.abs().amax(1, keepdim=True) / 127).half()
        codes = (weight / scales.float()).round().clamp(-127, 127).add(128).to(torch.uint8)
        packed = QWeight("w8a16", codes, scales, rotated=rotated)
        floats[name] = dequantize(packed)
        prefix = name.removesuffix("weight")
        tensors |= {prefix + suffix: each for suffix, each in gptq.write(packed, spec, torch.float16).items()}
    save_file(tensors, target / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**document, **changes, "quantization_config": config}))
    return floats


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    """The folder with rotated inputs, and one with the same weights as floats."""
    source = tiny_model("LlamaForCausalLM", intermediate_size=224)
    here = tmp_path_factory.mktemp("rotation")
    floats = quantized(source, here / "rotated", {**CONFIG, "rotation": "hadamard"})
    (here / "plain").mkdir()
    save_file({name: tensor.float() for name, tensor in floats.items()}, here / "plain" / "model.safetensors")
    (here / "plain" / "config.json").write_bytes((source / "config.json").read_bytes())
    return here / "rotated", here / "plain"


def test_a_rotated_model_gives_the_logits_of_its_plain_weights(folders):
    ids = torch.arange(3, 40)[None]
    rotated, plain = (load_for_scoring(folder, "float32", "cpu").logits(ids) for folder in folders)
    assert torch.allclose(rotated, plain, atol=1e-3)


@pytest.mark.parametrize("impl", ["aiakq", "transformers"])
def test_a_rotated_model_writes_what_its_plain_weights_write(folders, impl):
    params = SamplingParams(max_tokens=12, temperature=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in (1, 20, 7)]
    written = []
    for folder in folders:
        llm = LLM(str(folder), dtype="float32", cpu_math="exact", skip_tokenizer_init=True, model_impl=impl)
        written.append([result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)])
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("changes", "sizes", "skip", "said"),
    [
        ({"rotation": "random"}, {}, "none", "rotation 'random'"),
        ({"rotation": "cayley"}, {}, "none", "rotation 'cayley'"),
        ({"rotation": "hadamard"}, {"intermediate_size": 32 * 19}, "none", "608 inputs"),
        ({"rotation": "hadamard"}, {}, "layers.1.mlp.down_proj", "is not quantized"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rotations_that_cannot_be_computed_are_refused(tiny_model, tmp_path, monkeypatch, changes, sizes, skip, said):
    from aiakq.kernels import hadamard

    if sizes:  # only this test writes a size without a matrix
        monkeypatch.setitem(globals(), "rotate", lambda weight: weight)
        monkeypatch.setitem(globals(), "dequantize", lambda weight: weight.scales)
        assert hadamard.factors(sizes["intermediate_size"]) is None
    quantized(tiny_model("LlamaForCausalLM", **sizes), tmp_path / "model", {**CONFIG, **changes}, skip)
    with pytest.raises(AiakqError, match=said) as caught:
        _ = Checkpoint.open(tmp_path / "model").spec
    assert caught.value.id == "format_unsupported"


def test_a_file_without_down_projections_is_refused(tiny_model, tmp_path):
    quantized(tiny_model("LlamaForCausalLM"), tmp_path / "model", {**CONFIG, "rotation": "hadamard"})
    path = tmp_path / "model" / "model.safetensors"
    save_file({name.replace("down_proj", "w2"): each for name, each in load_file(path).items()}, path)
    with pytest.raises(AiakqError, match="no linear layer is called mlp.down_proj"):
        _ = Checkpoint.open(tmp_path / "model").spec
