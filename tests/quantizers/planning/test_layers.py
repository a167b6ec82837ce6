"""Which linear is stored how: overrides, skips, the output layer, and the format that can hold it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.planning.layers import fit_head, fused_scheme_warnings, parse_override, plan_layers
from aiakq.spec import LayerSpec, QuantSpec
from tests.format_names import INTEGERS

NAMES = [
    f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
]


def plan(method: str = "gptq", **fields: Any) -> QuantSpec:
    options = QuantizeOptions("in", "out", method, **fields)
    return plan_layers(options, options.spec("0"), NAMES, "lm_head")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a*=bits:8", LayerSpec(8, 128)),
        ("a*=bits:8,group:-1", LayerSpec(8, -1)),
        ("a*= group:64 , asym", LayerSpec(4, 64, False)),
        ("a*=skip", None),
    ],
)
def test_an_override_is_read(text: str, expected: LayerSpec | None) -> None:
    assert parse_override(text, LayerSpec(4, 128), (4, 8)) == ("a*", expected)


@pytest.mark.parametrize(
    "text",
    ["", "a*", "=bits:4", "a=", "a=bits", "a=bits:5", "a=group:0", "a=wide", "a=bits:x", "a=group:--4", "a=bits:²"],
)
def test_an_override_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(AiakqError) as caught:
        parse_override(text, LayerSpec(4, 128), (4, 8))
    assert caught.value.id == "bad_option"
    assert "--layer" in str(caught.value)


def test_the_first_matching_override_is_used_and_skip_wins() -> None:
    spec = plan(layer=("*.0.*=bits:8", "*q_proj=bits:3"), skip=("*.1.*.k_proj",))
    bits = [None if (own := spec.for_layer(name)) is None else own.bits for name in NAMES]
    assert bits == [8, 8, 8, 3, None, 4]
    assert spec.format == "compressed-tensors"
    assert quantization_config.read(quantization_config.write(spec)).for_layer(NAMES[3]).bits == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{"layer": ("nothing=bits:8",)}, {"skip": ("nothing",)}, {"skip": ("*",)}])
def test_globs_that_match_nothing_or_leave_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        plan(**fields)
    assert caught.value.id == "bad_option"


@pytest.mark.parametrize(
    "method, fields, expected",
    [
        ("gptq", {}, "gptq"),
        ("gptq", {"symmetric": False}, "gptq_v2"),
        ("gptq", {"layer": ("*q_proj=bits:8",)}, "compressed-tensors"),
        ("gptq", {"layer": ("*q_proj=bits:4",)}, "gptq"),
        ("gptq", {"layer": ("*q_proj=bits:8",), "format": "gptq"}, "gptq"),
        ("gptq", {"skip": ("*q_proj",)}, "compressed-tensors"),
        ("gptq", {"layer": ("*q_proj=skip",)}, "compressed-tensors"),
        ("gptq", {"lm_head": 8}, "compressed-tensors"),
        ("gptq", {"format": "compressed-tensors"}, "compressed-tensors"),
        ("awq", {"skip": ("*q_proj",)}, "awq"),
        ("awq", {"layer": ("*q_proj=group:64",)}, "compressed-tensors"),
        ("weight_only_int8", {"lm_head": 4}, "compressed-tensors"),
    ],
)
def test_the_default_format_is_the_most_portable_one(method: str, fields: dict[str, Any], expected: str) -> None:
    assert plan(method, **fields).format == expected


def test_experts_are_written_so_that_transformers_reads_them() -> None:
    names = [*NAMES, "model.layers.0.mlp.experts.3.up_proj"]
    formats = []
    for fields in ({}, {"format": "gptq"}, {"symmetric": False}):
        options = QuantizeOptions("in", "out", "gptq", **fields)  # type: ignore[arg-type]
        formats.append(plan_layers(options, options.spec("0"), names, "lm_head").format)
    assert formats == ["compressed-tensors", "gptq", "gptq_v2"]


@pytest.mark.parametrize(
    "method, fields",
    [
        ("awq", {"layer": ("*q_proj=group:64",), "format": "awq"}),
        ("awq", {"bits": 8, "format": "awq_gemv"}),
        ("awq", {"lm_head": 4, "symmetric": True, "format": "awq"}),
        ("gptq", {"symmetric": False, "format": "gptq"}),
        ("smooth_quant", {"format": "gptq"}),
    ],
)
def test_a_format_that_cannot_hold_it_is_refused(method: str, fields: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        plan(method, **fields)
    assert caught.value.id == "option_conflict"


def test_every_format_can_be_selected() -> None:
    for name in INTEGERS:
        assert plan("awq", symmetric=True, format=name).format == name
    with pytest.raises(AiakqError, match="--format fp8 .* hold 8-bit floats"):
        plan("awq", format="fp8")
    with pytest.raises(AiakqError, match="one of gptq, gptq_v2, awq") as caught:
        plan(format="zip")
    assert caught.value.id == "bad_option"


def test_layers_that_servers_fuse_should_be_stored_with_the_same_scheme() -> None:
    assert fused_scheme_warnings(plan(layer=("*.0.*=bits:8",)), NAMES) == []
    (warning,) = fused_scheme_warnings(plan(layer=("*q_proj=bits:8",)), NAMES)
    assert "q_proj" in warning and "vLLM" in warning


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("bits, method", [(4, "weight_only_int8"), (8, "smooth_quant")])
def test_a_quantized_output_layer(
    architecture: str, bits: int, method: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Tied (Qwen2) or not (Llama): the embedding stays, the output layer has codes of its own, both runtimes agree."""
    from aiakq.evaluation.scoring import load_for_scoring

    source, output = tiny_model(architecture), tmp_path / "out"
    options = QuantizeOptions(
        str(source), str(output), method, lm_head=bits, samples=4, seqlen=32, evaluate=False, device="cpu"
    )
    quantize_checkpoint(options)
    checkpoint = Checkpoint.open(output)
    assert "lm_head" in checkpoint.quantized_linears()
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" not in checkpoint.inventory
    assert torch.equal(
        checkpoint.tensor("model.embed_tokens.weight"), Checkpoint.open(source).tensor("model.embed_tokens.weight")
    )
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    ours = load_for_scoring(output, device="cpu").logits(ids)
    wanted = load_for_scoring(source, device="cpu").logits(ids)
    assert float((ours - wanted).norm() / wanted.norm()) < {8: 0.1, 4: 0.2}[bits]


@pytest.mark.parametrize("how", ["group:64", "asym"])
def test_quantized_activations_need_symmetric_rows(how: str) -> None:
    with pytest.raises(AiakqError, match="one symmetric scale per row") as caught:
        plan("smooth_quant", layer=(f"*.k_proj={how}",))
    assert caught.value.id == "bad_option"


def test_the_output_layer_is_only_quantized_with_lm_head() -> None:
    for fields in ({"skip": ("lm_head",)}, {"layer": ("lm_head=bits:8",)}):
        with pytest.raises(AiakqError, match="unless --lm-head") as caught:
            plan(**fields)
        assert caught.value.id == "bad_option"


@pytest.mark.parametrize(("k", "group"), [(256, 128), (192, 64), (96, 32), (80, -1)])
def test_groups_of_the_output_layer_fit_its_inputs(k: int, group: int) -> None:
    own = fit_head(plan(lm_head=4), "lm_head", k).for_layer("lm_head")
    assert own is not None and (own.bits, own.group_size) == (4, group)
    assert fit_head(plan(lm_head=4), "lm_head", k).for_layer(NAMES[0]) == plan(lm_head=4).for_layer(NAMES[0])


def test_skipped_layers_are_as_they_were(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, output = tiny_model("LlamaForCausalLM"), tmp_path / "out"
    options = QuantizeOptions(
        str(source), str(output), "gptq", group_size=32, skip=("*.0.mlp.*",), samples=4, seqlen=32, evaluate=False,
        device="cpu",
    )  # fmt: skip
    quantize_checkpoint(options)
    before, after = Checkpoint.open(source), Checkpoint.open(output)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(before.tensor(name), after.tensor(name))
    assert "model.layers.1.mlp.down_proj" in after.quantized_linears()


@pytest.mark.parametrize("name", ["awq_gemv", "awq_gemv_fast"])
def test_awq_is_written_in_the_selected_layout(name: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The writer reads every linear back and compares it bit for bit before the output is published."""
    source, output = tiny_model("LlamaForCausalLM"), tmp_path / "out"
    options = QuantizeOptions(
        str(source), str(output), "awq", format=name, group_size=32, samples=2, seqlen=16, evaluate=False, device="cpu"
    )
    quantize_checkpoint(options)
    checkpoint = Checkpoint.open(output)
    assert checkpoint.spec is not None and checkpoint.spec.format == name
    assert {checkpoint.layout(linear) for linear in checkpoint.quantized_linears()} == {name}
    assert "vLLM does not read this format" in (output / "README.md").read_text()


def test_scales_of_activations_that_no_layer_would_have_are_refused() -> None:
    with pytest.raises(AiakqError, match="--activation-scales tensor") as caught:
        plan("fp8", layer=("*=mxfp4",), activation_scales="tensor")
    assert caught.value.id == "option_conflict"
    assert plan("fp8", layer=("*.up_proj=mxfp4",), activation_scales="tensor").static_input
