"""Source models of a run: architectures, shards and names of tensors, tokenizers and calibration samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint


def test_any_architecture_with_linears_can_be_quantized(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = tiny_model("GPTNeoXForCausalLM")
    for method in ("gptq", "awq", "smooth_quant", "weight_only_int8"):
        report = quantize(source, tmp_path / method, method)
        assert report.worst.error < 0.25


def test_a_tied_head_stays_tied(tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]) -> None:
    source = tiny_model("Qwen2ForCausalLM")
    quantize(source, tmp_path / "out", "gptq")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config["tie_word_embeddings"]
    assert "lm_head.weight" not in checkpoint.inventory


@pytest.mark.parametrize("method", ["gptq", "smooth_quant"])
def test_files_without_the_models_prefix(
    method: str, quantized: Callable[..., Any], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    """Early OPT files say ``decoder.layers``; the output says what transformers says."""
    from safetensors.torch import load_file, save_file

    source, output, _ = quantized("opt", method)
    old = tmp_path / "in"
    old.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (old / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, old / "model.safetensors")
    quantize(old, tmp_path / "out", method)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


def test_a_sharded_source_gives_the_same_output(
    tiny_model: Callable[..., Path], tmp_path: Path, quantized: Callable[..., Any], quantize: Callable[..., Any]
) -> None:
    """A source in several shards gives the same output as in one."""
    import transformers

    source, output, _ = quantized("llama", "gptq")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path / "in", max_shard_size="200KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "in" / name).write_bytes((source / name).read_bytes())
    quantize(tmp_path / "in", tmp_path / "out", "gptq")
    one, two = Checkpoint.open(output), Checkpoint.open(tmp_path / "out")
    assert set(one.inventory) == set(two.inventory)
    assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.inventory)


def test_without_a_tokenizer_calibration_needs_token_ids(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((tiny_model("LlamaForCausalLM") / name).read_bytes())
    report = quantize(source, tmp_path / "int8", "weight_only_int8")
    assert report.worst is None
    assert all(layer.weight_after for layer in report.layers)
    assert len(report.warnings) == 1
    with pytest.raises(AiakqError) as caught:
        quantize(source, tmp_path / "gptq", "gptq")
    assert caught.value.id == "calibration"
    ids = tmp_path / "ids.txt"
    ids.write_text("5 6 7 8 9 10 11 12\n" * 8)
    quantize(source, tmp_path / "gptq", "gptq", token_ids=ids)


def test_token_ids_of_several_lengths(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    make = torch.Generator().manual_seed(0)
    lines = [torch.randint(3, 250, (length,), generator=make).tolist() for length in (17, 64, 64, 5, 100)]
    path = tmp_path / "token_ids.txt"
    path.write_text("\n".join(",".join(map(str, line)) for line in lines))
    report = quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq", token_ids=path, seqlen=64)
    assert report.tokens == 250
    assert "token_ids.txt" in report.calibration
    assert report.calibration_sha256


def test_samples_longer_than_the_model_can_see_are_cut(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    """Learned positions end; asking for more must not crash in the embedding."""
    source = tiny_model("OPTForCausalLM", max_position_embeddings=48)
    report = quantize(source, tmp_path / "out", "gptq", samples=16, seqlen=64)
    assert report.tokens == 16 * 48
    assert any("48 tokens" in warning for warning in report.warnings)
