"""Checkpoints in other formats: the same numbers and logits, in files that other programs read; what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.conversion import convert_checkpoint
from aiakq.convert.report import ConversionReport
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import as_floats

FIXTURES = Path(__file__).parents[1] / "formats" / "fixtures"


def convert(source: Path, output: Path, to: str, **options: Any) -> ConversionReport:
    return convert_checkpoint(ConvertArguments(input=str(source), output=str(output), to=to, **options))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every linear's weights in float32, quantized or not."""
    checkpoint = Checkpoint.open(folder)
    names = checkpoint.quantized_linears()
    found = {name: as_floats(checkpoint.read_linear(name)) for name in names}
    for name in checkpoint.inventory:
        if name.endswith("_proj.weight"):
            found.setdefault(name.removesuffix(".weight"), checkpoint.tensor(name).float())
    return found


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


EXACT = [
    ("gq-desc", "gptq_v2", "w4a16 g64 sym"),
    ("aawq", "compressed-tensors", "w4a16 g64 asym"),
    ("gq-asym-v1", "awq", "w4a16 g64 asym"),
    ("gq-w3", "awq_gemv_fast", "w4a16 g64 asym"),
    ("lc-w8a16", "gptq", "w8a16 channel sym"),
    ("lc-sq", "compressed-tensors", "w8a8 channel sym"),
    ("gq-dyn", "compressed-tensors", "w4a16 g64 sym, some layers differ"),
    ("gq-lmhead", "gptq_v2", "w4a16 g64 sym, some layers differ"),
    ("ar-auto_gptq-W3A16", "fp32", "float32"),
    ("gq-desc", "fp32", "float32"),
    ("lc-mxfp4", "compressed-tensors", "lut4a4 g32 e2m1 e8m0"),
    ("lc-nvfp4", "compressed-tensors", "lut4a4 g16 e2m1 e4m3"),
    ("quanto-int8", "gptq", "w8a16 channel sym"),
    ("ao-int8", "gptq", "w8a16 channel sym"),
    ("bnb-nf4", "fp32", "float32"),
    ("hqq-3bit-axis0", "fp32", "float32"),
]


def test_embeddings_stay_floats_in_formats_of_linears(tmp_path: Path) -> None:
    with pytest.raises(AiakqError, match=r"model.embed_tokens .* expect embeddings as floats") as caught:
        convert(FIXTURES / "mlx-4bit", tmp_path / "out", "gptq_v2", lossy=True)
    assert caught.value.id == "conversion_inexact" and "--lossy" not in str(caught.value)


@pytest.mark.parametrize("name", ["lc-nvfp4", "lc-mxfp4", "lc-mxfp8", "lc-sq"])
def test_activations_that_are_no_longer_rounded_are_named(name: str, tmp_path: Path) -> None:
    report = convert(FIXTURES / name, tmp_path / "out", "gptq", lossy=True)
    assert all("activations are no longer rounded" in layer.change for layer in report.layers)
    assert any("rounds the activations of 7 layers" in note for note in report.notes)


@pytest.mark.parametrize("name", ["mlx-4bit", "mlx-mixed"])
def test_no_key_of_mlx_says_that_floats_are_quantized(name: str, tmp_path: Path) -> None:
    assert convert(FIXTURES / name, tmp_path / "out", "fp32").exact
    source, written = Checkpoint.open(FIXTURES / name), Checkpoint.open(tmp_path / "out")
    assert "quantization" in source.config and "quantization" not in written.config and written.spec is None
    for linear in source.quantized_linears():
        assert torch.equal(written.tensor(f"{linear}.weight"), as_floats(source.read_linear(linear)))


@pytest.mark.parametrize(("name", "to", "scheme"), EXACT, ids=lambda each: str(each).replace(" ", "_"))
def test_every_weight_is_the_same_number(name: str, to: str, scheme: str, tmp_path: Path) -> None:
    source, output = FIXTURES / name, tmp_path / "out"
    report = convert(source, output, to)
    assert report.exact and report.scheme == scheme
    assert same_weights(source, output)
    written = Checkpoint.open(output)
    assert written.spec is None if to == "fp32" else written.spec.format == to
    for tensor in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"):
        wanted = Checkpoint.open(source).tensor(tensor)
        found = written.tensor(tensor)
        assert torch.equal(found.float(), wanted.float()) and (to == "fp32" or found.dtype == wanted.dtype)
    assert json.loads((output / "aiakq_conversion.json").read_text())["exact"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("name", "to"), [("gq-desc", "gptq_v2"), ("gq-dyn", "compressed-tensors"), ("aawq", "bf16")])
def test_logits_stay(name: str, to: str, tmp_path: Path) -> None:
    from aiakq.evaluation.scoring import ScoringModel
    from aiakq.runtime.build.model_loader import load_model
    from aiakq.runtime.config.engine import EngineConfig

    convert(FIXTURES / name, tmp_path / "out", to)
    exact = {"dtype": "float32", "device": "cpu", "cpu_math": "exact"}
    config = EngineConfig.from_args({"model": str(tmp_path / "out")} | exact)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    found = ScoringModel(load_model(config)[0], config).logits(expected["input_ids"])[0]
    wanted = expected["logits_dequantized_fp32"]
    assert ((found - wanted).norm() / wanted.norm()).item() < (1e-2 if to == "bf16" else 1e-5)


def refused(source: Path, output: Path, to: str, **options: Any) -> str:
    with pytest.raises(AiakqError) as caught:
        convert(source, output, to, **options)
    assert "\n" not in str(caught.value) and not output.exists()
    return f"{caught.value.id}: {caught.value}"


@pytest.mark.parametrize(
    ("name", "to", "reason", "remedy"),
    [
        ("gq-desc", "awq", "act-order", "--lossy"),
        ("aawq", "gptq", "zero points", "Write gptq_v2 or"),
        ("gq-w8", "awq", "4 bits", "compressed-tensors"),
        ("gq-dyn", "awq", "4 bits", "compressed-tensors"),
        ("lc-sq", "gptq", "activations", "--to bf16"),
        ("aawq", "fp8", "a quantization", "aiakq quantize"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(name: str, to: str, reason: str, remedy: str, tmp_path: Path) -> None:
    text = refused(FIXTURES / name, tmp_path / "out", to)
    assert text.startswith("conversion_inexact") and reason in text and remedy in text
    assert list(tmp_path.iterdir()) == []


def test_models_that_are_not_quantized_and_unknown_formats_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model("LlamaForCausalLM")
    assert "aiakq quantize" in refused(source, tmp_path / "out", "awq")
    assert "gptq_v2" in refused(FIXTURES / "aawq", tmp_path / "out", "ggml")
    assert "output_is_input" in refused(FIXTURES / "aawq", FIXTURES / "aawq" / "new", "gptq_v2")


def test_with_lossy_the_error_of_every_layer_is_reported(tmp_path: Path) -> None:
    source, output = FIXTURES / "gq-desc", tmp_path / "out"
    report = convert(source, output, "awq", lossy=True)
    before, after = weights(source), weights(output)
    assert len(report.layers) == 7 and not report.exact
    for layer in report.layers:
        gap = after[layer.name] - before[layer.name]
        assert layer.relative_error == pytest.approx(float(gap.norm() / before[layer.name].norm()), rel=1e-4)
        assert layer.largest_error == pytest.approx(float(gap.abs().max()), rel=1e-4)
        assert 0.01 < layer.relative_error < 0.1 and layer.change == "weights were rounded again"
    assert "rounded: their relative error" in (output / "README.md").read_text()


def test_only_the_rounding_of_activations_goes_if_codes_can_stay(tmp_path: Path) -> None:
    report = convert(FIXTURES / "lc-sq", tmp_path / "out", "compressed-tensors")
    assert report.exact
    report = convert(FIXTURES / "lc-sq", tmp_path / "eight", "gptq", lossy=True)
    assert report.worst is None and not report.exact and "activations" in report.notes[0]
    assert same_weights(FIXTURES / "lc-sq", tmp_path / "eight")


def test_groups_and_bits_can_be_chosen(tmp_path: Path) -> None:
    report = convert(FIXTURES / "aawq", tmp_path / "out", "gptq_v2", bits=8, group_size=32)
    assert report.exact and report.scheme == "w8a16 g32 asym"
    assert same_weights(FIXTURES / "aawq", tmp_path / "out")
    assert "shared by 64 inputs" in refused(FIXTURES / "aawq", tmp_path / "no", "gptq_v2", group_size=128)


def test_config_files_and_notes(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(FIXTURES / "aawq", source)
    config = json.loads((source / "config.json").read_text())
    config["aiakq"] = {"version": "0.0.1", "method": "awq", "rotation": "hadamard"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "aiakq_report.json").write_text('{"method": "awq"}')
    (source / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (source / "modeling_x.py").write_text("x = 1\n")
    (source / "tokenizer.json").write_text("{}")
    (source / "quant_config.json").write_text("{}")
    (source / "aiakq_manifest.json").write_text('{"files": {}}')
    convert(source, tmp_path / "out", "gptq_v2")
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert new["quantization_config"]["quant_method"] == "gptq"
    assert new["aiakq"]["method"] == "awq" and new["aiakq"]["rotation"] == "hadamard"
    assert new["aiakq"]["source"] == {"format": "awq", "scheme": "w4a16 g64 asym", "method": "awq"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"aiakq_report.json", "modeling_x.py", "tokenizer.json", "quantize_config.json"} <= names
    assert "quant_config.json" not in names
    assert "license: mit" in (tmp_path / "out" / "README.md").read_text()
    convert(source, tmp_path / "floats", "bf16")
    new = json.loads((tmp_path / "floats" / "config.json").read_text())
    assert "quantization_config" not in new and new["dtype"] == "bfloat16" and "method" not in new["aiakq"]
    assert Checkpoint.open(tmp_path / "floats").spec is None


def test_shards_and_several_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a linear may lie in several shards, and every step is small."""
    from aiakq.convert import conversion

    source = tmp_path / "in"
    shutil.copytree(FIXTURES / "aawq", source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    monkeypatch.setattr(conversion, "_STEP", 1000)
    convert(source, tmp_path / "out", "gptq_v2")
    convert(FIXTURES / "aawq", tmp_path / "one", "gptq_v2")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "one"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_write_that_does_not_read_back_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiakq.formats import gptq

    write = gptq.write

    def damaged(*given: Any) -> dict[str, torch.Tensor]:
        tensors = write(*given)
        tensors["qweight"][0, 0] ^= 1
        return tensors

    monkeypatch.setattr(gptq, "write", damaged)
    assert refused(FIXTURES / "aawq", tmp_path / "out", "gptq_v2").startswith("not_as_written")


def test_layers_that_are_left_out_stay_so(tmp_path: Path) -> None:
    """gq-dyn leaves down_proj as it is."""
    convert(FIXTURES / "gq-dyn", tmp_path / "out", "compressed-tensors")
    written = Checkpoint.open(tmp_path / "out")
    assert written.spec is not None
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj"
        assert written.spec.for_layer(name) is None and f"{name}.weight" in written.inventory
    assert written.spec.for_layer("model.layers.0.mlp.up_proj").bits == 4
    assert written.spec.for_layer("model.layers.1.mlp.up_proj").bits == 8


def test_8_bit_floats_keep_their_codes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from fp8_files import Published, in_blocks, publish

    source = tmp_path / "in"
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    blocks = Published(config, lambda weight: in_blocks(weight, 128, 128, "weight_scale_inv"))
    publish(tiny_model("LlamaForCausalLM"), source, blocks)
    report = convert(source, tmp_path / "out", "compressed-tensors")
    assert report.exact and same_weights(source, tmp_path / "out")
    again = convert(tmp_path / "out", tmp_path / "back", "fp8")
    assert again.exact
    ours, theirs = (Checkpoint.open(folder) for folder in (tmp_path / "back", source))
    for name in ours.inventory:
        assert torch.equal(ours.tensor(name).float(), theirs.tensor(name).float())


def test_gpt2_is_written_as_it_is_published(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Its 16-bit files hold [K, N]."""
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    source = tiny_model("GPT2LMHeadModel")
    options = {"samples": 2, "seqlen": 32, "evaluate": False, "device": "cpu"}
    quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "eight"), "weight_only_int8", **options))
    convert(tmp_path / "eight", tmp_path / "out", "fp32")
    ours, theirs = (Checkpoint.open(folder) for folder in (tmp_path / "out", source))
    name = "transformer.h.0.attn.c_attn.weight"
    found, wanted = ours.tensor(name), theirs.tensor(name).float()
    assert found.shape == wanted.shape and float((found - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize(
    ("source", "to", "options", "said"),
    [
        ("lc-nvfp4", "compressed-tensors", {"bits": 8}, "--bits 8 makes integers of them. Leave --bits away"),
        ("lc-mxfp4", "compressed-tensors", {"group_size": 64, "lossy": True}, "in groups of 32, not 64. Leave"),
        (
            "hqq-4bit",
            "awq_gemv",
            {"group_size": 40, "lossy": True},
            "96 inputs, and these AWQ files hold whole groups of 40",
        ),
        (
            "hqq-4bit",
            "awq_gemv_fast",
            {"lossy": True},
            "multiples of 4 outputs and 64 inputs. Use --to compressed-tensors",
        ),
    ],
)
def test_what_bits_groups_and_shapes_cannot_be_is_said(
    source: str, to: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(AiakqError) as caught:
        convert(FIXTURES / source, tmp_path / "out", to, **options)
    assert caught.value.id == "conversion_inexact" and said in str(caught.value)


def test_bits_of_floats_become_those_of_integers(tmp_path: Path) -> None:
    convert(FIXTURES / "lc-mxfp4", tmp_path / "out", "compressed-tensors", bits=4, group_size=64, lossy=True)
    written = Checkpoint.open(tmp_path / "out").spec
    assert written is not None and (written.scheme, written.group_size) == ("w4a16", 64)


@pytest.mark.parametrize("to", ["bf16", "compressed-tensors"])
def test_a_bias_that_the_model_has_not_is_left_out_if_it_is_zero(tmp_path: Path, to: str) -> None:
    """AutoGPTQ writes zeros; anything else is refused under the name of the input."""
    name, source = "model.layers.0.mlp.up_proj", tmp_path / "source"
    shutil.copytree(FIXTURES / "gq-w8", source)
    tensors = load_file(source / "model.safetensors")
    for value in (0.0, 0.5):
        bias = torch.full((512,), value, dtype=torch.float16)
        save_file({**tensors, f"{name}.bias": bias}, source / "model.safetensors")
        if value:
            with pytest.raises(AiakqError, match=f"{name}.bias is not zero") as caught:
                convert(source, tmp_path / "refused", to)
            assert str(source) in str(caught.value) and "partial" not in str(caught.value)
        else:
            convert(source, tmp_path / "output", to)
            assert f"{name}.bias" not in Checkpoint.open(tmp_path / "output").inventory


def test_floats_of_torchao_in_16_bits_are_rounded_as_it_rounds_them(tmp_path: Path) -> None:
    source = FIXTURES / "ao-f8"
    convert(source, tmp_path / "output", "fp32")
    stored = load_file(source / "model.safetensors")
    for name, found in weights(tmp_path / "output").items():
        exact = stored[f"{name}._weight_qdata"].float() * stored[f"{name}._weight_scale"].float()
        assert torch.equal(found, exact.bfloat16().float()) and not torch.equal(found, exact)
