"""``--rotate``: rotated models compute what the original computes, in files that transformers and aiakq read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers import run_report
from aiakq.quantizers.model.outer_layers import load_outside
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.recipe_file import read_recipe
from aiakq.quantizers.rotate import prepare_rotation
from aiakq.quantizers.rotation.orthogonal import Dense
from aiakq.quantizers.rotation.rotation import Rotation, Structure, rotation_of

#: One of each kind of structure: tied and untied, gains of 1 plus the weight, layer norms with and without biases,
#: parallel blocks, fused projections, learned positions, multipliers, experts, latents, recurrent layers.
ROTATABLE = (
    "LlamaForCausalLM",
    "GemmaForCausalLM",
    "Qwen3ForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "GraniteMoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3NextForCausalLM",
    "BambaForCausalLM",
)
REFUSED = {
    "Gemma2ForCausalLM": "self_attn.o_proj passes a norm before it is added to the residual stream",
    "Olmo2ForCausalLM": "self_attn.o_proj passes a norm before it is added to the residual stream",
    "BloomForCausalLM": "word_embeddings_layernorm",
    "GptOssForCausalLM": "not the sum of its input and outputs of linear layers alone",
}


def source_model(folder: Path) -> SourceModel:
    return SourceModel(Checkpoint.open(folder), None, torch.device("cpu"))


def rotation_for(model: SourceModel, kind: str = "hadamard", seed: int = 0) -> Rotation:
    return prepare_rotation(model, kind, seed, (), frozenset(), lambda _: None)


def original_logits(folder: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(ids).logits  # type: ignore[no-any-return]


def rotated_logits(folder: Path, rotation: Rotation, ids: Tensor) -> Tensor:
    """Logits of the tensors that a run would write."""
    model = source_model(folder)
    model.rotate(rotation)
    load_outside(model)
    for index, block in enumerate(model.blocks):
        model.load(block, model.block_prefix(index))
    with torch.inference_mode():
        return model.model(ids, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", ROTATABLE)
def test_a_rotated_model_has_the_logits_of_the_original(
    architecture: str,
    tiny_model: Callable[..., Path],
    ids: Tensor,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:
    folder = tiny_model(architecture)
    model = source_model(folder)
    rotation = rotation_for(model)
    model.rotate(rotation)
    assert relative_error(rotated_logits(folder, rotation, ids), original_logits(folder, ids)) < 1e-3
    embedding = f"{rotation.structure.embedding}.weight"
    assert not torch.allclose(model.value(embedding), source_model(folder).value(embedding), atol=0.1)


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_model_that_cannot_be_rotated_exactly_is_refused_by_name(
    architecture: str, tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(AiakqError) as failure:
        quantize(tiny_model(architecture), tmp_path / "out", "weight_only_int8", rotate="hadamard")
    assert failure.value.id == "unsupported"
    assert architecture in failure.value.message and REFUSED[architecture] in failure.value.message
    assert not (tmp_path / "out").exists()


def test_the_values_of_a_gated_attention_are_not_rotated(tiny_model: Callable[..., Path]) -> None:
    assert not rotation_for(source_model(tiny_model("Qwen3NextForCausalLM"))).heads
    heads = rotation_for(source_model(tiny_model("LlamaForCausalLM"))).heads
    assert [name.rpartition(".")[2] for name in heads] == ["v_proj", "v_proj"]


def test_learned_rotations_lower_the_fourth_power_of_the_weights(tiny_model: Callable[..., Path]) -> None:
    model = source_model(tiny_model("LlamaForCausalLM"))

    def fourth_power(kind: str) -> float:
        model.rotate(rotation_for(model, kind))
        names = [shape.name for shape in model.linear_shapes()]
        return sum(float(model.value(f"{name}.weight").pow(4).sum()) for name in names)

    assert fourth_power("learned") < 0.9 * fourth_power("hadamard")


@pytest.mark.parametrize("kind", ["hadamard", "learned"])
def test_a_large_channel_of_values_is_scaled_before_it_is_spread(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model("LlamaForCausalLM"), dtype=torch.float32)
    attention, size = plain.model.layers[0].self_attn, plain.config.head_dim
    groups = plain.config.num_attention_heads // plain.config.num_key_value_heads
    with torch.no_grad():
        attention.v_proj.weight[3] *= 64
        attention.o_proj.weight.view(-1, groups * plain.config.num_key_value_heads, size)[:, :groups, 3] /= 64
    plain.save_pretrained(tmp_path)
    model = source_model(tmp_path)
    model.rotate(rotation_for(model, kind))
    for name in ("v_proj", "o_proj"):
        sizes = model.value(f"model.layers.0.self_attn.{name}.weight").norm(dim=1 if name == "v_proj" else 0)
        assert float(sizes.max() / sizes.median()) < 3


def test_a_model_of_sentence_transformers_is_refused(
    tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "in")
    (tmp_path / "in" / "modules.json").write_text("[]")
    with pytest.raises(AiakqError, match="sentence-transformers, whose embeddings it would change"):
        quantize(tmp_path / "in", tmp_path / "out", "weight_only_int8", rotate="hadamard")


def test_a_checkpoint_with_another_head_is_refused(
    tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    save_file(tensors | {"v_head.weight": torch.ones(1, width)}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(AiakqError, match="its tensor v_head.weight is outside the text model"):
        quantize(tmp_path / "in", tmp_path / "out", "weight_only_int8", rotate="hadamard")


def test_a_rotation_crosses_processes(tiny_model: Callable[..., Path]) -> None:
    model = source_model(tiny_model("LlamaForCausalLM"))
    rotation = rotation_for(model)
    other = rotation_of(json.loads(json.dumps(rotation.document())), rotation.tensors())
    assert other.digest == rotation.digest
    assert other.structure == rotation.structure


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("GemmaForCausalLM", "weight_only_int8"), ("LlamaForCausalLM", "smooth_quant"), ("OPTForCausalLM", "gptq")],
)
def test_every_method_quantizes_a_rotated_model(
    architecture: str,
    method: str,
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    dequantized: Callable[..., Any],
    ids: Tensor,
    relative_error: Callable[[Tensor, Tensor], float],
    tmp_path: Path,
) -> None:
    folder = tiny_model(architecture)
    bits = {"bits": 8} if method == "gptq" else {}
    report = quantize(folder, tmp_path / "out", method, rotate="hadamard", **bits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aiakq"]["rotation"] == "hadamard"
    assert any(" and the values of 2 attention layers were rotated (hadamard); " in note for note in report.notes)
    output = dequantized(tmp_path / "out")
    assert relative_error(output.logits(ids), original_logits(folder, ids)) < 0.1


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (0, "that write it) was rotated (learned); in float32 the rotated model has the logits of the original."),
        (1, "that write it) and the values of 1 attention layer were rotated (learned); "),
    ],
)
def test_the_note_agrees_in_number(heads: int, words: str) -> None:
    rotation = Rotation("learned", Structure(), Dense(torch.eye(2)), {str(head): torch.eye(2) for head in range(heads)})
    prepared: Any = SimpleNamespace(model=SimpleNamespace(rotation=rotation, untied_head=""))
    (note,) = run_report._rotation_notes(prepared)
    assert words in note


def test_a_tied_output_layer_is_separated_and_said_so(
    tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tiny_model("SmolLM3ForCausalLM", tie_word_embeddings=True)
    report = quantize(folder, tmp_path / "out", "weight_only_int8", rotate="hadamard")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head.weight" in Checkpoint.open(tmp_path / "out").inventory
    assert any("no longer tied to the embedding" in note and "MB more" in note for note in report.notes)


def test_an_output_layer_whose_norm_has_one_gain_stays_tied(
    tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tiny_model("Qwen3ForCausalLM", tie_word_embeddings=True)
    quantize(folder, tmp_path / "out", "weight_only_int8", rotate="hadamard")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in Checkpoint.open(tmp_path / "out").inventory


@pytest.mark.parametrize("architecture", ["SmolLM3ForCausalLM", "Qwen3MoeForCausalLM", "FalconForCausalLM"])
def test_aiakq_serves_a_rotated_model_and_refuses_what_needs_the_original_states(
    architecture: str, tiny_model: Callable[..., Path], quantize: Callable[..., Any], ids: Tensor, tmp_path: Path
) -> None:
    folder = tiny_model(architecture)
    quantize(folder, tmp_path / "out", "weight_only_int8", rotate="hadamard", dtype="fp32")
    llm = LLM(str(tmp_path / "out"), dtype="float32")
    prompt = {"prompt_token_ids": ids[0].tolist()}
    output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    found = torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]])
    wanted = original_logits(folder, ids).log_softmax(-1)[0, :-1].gather(1, ids[0][1:, None])[:, 0]
    assert float((found - wanted).abs().median()) < 0.15  # a rounded router may choose other experts for a token
    with pytest.raises(AiakqError, match="--enable-lora cannot be combined with a rotated model"):
        LLM(str(tmp_path / "out"), enable_lora=True)
    with pytest.raises(AiakqError, match="Embeddings cannot be combined with a rotated model"):
        LLM(str(tmp_path / "out"), runner="pooling")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("rotate", ["hadamard", "learned"])
def test_workers_write_the_bytes_of_one_process(
    rotate: str, tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tiny_model("LlamaForCausalLM")
    for workers in (1, 2):
        quantize(folder, tmp_path / str(workers), "gptq", rotate=rotate, workers=workers)
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_a_report_repeats_the_rotation(
    tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "weight_only_int8", rotate="hadamard", seed=3)
    assert read_recipe(tmp_path / "out" / "aiakq_report.json").options["rotate"] == "hadamard"


def test_an_adapter_is_merged_before_the_rotation_and_a_skipped_layer_is_rotated(
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    dequantized: Callable[..., Any],
    ids: Tensor,
    relative_error: Callable[[Tensor, Tensor], float],
    tmp_path: Path,
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tiny_model("LlamaForCausalLM")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["v_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        wanted = adapted.eval()(ids).logits
    quantize(
        folder,
        tmp_path / "out",
        "weight_only_int8",
        rotate="hadamard",
        lora=tmp_path / "adapter",
        skip=("*.o_proj", "*.down_proj"),
        dtype="fp32",
    )
    assert relative_error(dequantized(tmp_path / "out").logits(ids), wanted) < 0.1
    assert relative_error(original_logits(folder, ids), wanted) > 0.2


def test_a_folded_transform_follows_the_rotation(
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    dequantized: Callable[..., Any],
    ids: Tensor,
    relative_error: Callable[[Tensor, Tensor], float],
    tmp_path: Path,
) -> None:
    folder = tiny_model("LlamaForCausalLM")
    quantize(folder, tmp_path / "out", "awq", bits=8, rotate="hadamard", dtype="fp32")
    assert relative_error(dequantized(tmp_path / "out").logits(ids), original_logits(folder, ids)) < 0.1
