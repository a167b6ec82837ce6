"""fp8, mxfp4 and nvfp4: what is written, and what it has in common with files of llm-compressor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.run_report import REPORT_FILE
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig

#: Options, and the preset of compressed-tensors that they mean.
PRESETS: list[tuple[str, dict[str, Any], str]] = [
    ("fp8", {}, "FP8_DYNAMIC"),
    ("fp8", {"activation_scales": "tensor"}, "FP8"),
    ("fp8", {"group_size": 128}, "FP8_BLOCK"),
    ("mxfp4", {}, "MXFP4A16"),
    ("mxfp4", {"activation_bits": 4}, "MXFP4"),
    ("nvfp4", {}, "NVFP4A16"),
    ("nvfp4", {"activation_bits": 4}, "NVFP4"),
]
IDS = [preset for _, _, preset in PRESETS]
ATTENTION = "model.layers.1.self_attn."


@pytest.fixture
def source(tiny_model: Callable[..., Path], fields: dict[str, Any]) -> Path:
    """Blocks of 128 x 128 need a model of such widths."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    return tiny_model("LlamaForCausalLM", **(wide if fields.get("group_size") == 128 else {}))


@pytest.mark.parametrize(("method", "fields", "preset"), PRESETS, ids=IDS)
def test_the_output_is_a_model_of_a_preset(
    method: str,
    fields: dict[str, Any],
    preset: str,
    source: Path,
    tmp_path: Path,
    quantize: Callable[..., Any],
    dequantized: Callable[[Path], Any],
    relative_error: Callable[[Tensor, Tensor], float],
    ids: Tensor,
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    output = tmp_path / "out"
    report = quantize(source, output, method, **fields)
    checkpoint = Checkpoint.open(output)
    stored = checkpoint.config["quantization_config"]
    (scheme,) = QuantizationConfig(**stored).config_groups.values()
    for part in ("weights", "input_activations"):
        ours, theirs = getattr(scheme, part), PRESET_SCHEMES[preset].get(part)
        assert (ours is None) == (theirs is None)
        for key in ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic", "symmetric"):
            assert ours is None or getattr(ours, key) == getattr(theirs, key), (part, key)
    assert report.worst.error < (0.08 if method == "fp8" else 0.3)
    error = relative_error(dequantized(output).logits(ids), dequantized(source).logits(ids))
    assert error < (0.3 if method == "fp8" else 0.8)


def served(folder: Path, ids: Tensor) -> Tensor:
    config = EngineConfig.from_args({"model": str(folder), "dtype": "float32", "device": "cpu", "cpu_math": "exact"})
    return ScoringModel(load_model(config)[0], config).logits(ids).log_softmax(-1)


@pytest.mark.parametrize(
    ("method", "fields"),
    [("fp8", {"activation_bits": 16}), ("mxfp4", {}), ("nvfp4", {"gptq": True})],
    ids=["fp8", "mxfp4", "nvfp4"],
)
def test_mixtures_of_experts_are_served_as_their_dequantized_weights(
    method: str,
    fields: dict[str, Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
    dense_weight: Callable[..., Tensor],
    ids: Tensor,
) -> None:
    source = tiny_model("MixtralForCausalLM", num_hidden_layers=1)
    quantize(source, tmp_path / "out", method, **fields)
    checkpoint = Checkpoint.open(tmp_path / "out")
    names = checkpoint.quantized_linears()
    assert sum(".experts." in name for name in names) == 12
    dense = {f"{name}.weight": dense_weight(checkpoint.read_linear(name)) for name in names}  # type: ignore[arg-type]
    own = {tensor for name in names for tensor in checkpoint.linear_tensors(name).values()}
    dense |= {name: checkpoint.tensor(name).float() for name in checkpoint.inventory if name not in own}
    (tmp_path / "dense").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, tmp_path / "dense/model.safetensors")
    config = {key: value for key, value in checkpoint.config.items() if key not in ("quantization_config", "aiakq")}
    (tmp_path / "dense/config.json").write_text(json.dumps(config))
    assert (served(tmp_path / "out", ids) - served(tmp_path / "dense", ids)).abs().max() < 3e-5


@pytest.mark.parametrize(("method", "fields"), [("mxfp4", {}), ("fp8", {"activation_scales": "tensor"})])
def test_gptq_has_the_smaller_error(
    method: str,
    fields: dict[str, Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
) -> None:
    source = tiny_model("LlamaForCausalLM", num_hidden_layers=1)
    plain = quantize(source, tmp_path / "nearest", method, **fields)
    solved = quantize(source, tmp_path / "gptq", method, gptq=True, targets="own", **fields)
    assert solved.mean_error < 0.97 * plain.mean_error


def test_linears_that_servers_join_share_the_numbers_of_a_whole_linear(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    """vLLM knows one weight_global_scale and one input_global_scale for them."""
    source = tiny_model("LlamaForCausalLM")
    quantize(source, tmp_path / "out", "nvfp4", activation_bits=4)
    checkpoint = Checkpoint.open(tmp_path / "out")
    for name in ("weight_global_scale", "input_global_scale"):
        q, k, v, o = (checkpoint.tensor(f"{ATTENTION}{part}_proj.{name}") for part in "qkvo")
        assert q.dtype == torch.float32 and q.shape == (1,) and torch.equal(q, k) and torch.equal(q, v) and q != o
    weights = Checkpoint.open(source)
    highest = max(float(weights.tensor(f"{ATTENTION}{part}_proj.weight").abs().max()) for part in "qkv")
    assert float(checkpoint.tensor(f"{ATTENTION}q_proj.weight_global_scale")) == pytest.approx(448 * 6 / highest)
    quantize(source, tmp_path / "fp8", "fp8", activation_scales="tensor")
    static = Checkpoint.open(tmp_path / "fp8")
    for name in ("weight_scale", "input_scale"):
        q, k, v, o = (static.tensor(f"{ATTENTION}{part}_proj.{name}") for part in "qkvo")
        assert torch.equal(q, k) and torch.equal(q, v) and q != o


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"activation_scales": "tensor"}, {"activation_bits": 16}], ids=str)
def test_transformers_reads_8_bit_floats(
    fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    output = tmp_path / "out"
    quantize(tiny_model("LlamaForCausalLM"), output, "fp8", **fields)
    load = transformers.AutoModelForCausalLM.from_pretrained
    _, info = load(output, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_what_is_not_calibrated_needs_no_tokenizer(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any], quantized: Callable[..., Any]
) -> None:
    source, output, _ = quantized("llama", "nvfp4")
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in source.iterdir():
        if "token" not in path.name:
            (bare / path.name).write_bytes(path.read_bytes())
    quantize(bare, tmp_path / "out", "nvfp4")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("nvfp4", {"gptq": True, "activation_bits": 4, "sweeps": 0}),
        ("fp8", {"activation_scales": "tensor"}),
        ("nvfp4", {"calibration": "prose.txt", "gptq": False}),
    ],
)
def test_a_report_repeats_the_run(
    method: str, fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    if "calibration" in fields:
        (tmp_path / "prose.txt").write_text("A text to calibrate on, of some words. " * 200)
        fields = {**fields, "calibration": str(tmp_path / "prose.txt")}
    source = tiny_model("LlamaForCausalLM", num_hidden_layers=1)
    quantize(source, tmp_path / "one", method, **fields)
    options = QuantizeOptions.from_recipe(
        tmp_path / "one" / REPORT_FILE, input=str(source), output=str(tmp_path / "two"), evaluate=False, device="cpu"
    )
    quantize_checkpoint(options)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


def test_layers_may_be_other_floats_and_the_output_layer_integers(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
    dequantized: Callable[[Path], Any],
    relative_error: Callable[[Tensor, Tensor], float],
    ids: Tensor,
) -> None:
    from aiakq.evaluation.scoring import load_for_scoring

    output = tmp_path / "out"
    layers = ("model.layers.0.mlp.*=fp8", "model.layers.1.mlp.*=skip")
    quantize(tiny_model("LlamaForCausalLM"), output, "nvfp4", activation_bits=4, layer=layers, lm_head=8)
    checkpoint = Checkpoint.open(output)
    schemes = {name: checkpoint.read_linear(name).scheme for name in checkpoint.quantized_linears()}
    assert schemes["model.layers.0.mlp.up_proj"] == "fp8a8" and schemes["lm_head"] == "w8a16"
    assert schemes[f"{ATTENTION}q_proj"] == "lut4a4" and "model.layers.1.mlp.up_proj" not in schemes
    assert checkpoint.config["quantization_config"]["format"] == "mixed-precision"
    got, wanted = load_for_scoring(output, "float32", "cpu").logits(ids), dequantized(output).logits(ids)
    assert relative_error(got, wanted) < 0.05


@pytest.mark.parametrize("how", ["bits:8", "group:32", "asym", "int8"])
def test_other_words_for_layers_are_refused(
    how: str, tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    with pytest.raises(AiakqError, match="fp8, mxfp4, nvfp4 or skip"):
        quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "nvfp4", layer=(f"*.up_proj={how}",))


def test_tensor_parallel_ranks_get_whole_groups(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = tiny_model("LlamaForCausalLM", intermediate_size=144)
    report = quantize(source, tmp_path / "out", "mxfp4", tp=2)
    assert report.padded == {"intermediate_size": (144, 192)}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["intermediate_size"] == 192
