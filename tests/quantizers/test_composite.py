"""Multimodal models: their decoder is quantized, all else is copied, and both programs read the result alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audio_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vision_models import PLACEHOLDERS, random_image, reference_logprobs, save_vision_model

from aiakq import LLM, SamplingParams
from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.conversion import convert_checkpoint
from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.model.composite import COMPARED
from aiakq.quantizers.progress import StageProgress
from aiakq.runtime.inspect.inspection import inspect_checkpoint
from tests.composite_models import COMPOSITE, build

#: The decoder's names in files.
EXPERT = re.compile(r"experts\.\d+\.(gate|up|down)_proj\.weight")
INSIDE = ("language_model.model.", "model.language_model.", "model.text_model.", "model.layers.", "model.norm.")


@pytest.fixture(scope="module")
def composite(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            build(kind, made[kind])
            byte_tokenizer.save_pretrained(made[kind])
        return made[kind]

    return make


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def fused_name(match: re.Match[str]) -> str:
    """The tensor that holds a linear of an expert in files of transformers, for most families of one per linear."""
    return f"experts.{'down' if match[1] == 'down' else 'gate_up'}_proj"


def log_probabilities(folder: Path, ids: Tensor) -> Tensor:
    return load_for_scoring(folder, "float32", "cpu").logits(ids).log_softmax(-1)


def in_transformers(folder: Path) -> Any:
    import transformers

    model, info = transformers.AutoModelForMultimodalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def test_every_compared_model_is_built_here() -> None:
    assert COMPARED == set(COMPOSITE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPOSITE)
def test_the_decoder_is_what_transformers_computes(kind: str, composite: Callable[..., Path], ids: Tensor) -> None:
    model = in_transformers(composite(kind))
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.log_softmax(-1)
    assert float((log_probabilities(composite(kind), ids) - expected).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPOSITE)
def test_only_the_decoder_is_quantized(
    kind: str, composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path, ids: Tensor
) -> None:
    pytest.importorskip("compressed_tensors")
    report = quantize(composite(kind), tmp_path / "out", "weight_only_int8")
    before, after = tensors(composite(kind)), tensors(tmp_path / "out")
    linears = Checkpoint.open(tmp_path / "out").quantized_linears()
    assert len(linears) == len(report.layers) and all(name.startswith(INSIDE) for name in linears)
    replaced = {EXPERT.sub(fused_name, f"{name}.weight") for name in linears}
    fused = {EXPERT.sub(fused_name, name) for name in before}
    assert before.keys() - after.keys() == {name for name in before if EXPERT.sub(fused_name, name) in replaced}
    assert replaced <= fused
    for name in before.keys() & after.keys() - {f"{name}.bias" for name in linears}:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    assert (tmp_path / "out" / "processor_config.json").read_bytes()
    if report.not_in_transformers:
        assert kind == "qwen3_vl_moe" and "transformers knows no names for single experts" in report.not_in_transformers
        found, source = log_probabilities(tmp_path / "out", ids), log_probabilities(composite(kind), ids)
        assert 0 < float((found - source).abs().amax(-1).median()) < 0.1  # a router may change its mind about a token
        return
    model = in_transformers(tmp_path / "out")
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.log_softmax(-1)
    assert float((log_probabilities(tmp_path / "out", ids) - expected).abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["smooth_quant", "awq", "gptq"])
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen3_5", "gemma4", "llama4"])
def test_other_methods_are_read_by_transformers(
    kind: str, method: str, composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path, ids: Tensor
) -> None:
    pytest.importorskip("compressed_tensors" if method == "smooth_quant" else "gptqmodel")
    quantize(composite(kind), tmp_path / "out", method)
    found = load_for_scoring(tmp_path / "out", "float32", "cpu").logits(ids)
    source = log_probabilities(composite(kind), ids)
    # Four random layers of Gemma 4, with norms of all that they add, are more sensitive than two of others.
    factor = 4 if kind == "gemma4" else 1
    assert float((source.exp() * (source - found.log_softmax(-1))).sum(-1).mean()) < 0.05 * factor
    if (kind, method) == ("llama4", "awq"):
        card = (tmp_path / "out" / "README.md").read_text()
        assert "transformers 5.23 does not find the experts" in card and "vllm serve" not in card
        return
    model = in_transformers(tmp_path / "out")
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.float()
    # gptqmodel computes in 16 bits; rounding activations of slightly different inputs may move a code.
    assert float((found - expected).norm() / expected.norm()) < (0.06 * factor if method == "smooth_quant" else 0.03)


@pytest.mark.slow
def test_an_image_passes_through_the_towers_of_the_original(
    composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    quantize(composite("llava"), tmp_path / "out", "weight_only_int8")
    models = [in_transformers(folder) for folder in (composite("llava"), tmp_path / "out")]
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    prompt = torch.tensor([[5, *[300] * 4, 9, 40, 41]])
    with torch.inference_mode():
        features = [model.model.get_image_features(pixel_values=pixels).pooler_output[0] for model in models]
        answers = [model(input_ids=prompt, pixel_values=pixels).logits.log_softmax(-1) for model in models]
    assert torch.equal(*features)
    assert 0 < float((answers[0] - answers[1]).abs().max()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_audio", "voxtral"])
def test_a_quantized_model_hears_what_transformers_hears(
    kind: str, quantize: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    source, out = audio_models.save_audio_model(kind, tmp_path / "model"), tmp_path / "out"
    quantize(source, out, "weight_only_int8")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    prompt = {"prompt": f"a{audio_models.MARKS[kind]}b", "multi_modal_data": {"audio": audio_models.sound(0.7, 1)}}
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "cpu_math": "exact"}
    llm = LLM(str(out), **given, num_gpu_blocks_override=40)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    expected = audio_models.reference_logprobs(out, kind, ids, [audio_models.sound(0.7, 1)])
    for at, step in enumerate(output.outputs[0].logprobs, len(output.prompt_token_ids) - 1):
        assert abs(step[ids[at + 1]].logprob - float(expected[at, ids[at + 1]])) < 1e-4
    original = audio_models.reference_logprobs(source, kind, ids, [audio_models.sound(0.7, 1)])
    assert 0 < float((original - expected).abs().max()) < 0.5


@pytest.mark.slow
def test_layers_that_differ_are_read_by_their_names_in_transformers(
    composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path, ids: Tensor
) -> None:
    """config.json has the names of transformers, the file has others."""
    pytest.importorskip("compressed_tensors")
    quantize(composite("llava"), tmp_path / "out", "gptq", layer=("*.layers.0.mlp.*=bits:8",))
    checkpoint = Checkpoint.open(tmp_path / "out")
    widths = {name: checkpoint.read_linear(name).bits for name in checkpoint.quantized_linears()}
    assert {bits for name, bits in widths.items() if ".layers.0.mlp." in name} == {8}
    assert {bits for name, bits in widths.items() if ".layers.0.mlp." not in name} == {4}
    model = in_transformers(tmp_path / "out")
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.log_softmax(-1)
    assert float((log_probabilities(tmp_path / "out", ids) - expected).abs().max()) < 1e-3


@pytest.mark.slow
def test_a_run_is_resumed_to_the_same_bytes(
    composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    quantize(composite("qwen2_vl"), tmp_path / "whole", "awq")
    quick = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu", "group_size": 32, "resume": True}
    options = QuantizeOptions(str(composite("qwen2_vl")), str(tmp_path / "out"), "awq", **quick)

    def stop(progress: StageProgress) -> None:
        if progress.stage == "quantize" and progress.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(options, stop)
    assert quantize_checkpoint(options).resumed_from == 1
    whole, resumed = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_a_quantized_decoder_is_quantized_again(
    composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path, ids: Tensor
) -> None:
    quantize(composite("llava"), tmp_path / "first", "weight_only_int8")
    quantize(tmp_path / "first", tmp_path / "second", "weight_only_int8", group_size=32)
    found, source = log_probabilities(tmp_path / "second", ids), log_probabilities(composite("llava"), ids)
    assert float((found - source).abs().max()) < 0.1


@pytest.mark.slow
def test_a_converted_model_is_read_by_transformers(
    composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path, ids: Tensor
) -> None:
    pytest.importorskip("compressed_tensors")
    quantize(composite("llava"), tmp_path / "gptq", "gptq")
    arguments = ConvertArguments(input=str(tmp_path / "gptq"), output=str(tmp_path / "out"), to="compressed-tensors")
    convert_checkpoint(arguments)
    model = in_transformers(tmp_path / "out")
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.log_softmax(-1)
    assert float((log_probabilities(tmp_path / "gptq", ids) - expected).abs().max()) < 1e-3


@pytest.mark.slow
def test_inspect_runs_no_tower(composite: Callable[..., Path]) -> None:
    report = inspect_checkpoint(str(composite("llava")), device="cpu")
    beside = [layer for layer in report.layers if "vision_tower" in layer.name or "projector" in layer.name]
    assert beside and all(layer.implementation is None for layer in beside)
    inside = [layer for layer in report.layers if layer.name.endswith("q_proj") and "language" in layer.name]
    assert inside and all(layer.implementation for layer in inside)
    assert any(name.startswith("vision_tower.") for name in report.left_out) and report.differences == ()


def refusal(run: Callable[[], object]) -> str:
    with pytest.raises(AiakqError) as caught:
        run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_would_change_the_towers_is_refused(
    composite: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    text = refusal(lambda: quantize(composite("llava"), out, "gptq", rotate="hadamard"))
    assert text.startswith("--rotate cannot be combined with a multimodal model")
    text = refusal(lambda: quantize(composite("llava"), out, "gptq", lora=str(tmp_path)))
    assert text.startswith("--lora cannot be combined with a multimodal model")
    assert not out.exists()


@pytest.mark.parametrize(
    ("outer", "inside", "reason"),
    [
        ("glm4v", "glm4v_text", "aiakq has no native model for its decoder, glm4v_text"),
        ("paligemma", "gemma", "its decoder, gemma, was never compared with the language model of that name"),
    ],
)
def test_other_decoders_are_refused_by_name(
    outer: str, inside: str, reason: str, quantize: Callable[..., Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"model.language_model.norm.weight": torch.ones(8)}, source / "model.safetensors")
    config = {
        "model_type": outer,
        "architectures": ["X"],
        "text_config": {"model_type": inside, "num_hidden_layers": 1},
    }
    (source / "config.json").write_text(json.dumps(config))
    text = refusal(lambda: quantize(source, tmp_path / "out", "gptq"))
    assert text.startswith(f"Quantizing the decoder of {outer} ({reason}) is not supported.")


@pytest.mark.slow
def test_an_image_is_read_by_a_quantized_gemma_3(quantize: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    quantize(save_vision_model("gemma3", tmp_path / "source"), tmp_path / "out", "weight_only_int8")
    llm = LLM(str(tmp_path / "out"), dtype="float32", max_model_len=128, num_gpu_blocks_override=40, cpu_math="exact")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    image = random_image(1)
    prompt = {"prompt": f"see\n{PLACEHOLDERS['gemma3']}and", "multi_modal_data": {"image": image}}
    [output] = llm.generate([prompt], params, use_tqdm=False)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    expected = reference_logprobs(tmp_path / "out", "gemma3", ids, [image])
    steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert all(
        abs(step[token].logprob - float(expected[at, token])) < 1e-4
        for at, (token, step) in enumerate(zip(ids[1:], steps, strict=True))
    )
