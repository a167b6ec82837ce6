"""Calibration with images: what the blocks see is what transformers computes, and the bytes depend on nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.calibration.image_samples import ImageSamples, load_image_samples
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.outer_layers import capture
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.progress import StageProgress
from aiakq.quantizers.tuning.models import Teacher
from tests.vision_models import PLACEHOLDERS, random_image, reference, save_vision_model

KINDS = ("llava", "idefics3", "smolvlm", "mistral3", "internvl", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
KINDS += ("qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for seed in range(3):
        random_image(seed).save(folder / f"{seed}.png")
    (folder / "notes.txt").write_text("not an image")
    rows = [{"image": f"{seed}.png", "text": f"What is {seed}?", "answer": "Noise."} for seed in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_vision_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def loaded(folder: Path, data: Path, count: int = 4, **fields: Any) -> ImageSamples:
    options = QuantizeOptions(str(folder), "out", "gptq", calibration_images=str(data), device="cpu", **fields)
    return load_image_samples(options, Checkpoint.open(folder), vocabulary(folder), count)


def vocabulary(folder: Path) -> int:
    size: int = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    return size


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def image_token(folder: Path) -> int:
    raw = json.loads((folder / "config.json").read_text())
    token: int = raw.get("image_token_id", raw.get("image_token_index"))
    return token


def with_tokens(sample: Tensor, folder: Path) -> list[int]:
    """The ids of a sample as transformers gets them."""
    ids: list[int] = sample.masked_fill(sample >= vocabulary(folder), image_token(folder)).tolist()
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_computes_what_transformers_does(kind: str, seeing: Any, tmp_path: Path) -> None:
    """Inputs of all blocks, and predictions, of an image and of a text as long."""
    random_image(7).save(tmp_path / "a.png")
    folder = seeing(kind)
    found = loaded(folder, tmp_path)
    [sample] = found.samples
    assert found.num_images == 1 and found.features.embeddings.shape[1] > 0
    model = SourceModel(Checkpoint.open(folder), torch.float32, torch.device("cpu"))
    model.features = found.features
    samples = [sample, found.features.as_text(sample)]
    reference_model, given = reference(folder, kind, with_tokens(sample, folder), [random_image(7)], "sdpa")
    text = {"input_ids": samples[1][None]}
    expected = [inputs_of_blocks(reference_model, each) for each in (given, text)]

    activations = capture(model, [ids[None] for ids in samples], lambda done: None)
    for index, block in enumerate(model.blocks):
        for number, inputs in enumerate(expected):
            torch.testing.assert_close(activations.hidden[number], inputs[index], rtol=1e-5, atol=1e-5)
        model.load(block, model.block_prefix(index))
        activations.advance(block, index)
        model.drop(block)
    teacher = Teacher(model, samples, HiddenStates(), lambda done, total: None)
    for number, each in enumerate((given, text)):
        with torch.inference_mode():
            logits = reference_model(**each).logits[0]
        assert float((teacher.log_probabilities([number])[0] - logits.log_softmax(-1)).abs().max()) < 3e-5


def inputs_of_blocks(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """The hidden states [1, T, hidden] that transformers' model gives to each block of its decoder."""
    seen: list[Tensor] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    decoder = model.get_decoder()
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in decoder.layers]
    try:
        with torch.inference_mode():
            model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def test_samples_are_chosen_by_seed_and_content(seeing: Any, pictures: Path, tmp_path: Path) -> None:
    folder = seeing("idefics3")
    first, again = (loaded(folder, pictures / "rows.jsonl", count=2) for _ in range(2))
    assert first.digest == again.digest and first.num_images == 2
    assert [ids.tolist() for ids in first.samples] == [ids.tolist() for ids in again.samples]
    assert loaded(folder, pictures / "rows.jsonl", count=2, seed=5).digest != first.digest
    for seed in range(3):  # other names, in another order
        (tmp_path / f"{9 - seed}.png").write_bytes((pictures / f"{seed}.png").read_bytes())
    assert loaded(folder, tmp_path).digest == loaded(folder, pictures).digest
    short = loaded(folder, pictures, seqlen=9)
    assert [len(ids) for ids in short.samples] == [9] * 3


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("idefics3", method) for method in ("weight_only_int8", "smooth_quant", "awq", "gptq")),
        *(("qwen3_vl", method) for method in ("smooth_quant", "awq", "gptq")),
        *(("gemma3", method) for method in ("awq", "gptq")),
        ("qwen2_5_vl", "awq"),
        ("qwen3_5", "gptq"),
    ],
)
def test_methods_are_calibrated_on_images(
    kind: str, method: str, seeing: Any, pictures: Path, quantize: Any, tmp_path: Path
) -> None:
    few = {"samples": 6, "seqlen": 32} | ({"sweeps": 0} if method == "gptq" else {})
    report = quantize(seeing(kind), tmp_path / "out", method, calibration_images=str(pictures), **few)
    assert report.images == 3 and "3 images of" in report.calibration and "the bundled text" in report.calibration
    text = quantize(seeing(kind), tmp_path / "text", method, **few)
    assert text.images == 0 and text.layers[0].error != report.layers[0].error
    assert (bytes_of(tmp_path / "out") == bytes_of(tmp_path / "text")) is (method == "weight_only_int8")
    llm = LLM(str(tmp_path / "out"), dtype="float32", max_model_len=256, num_gpu_blocks_override=40)
    prompt = {"prompt": f"See {PLACEHOLDERS[kind]}.", "multi_modal_data": {"image": random_image(1)}}
    [output] = llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(("kind", "more"), [("llava", {}), ("qwen3_vl", {"importance": "gradient"})])
def test_the_bytes_are_the_same_again_with_workers_ranks_and_after_an_interruption(
    kind: str, more: dict[str, Any], seeing: Any, pictures: Path, quantize: Any, quick: dict[str, Any], tmp_path: Path
) -> None:
    folder: Path = seeing(kind)
    given: dict[str, Any] = {"calibration_images": str(pictures)}
    given |= {"samples": 4, "seqlen": 16, "sweeps": 0, **more}
    quantize(folder, tmp_path / "one", "gptq", **given)
    expected = bytes_of(tmp_path / "one")
    for number, other in enumerate(({}, {"workers": 2}, {"tp": 2})):
        quantize(folder, tmp_path / f"{number}", "gptq", **given, **other)
        assert bytes_of(tmp_path / f"{number}") == expected, other

    def interrupt(stage: StageProgress) -> None:
        if stage.stage == "quantize" and stage.done == 1:
            raise KeyboardInterrupt

    options = {**quick, "group_size": 32, "resume": True, **given}
    resumed = QuantizeOptions(str(folder), str(tmp_path / "resumed"), "gptq", **options)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(resumed, interrupt)
    assert quantize_checkpoint(resumed).resumed_from == 1
    assert bytes_of(tmp_path / "resumed") == expected


def test_models_whose_images_are_not_computed_are_refused(
    seeing: Any, pictures: Path, quantize: Any, tiny_model: Any, tmp_path: Path
) -> None:
    given = {"calibration_images": str(pictures)}
    with pytest.raises(AiakqError, match="--calibration-images .* the model reads text only"):
        quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq", **given)
    with pytest.raises(AiakqError, match="--tune"):
        quantize(seeing("llava"), tmp_path / "out", "gptq", tune="4steps", **given)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2.* no JSON"),
        ("[]", "line 2.* names no image"),
        ('{"image": "no.png"}', r"line 2.* there is no file no\.png"),
        ('{"image": "0.png", "label": 1}', "line 2.* it has 'label'"),
        ('{"image": "0.png", "text": 1}', "line 2.* is no text"),
        ('{"image": "notes.txt"}', "line 2.* no image in one of the formats"),
        (json.dumps({"image": "long" * 100}), "line 2.* there is no file long"),
        (r'{"image": "0.png", "text": "\ud800"}', "line 2.* half a character"),
    ],
)
def test_unusable_data_is_refused_with_its_line(line: str, reason: str, seeing: Any, pictures: Path) -> None:
    (pictures / "broken.jsonl").write_text(f'{{"image": "0.png"}}\n{line}\n')
    with pytest.raises(AiakqError, match=reason):
        loaded(seeing("llava"), pictures / "broken.jsonl")


def test_an_empty_folder_is_refused(seeing: Any, tmp_path: Path) -> None:
    with pytest.raises(AiakqError, match="it holds no image"):
        loaded(seeing("llava"), tmp_path)


def test_json_lines_may_have_a_byte_order_mark_and_line_separators(seeing: Any, pictures: Path) -> None:
    row = json.dumps({"image": "0.png", "text": "one\u2028two\x85three"}, ensure_ascii=False)
    (pictures / "separators.jsonl").write_text(f"{row}\r\n\n{row}\n", encoding="utf-8-sig")
    assert len(loaded(seeing("llava"), pictures / "separators.jsonl").samples) == 2


def test_tokens_without_embeddings_are_refused_and_not_taken_for_images(seeing: Any, pictures: Path) -> None:
    folder = seeing("llava")
    options = QuantizeOptions(str(folder), "out", "gptq", calibration_images=str(pictures), device="cpu")
    with pytest.raises(AiakqError, match=r"the tokenizer made the id \d+, outside 0\.\.19"):
        load_image_samples(options, Checkpoint.open(folder), 20, 1)


def test_what_has_the_name_of_an_image_and_cannot_be_read_is_refused(seeing: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(AiakqError, match=r"a\.png.*"):
        loaded(seeing("llava"), tmp_path)
