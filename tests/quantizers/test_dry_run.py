"""What a dry run says is what a run does, and it reads headers only."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.formats import hub_headers
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.safetensors_file import read_header
from aiakq.quantizers.dry_run import dry_run
from aiakq.quantizers.options import QuantizeOptions

QUICK = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}


@pytest.mark.parametrize(
    ("family", "method", "more"),
    [
        ("LlamaForCausalLM", "smooth_quant", {"activation_scales": "tensor"}),
        ("OPTForCausalLM", "awq", {"group_size": 32}),
        ("LlamaForCausalLM", "gptq", {"group_size": 32, "bits": 3, "lm_head": 8, "sweeps": 0}),
        ("MixtralForCausalLM", "weight_only_int8", {}),
        ("LlamaForCausalLM", "nvfp4", {"skip": ("*.1.*",)}),
    ],
)
def test_size_and_layers_are_those_of_a_run(
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    tmp_path: Path,
    family: str,
    method: str,
    more: dict[str, Any],
) -> None:
    source = tiny_model(family)
    planned = dry_run(QuantizeOptions(str(source), str(tmp_path / "out"), method, **{**QUICK, **more}))
    assert not any(tmp_path.iterdir())
    report = quantize(source, tmp_path / "out", method, **more)
    assert planned.output_bytes == report.bytes_after
    assert planned.bytes_before == report.bytes_before
    quantized = [each for each in planned.schemes if each.scheme is not None]
    assert sum(each.layers for each in quantized) == len(report.layers)
    if "lm_head" not in more:
        assert planned.bits_per_weight == pytest.approx(report.bits_per_weight, abs=1e-3)
    assert planned.disk_bytes > 2 * planned.output_bytes


def test_no_weight_is_read(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} was read")

    source = tiny_model("LlamaForCausalLM")
    monkeypatch.setattr(Checkpoint, "tensor", refused)
    planned = dry_run(QuantizeOptions(str(source), str(tmp_path / "out"), "gptq", group_size=32, **QUICK))
    assert planned.peak_memory_bytes is not None
    assert planned.peak_memory_bytes > planned.resident_bytes > 0
    assert planned.seconds_at_least is not None and "measured" in planned.time_basis


def test_of_a_model_on_the_hub_only_headers_are_fetched(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    source = tiny_model("LlamaForCausalLM")
    config = tmp_path / "config only"
    shutil.copytree(source, config, ignore=shutil.ignore_patterns("*.safetensors"))

    def headers(self: object, name: str, revision: str | None = None) -> object:
        assert (name, revision) == ("org/model", "main")
        found = read_header(source / "model.safetensors", "model.safetensors")
        infos, end = {}, 0
        for tensor, info in found.items():
            offsets = (end, end + info.nbytes)
            infos[tensor] = SimpleNamespace(dtype=info.dtype, shape=list(info.shape), data_offsets=offsets)
            end += info.nbytes
        metadata = SimpleNamespace(metadata={"format": "pt"}, tensors=infos)
        return SimpleNamespace(files_metadata={"model.safetensors": metadata})

    monkeypatch.setattr(hub_headers, "hub_answers", lambda: True)
    monkeypatch.setattr(hub_headers, "resolve_model", lambda name, revision, weights: config)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", headers)
    given = {"group_size": 32, **QUICK}
    remote = dry_run(QuantizeOptions("org/model", str(tmp_path / "out"), "gptq", revision="main", **given))
    local = dry_run(QuantizeOptions(str(source), str(tmp_path / "out"), "gptq", **given))
    assert remote.input == "org/model"
    assert remote.download_bytes == local.bytes_before == remote.bytes_before
    assert (remote.output_bytes, remote.schemes) == (local.output_bytes, local.schemes)


def test_gptq_holds_more_than_rounding_and_more_tokens_take_more(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = str(tiny_model("LlamaForCausalLM"))

    def peak(method: str, **more: Any) -> int:
        planned = dry_run(QuantizeOptions(source, str(tmp_path / "out"), method, **{**QUICK, **more}))
        return next(stage.nbytes for stage in planned.stages if stage.name == "quantize")

    assert peak("gptq", group_size=32) > peak("weight_only_int8")
    assert peak("gptq", group_size=32, samples=16) > peak("gptq", group_size=32)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tune": "4steps"}, "--tune"),
        ({"rotate": "hadamard"}, "--rotate"),
        ({"importance": "gradient-rows"}, "--importance"),
        ({"workers": 2}, "one process"),
    ],
)
def test_memory_that_is_not_counted_is_said_to_be_unknown(
    tiny_model: Callable[..., Path], tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    planned = dry_run(QuantizeOptions(source, str(tmp_path / "out"), "gptq", group_size=32, **{**QUICK, **more}))
    assert planned.peak_memory_bytes is None
    assert reason in planned.memory_reason


def test_widths_chosen_by_measuring_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    with pytest.raises(AiakqError, match="dry-run") as caught:
        dry_run(QuantizeOptions(source, str(tmp_path / "out"), "gptq", target_bpw=4.5, **QUICK))
    assert caught.value.id == "option_conflict"
