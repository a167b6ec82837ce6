"""GGUF files rounded with calibration: smaller error than nearest codes, the sizes that were planned, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.conversion import convert_checkpoint
from aiakq.convert.gguf.block_plan import block_spec, block_type, blocks_folder
from aiakq.convert.gguf.quantization import quantize_to_gguf
from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model.folder import gguf_folder
from aiakq.quantizers.dry_run import dry_run
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.progress import StageProgress
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig

QUICK = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def options(source: Path, output: Path, **more: Any) -> QuantizeOptions:
    return QuantizeOptions(str(source), str(output), "gguf", **{**QUICK, **more})


def served(model: Path) -> torch.Tensor:
    """Log-probabilities of a model in the engine."""
    config = EngineConfig.from_args({"model": str(model), "dtype": "float32", "device": "cpu", "cpu_math": "exact"})
    return ScoringModel(load_model(config)[0], config).logits(torch.arange(3, 19)[None]).log_softmax(-1)


def kinds(path: Path) -> dict[str, str]:
    return {name: tensor.kind.name for name, tensor in GGUFFile.open(path).tensors.items()}


def test_the_file_has_the_kinds_of_a_conversion_and_other_codes(tiny_model, tmp_path: Path) -> None:
    source, output = tiny_model("LlamaForCausalLM", **WIDE), tmp_path / "new" / "model.gguf"
    report = quantize_to_gguf(options(source, output))
    assert [path.name for path in output.parent.iterdir()] == ["model.gguf"]
    assert report.bytes_after == output.stat().st_size
    assert report.scheme.startswith("Q4_K_M") and len(report.layers) == 14
    nearest = tmp_path / "nearest.gguf"
    convert_checkpoint(ConvertArguments(input=str(source), output=str(nearest), to="gguf", gguf_type="q4_k_m"))
    assert kinds(output) == kinds(nearest)
    assert {"Q4_K", "Q6_K"} <= set(kinds(output).values())
    ours, theirs = Checkpoint.open(gguf_folder(output)), Checkpoint.open(gguf_folder(nearest))
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(ours.read_linear(name).codes, theirs.read_linear(name).codes)


def test_rounding_without_calibration_is_that_of_a_conversion(tiny_model, tmp_path: Path) -> None:
    source, output, nearest = tiny_model("LlamaForCausalLM", **WIDE), tmp_path / "out.gguf", tmp_path / "n.gguf"
    quantize_to_gguf(options(source, output, gptq=False, gguf_type="q5_k_m"))
    convert_checkpoint(ConvertArguments(input=str(source), output=str(nearest), to="gguf", gguf_type="q5_k_m"))
    ours, theirs = GGUFFile.open(output), GGUFFile.open(nearest)
    for name in ours.tensors:
        assert torch.equal(ours.read(name), theirs.read(name)), name


@pytest.mark.parametrize("kind", ["q4_k_m", "q4_0", "q8_0"])
def test_calibration_lowers_the_error_of_layers(tiny_model, tmp_path: Path, kind: str) -> None:
    source = tiny_model("LlamaForCausalLM", **WIDE)

    def error(**more: Any) -> float:
        found = quantize_to_gguf(options(source, tmp_path / "out.gguf", gguf_type=kind, overwrite=True, **more))
        assert found.mean_error is not None
        return found.mean_error

    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(map(str, row)) for row in torch.randint(3, 200, (8, 64)).tolist()))
    assert error(token_ids=str(ids)) < 0.95 * error(token_ids=str(ids), gptq=False)


def test_experts_are_rounded_and_stacked(tiny_model, tmp_path: Path) -> None:
    source, output = tiny_model("MixtralForCausalLM"), tmp_path / "out.gguf"
    report = quantize_to_gguf(options(source, output, gguf_type="q4_0"))
    assert {"Q4_0", "F32"} <= set(kinds(output).values())
    assert any(".experts." in layer.name for layer in report.layers)
    convert_checkpoint(ConvertArguments(input=str(output), output=str(tmp_path / "floats"), to="fp32"))
    assert (served(output) - served(tmp_path / "floats")).abs().max() < 3e-5


def test_a_resumed_run_gives_the_same_bytes(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM", **WIDE)

    def stop(progress: StageProgress) -> None:
        if progress.stage == "quantize" and progress.done == 1:
            raise KeyboardInterrupt

    quantize_to_gguf(options(source, tmp_path / "whole.gguf"))
    asked = options(source, tmp_path / "out" / "m.gguf", resume=True)
    with pytest.raises(KeyboardInterrupt):
        quantize_to_gguf(asked, stop)
    assert not (tmp_path / "out" / "m.gguf").exists()
    assert quantize_to_gguf(asked).resumed_from == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["m.gguf"]
    ours, theirs = GGUFFile.open(tmp_path / "out" / "m.gguf"), GGUFFile.open(tmp_path / "whole.gguf")
    assert list(ours.tensors) == list(theirs.tensors)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.tensors)


def test_a_dry_run_says_the_size(tiny_model, tmp_path: Path) -> None:
    source, output = tiny_model("LlamaForCausalLM", **WIDE), tmp_path / "out.gguf"
    asked = options(source, output)
    planned = dry_run(blocks_folder(asked), lambda prepared: block_spec(prepared, block_type(asked)))
    assert not output.exists()
    quantize_to_gguf(asked)
    assert planned.output_bytes == output.stat().st_size
    assert planned.peak_memory_bytes is not None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"bits": 4}, "--bits"),
        ({"layer": ("*=bits:8",)}, "--layer"),
        ({"tp": 2}, "-tp"),
        ({"act_order": "static"}, "--act-order"),
        ({"scale_search": "minmax"}, "--scale-search"),
        ({"format": "gptq"}, "--format"),
    ],
)
def test_options_that_say_what_the_type_says_are_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(AiakqError) as caught:
        options(tmp_path, tmp_path / "out.gguf", **more)
    assert says in str(caught.value)


def test_what_a_file_does_not_hold_is_refused_before_anything_is_rounded(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM", hidden_act="gelu")
    given, stages = options(source, tmp_path / "out.gguf"), set()
    for run in (
        lambda: quantize_to_gguf(given, lambda progress: stages.add(progress.stage)),
        lambda: dry_run(blocks_folder(given), lambda prepared: block_spec(prepared, block_type(given))),
    ):
        with pytest.raises(AiakqError) as caught:
            run()
        assert caught.value.id == "gguf_not_written"
    assert stages == {"load"}
    assert not list(tmp_path.glob("*.gguf*"))


def test_names_and_types_that_cannot_be_are_refused(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    for output, more, says in (
        ("folder", {}, "ends with .gguf"),
        ("out.gguf", {"gguf_type": "f16"}, "--gguf-type"),
        ("out.gguf", {"gguf_type": ""}, "--gguf-type is '', which is not one of q8_0, q4_0"),
        ("out.gguf", {"gguf_type": "auto"}, "--gguf-type is 'auto', which is not one of q8_0, q4_0"),
        ("out.gguf", {"gguf_type": "nonsense"}, "--gguf-type"),
    ):
        with pytest.raises(AiakqError) as caught:
            quantize_to_gguf(options(source, tmp_path / output, **more))
        assert says in str(caught.value)
    (tmp_path / "there.gguf").touch()
    with pytest.raises(AiakqError) as caught:
        quantize_to_gguf(options(source, tmp_path / "there.gguf"))
    assert caught.value.id == "output_exists"
    with pytest.raises(AiakqError, match="gguf"):
        quantize_checkpoint(options(source, tmp_path / "out.gguf"))
    with pytest.raises(AiakqError, match="gguf-type"):
        QuantizeOptions(str(source), "out", "gptq", gguf_type="q4_0")


def test_a_file_in_parts_has_the_blocks_of_one(tiny_model, tmp_path: Path) -> None:
    source, output = tiny_model("LlamaForCausalLM", **WIDE), tmp_path / "m.gguf"
    report = quantize_to_gguf(options(source, output, gptq=False, gguf_type="q8_0", max_shard_size="0.2MB"))
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1 and report.output == str(parts[0]) and not output.exists()
    assert report.bytes_after == sum(path.stat().st_size for path in parts)
    one = tmp_path / "one.gguf"
    quantize_to_gguf(options(source, one, gptq=False, gguf_type="q8_0"))
    ours, whole = GGUFFile.open(parts[0]), GGUFFile.open(one)
    assert all(torch.equal(ours.read(name), whole.read(name)) for name in whole.tensors)


def test_a_name_of_a_part_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for quantize in (quantize_to_gguf, blocks_folder):
        for name in ("m-00001-of-00002.gguf", "-00000-of-00000.GGUF"):
            with pytest.raises(AiakqError, match=f"-o is '.*{name}'.* not that of one of several files") as caught:
                quantize(options(tmp_path / "missing", tmp_path / name))
            assert caught.value.id == "bad_option"


def test_a_size_that_is_none_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(AiakqError, match="--max-shard-size"):
        options(tmp_path, tmp_path / "m.gguf", max_shard_size="some")


def test_widths_that_no_block_divides_are_refused_with_methods_that_take_them(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM", hidden_size=72, intermediate_size=72)
    with pytest.raises(AiakqError, match="no whole blocks of 32") as caught:
        quantize_to_gguf(options(source, tmp_path / "out.gguf"))
    assert "--group-size" not in str(caught.value) and "take any shape" in str(caught.value)
