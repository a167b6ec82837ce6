"""Mixtures of experts: separated without changes, calibrated on their own tokens, written under hub names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.block.decoder_block import BlockPlan, DecoderBlock
from aiakq.quantizers.block.inputs import BlockInputs
from aiakq.quantizers.model import experts as module
from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.experts import (
    Experts,
    ExpertTokens,
    expert_warnings,
    experts_of,
)
from aiakq.quantizers.model.groups import Heads
from aiakq.quantizers.model.outer_layers import capture
from aiakq.quantizers.model.smooth_mappings import BlockTrace
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.report.records import QuantizeReport
from aiakq.runtime.hf.fused_experts import Expert, Spelling

FAMILIES = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
EVERY = {"MixtralForCausalLM": ("block_sparse_moe.experts", "w1"), "Qwen2MoeForCausalLM": ("mlp.experts", "gate_proj")}


def quantize(source: Path, output: Path, method: str, **fields: Any) -> QuantizeReport:
    settings = {"samples": 16, "seqlen": 64, "evaluate": False, "dtype": "fp16", **fields}
    return quantize_checkpoint(QuantizeOptions(str(source), str(output), method, **settings))


@pytest.fixture(scope="module")
def fused(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``fused(architecture)`` -> the tiny model in a file that holds experts as the transformers model does."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            from transformers import AutoModelForCausalLM

            source = tiny_model(architecture)
            folder = made[architecture] = tmp_path_factory.mktemp("fused")
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            save_file(tensors, folder / "model.safetensors")
            for path in source.iterdir():
                if path.suffix != ".safetensors":
                    (folder / path.name).write_bytes(path.read_bytes())
        return made[architecture]

    return make


def opened(folder: Path, tokens: int = 48) -> tuple[SourceModel, Activations]:
    """A model with its first block loaded, and what reaches that."""
    model = SourceModel(Checkpoint.open(folder), None, torch.device("cpu"))
    batches = list(torch.randint(3, 300, (3, 2, tokens), generator=torch.Generator().manual_seed(1)))
    inputs = capture(model, batches, lambda done: None)
    model.load(model.blocks[0], model.block_prefix(0))
    return model, inputs


def decoder_block(folder: Path, method: str = "gptq", tokens: int = 48) -> DecoderBlock:
    """The first block, ready to be quantized."""
    model, inputs = opened(folder, tokens)
    options = QuantizeOptions("in", "out", method, bits=4)
    spec = options.spec("0", model.other_linears())
    heads = Heads.of(model.config)
    plan = BlockPlan(spec, torch.float32, torch.float16, heads)
    groups, mappings = BlockTrace(heads, method == "awq").trace(model.blocks[0], 0, inputs)
    return DecoderBlock(model.blocks[0], 0, model.block_prefix(0), plan, groups, inputs, None, mappings)


# --- taking apart -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_compute_what_transformers_computes(
    family: str, tiny_model: Callable[..., Path], fused: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    for folder in (tiny_model(family), fused(family)):
        model, inputs = opened(folder)
        mixture = next(iter(experts_of(model.blocks[0]).values()))
        call = inputs.calls[(2, 48)][0]
        with torch.inference_mode():
            wanted = theirs.model.layers[0](inputs.hidden[0], *call.args, **call.kwargs)
            wanted = wanted[0] if isinstance(wanted, tuple) else wanted
            torch.testing.assert_close(inputs.run(model.blocks[0], 0, 0), wanted, rtol=1e-4, atol=1e-4)
            mixture.everywhere = frozenset({0, 2})
            torch.testing.assert_close(inputs.run(model.blocks[0], 0, 0), wanted, rtol=1e-4, atol=1e-4)
        assert model.unquantized_share() < 0.02


def test_an_expert_with_weighted_inputs_sees_every_token_and_counts_its_own() -> None:
    """Llama 4. The other tokens are weighted as by a router that is undecided."""
    make = torch.Generator().manual_seed(0)
    linears = [[torch.nn.Linear(8, 8, bias=False) for _ in range(3)] for _ in range(3)]
    mixture = Experts((Expert(torch.tanh, Spelling(), each) for each in linears), weigh_inputs=True)
    x, weights = torch.randn(10, 8, generator=make), torch.rand(10, 2, generator=make)
    chosen = torch.rand(10, 3, generator=make).topk(2).indices
    inputs: list[Tensor] = []
    with torch.no_grad():
        expected = mixture(x, chosen, weights)
        direct = torch.stack(
            [mixture.get_submodule(str(int(number)))(x[0] * w) for number, w in zip(chosen[0], weights[0], strict=True)]
        )
        torch.testing.assert_close(expected[0], direct.sum(0))
        assert torch.equal(mixture.shares, torch.ones(10, 2))
        mixture.everywhere = frozenset({1})
        linears[1][0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        torch.testing.assert_close(mixture(x, chosen, weights), expected)
    own = (weights * (chosen == 1)).sum(-1, keepdim=True)
    torch.testing.assert_close(inputs[0], x * torch.where(own > 0, own, 0.5))


def test_a_copied_block_uses_its_own_experts(tiny_model: Callable[..., Path]) -> None:
    """Mixtral's block is reachable under two names, which must stay the same module."""
    model, inputs = opened(tiny_model("MixtralForCausalLM"))
    block = copy.deepcopy(model.blocks[0])
    assert block.mlp is block.block_sparse_moe and block.mlp is not model.blocks[0].mlp
    with torch.no_grad():
        for parameter in block.mlp.experts.parameters():
            parameter.zero_()
        assert not torch.equal(inputs.run(block, 0, 0), inputs.run(model.blocks[0], 0, 0))


@pytest.mark.parametrize(("method", "family"), [("gptq", FAMILIES[0]), ("awq", FAMILIES[1]), ("gptq", FAMILIES[1])])
def test_both_spellings_give_the_same_bytes(
    method: str, family: str, tiny_model: Callable[..., Path], fused: Callable[[str], Path], tmp_path: Path
) -> None:
    for name, source in (("separate", tiny_model(family)), ("fused", fused(family))):
        quantize(source, tmp_path / name, method)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("separate", "fused"))
    assert set(one) == set(other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    inside, gate = EVERY[family]
    suffix = "qweight" if method == "awq" else "weight_packed"
    assert f"model.layers.0.{inside}.3.{gate}.{suffix}" in one
    assert not any("gate_up_proj" in name for name in one)
    routers = [name for name in one if name.endswith((".gate.weight", "shared_expert_gate.weight"))]
    assert len(routers) == (2 if family == FAMILIES[0] else 4)


def test_a_skipped_expert_is_copied_out_of_a_fused_file(fused: Callable[[str], Path], tmp_path: Path) -> None:
    source = fused("MixtralForCausalLM")
    quantize(source, tmp_path / "out", "weight_only_int8", skip=("*layers.1.*experts.2.w3",))
    found = load_file(tmp_path / "out" / "model.safetensors")
    both = load_file(source / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    kept = found["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    assert torch.equal(kept, both[2, 256:].half())
    assert "model.layers.1.block_sparse_moe.experts.2.w1.weight_packed" in found


# --- what each one sees -----------------------------------------------------------------------------------------------


def test_second_moments_use_the_routed_tokens(tiny_model: Callable[..., Path]) -> None:
    block = decoder_block(tiny_model("Qwen2MoeForCausalLM"), tokens=256)
    mixture = block.module.mlp.experts
    seen: list[tuple[Tensor, Tensor]] = []
    handle = mixture.register_forward_pre_hook(lambda module, args: seen.append((args[0], args[1])))
    with torch.inference_mode():
        for batch in range(len(block.inputs.activations.hidden)):
            block.inputs.activations.run(block.module, 0, batch)
    handle.remove()
    tokens = block.experts[0].tokens
    assert sum(tokens) == 2 * block.inputs.activations.tokens == 2 * 3 * 2 * 256
    for number in (0, 5):
        rows = torch.cat([x[(index == number).any(-1)] for x, index in seen])
        assert len(rows) == tokens[number] >= block.experts[0].minimum
        name = f"mlp.experts.{number}.up_proj"
        hessian = block.inputs.hessians([name])[name]
        torch.testing.assert_close(hessian, rows.T @ rows / len(rows), rtol=1e-3, atol=1e-4)


def test_an_expert_with_few_tokens_is_calibrated_on_all_tokens(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = decoder_block(tiny_model("Qwen2MoeForCausalLM"), tokens=24)
    tokens = few.experts[0].tokens
    assert few.inputs.activations.tokens == 144 and few.experts[0].minimum == 128
    assert few.experts[0].everywhere == list(range(6)) and not few.experts[0].rounded
    name = f"mlp.experts.{tokens.index(min(tokens))}.down_proj"
    rows: list[Tensor] = []
    few.inputs.observe({name: rows.append})
    assert sum(map(len, rows)) == 144
    # A threshold that the busiest reach: only the others see everything.
    monkeypatch.setattr(module, "MIN_TOKENS", max(tokens))
    some = decoder_block(tiny_model("Qwen2MoeForCausalLM"), tokens=24)
    assert some.experts[0].everywhere == [number for number, count in enumerate(tokens) if count < max(tokens)]


@pytest.mark.parametrize("fields", [{}, {"activation_scales": "tensor"}, {"smooth_alpha": "auto"}, {"gptq": True}])
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_smoothing_leaves_out_experts_without_tokens(
    family: str, fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    report = quantize(tiny_model(family), tmp_path / "out", "smooth_quant", samples=1, seqlen=2, **fields)
    assert any(0 in mixture.tokens for mixture in report.experts)
    assert (
        load_for_scoring(tmp_path / "out", "float32", "cpu").logits(torch.arange(3, 20).unsqueeze(0)).isfinite().all()
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "smooth_quant", "weight_only_int8"])
def test_experts_without_tokens_do_not_stop_the_run(
    method: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Four tokens cannot reach four experts of two each, twice: some see nothing, and all have too few."""
    report = quantize(tiny_model("MixtralForCausalLM"), tmp_path / "out", method, samples=1, seqlen=4)
    assert [len(mixture.tokens) for mixture in report.experts] == [4, 4]
    assert [sum(mixture.tokens) for mixture in report.experts] == [8, 8]
    assert all(mixture.rounded == [0, 1, 2, 3] for mixture in report.experts)
    loud = [line for line in report.warnings if "8 of 8 experts" in line and "round-to-nearest (RTN)" in line]
    assert len(loud) == (0 if method == "weight_only_int8" else 1)
    assert (
        load_for_scoring(tmp_path / "out", "float32", "cpu").logits(torch.arange(3, 20).unsqueeze(0)).isfinite().all()
    )
    written = json.loads((tmp_path / "out" / "aiakq_report.json").read_text())
    assert written["experts"][0]["tokens"] == report.experts[0].tokens


def test_the_warning_names_counts() -> None:
    seen = [
        ExpertTokens("layers.0.experts", [500, 3, 400], 128, [1], []),
        ExpertTokens("layers.1.experts", [90, 300, 300], 200, [0], []),
        ExpertTokens("layers.2.experts", [200, 200, 200], 128, [], []),
    ]
    (line,) = expert_warnings(seen)
    assert line.startswith("2 of 9 experts were given fewer than 200 calibration tokens")
    assert "the fewest, 3, went to layers.0.experts.1" in line
    assert expert_warnings(seen[2:]) == []


# --- memory -----------------------------------------------------------------------------------------------------------


def test_chunks_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ((64, 32), (64, 32), (32, 64))
    linears = [[torch.nn.Linear(k, n) for k, n in sizes] for _ in range(10)]
    mixture = Experts(Expert(torch.nn.SiLU(), Spelling(), each) for each in linears)
    each = 4 * (64 * 64 * 2 + 32 * 32)
    for budget, sizes in ((each * 100, [10]), (each * 4, [4, 4, 2]), (1, [1] * 10)):
        monkeypatch.setattr(module, "MOMENT_BYTES", budget)
        assert [len(chunk) for chunk in mixture.chunks()] == sizes


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_chunks_do_not_change_the_result(
    method: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("Qwen2MoeForCausalLM")
    passes = 0
    real = BlockInputs.gather

    def counted(self: BlockInputs, *args: Any, **rest: Any) -> Any:
        nonlocal passes
        passes += 1
        return real(self, *args, **rest)

    monkeypatch.setattr(BlockInputs, "gather", counted)
    quantize(source, tmp_path / "whole", method, samples=8)
    together, passes = passes, 0
    monkeypatch.setattr(module, "MOMENT_BYTES", 1)
    quantize(source, tmp_path / "parts", method, samples=8)
    assert passes > together
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["weight_only_int8", "smooth_quant", "gptq"])
def test_the_divergence_of_eight_bits_is_negligible(
    method: str, family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model(family)
    quantize(source, tmp_path / "out", method, **({"bits": 8} if method == "gptq" else {}))
    ids = torch.randint(3, 300, (2, 64), generator=torch.Generator().manual_seed(3))
    exact, found = (
        load_for_scoring(folder, "float32", "cpu").logits(ids).log_softmax(-1) for folder in (source, tmp_path / "out")
    )
    # A random router changes its mind about a token now and then, which costs more than all the rounding.
    divergence = (exact.exp() * (exact - found)).sum(-1)
    assert float(divergence.median()) < 0.02
    assert float(divergence.mean()) < 0.1
