"""Bits per layer from measured sensitivity."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.planning.bit_allocation import allocate, widths_of
from aiakq.quantizers.planning.sensitivity import ModelPart, measure
from aiakq.quantizers.preparation import prepare
from aiakq.spec import LayerSpec

CANDIDATES = (LayerSpec(3, 128), LayerSpec(4, 128), LayerSpec(8, 128))


def chosen(some: list[ModelPart], bits: float | None = None, kl: float | None = None) -> list[int]:
    total = sum(part.weights for part in some)
    return allocate(some, widths_of(some, CANDIDATES, 16), None if bits is None else bits * total, kl)


def parts(*costs: tuple[float, float, float]) -> list[ModelPart]:
    return [ModelPart((f"layer{i}",), 1 << 20, 128, list(cost)) for i, cost in enumerate(costs)]


def test_bits_go_to_the_most_sensitive_parts() -> None:
    choice = chosen(parts((1.0, 0.25, 0.001), (0.1, 0.02, 0.0001), (0.1, 0.02, 0.0001)), bits=4.8)
    assert choice == [2, 0, 0]  # 8.125 + 3.125 + 3.125 bits, on average 4.79


def test_the_target_is_nearly_reached_and_never_exceeded() -> None:
    make = torch.Generator().manual_seed(0)
    some = []
    for _ in range(40):
        first = float(torch.rand((), generator=make))
        some.append((first, first / 5, first / 900))
    for target in (3.2, 3.7, 4.5, 6.0, 8.2):
        choice = chosen(parts(*some), bits=target)
        used = sum(CANDIDATES[index].bits + 16 / 128 for index in choice) / len(choice)
        assert target - 0.25 < used <= target or set(choice) == {2}


def test_the_fewest_bits_within_a_cost() -> None:
    some = parts((1.0, 0.25, 0.001), (0.1, 0.02, 0.0001))
    assert chosen(some, kl=2.0) == [0, 0]
    choice = chosen(some, kl=0.2)
    assert sum(part.kl[index] for part, index in zip(some, choice, strict=True)) <= 0.2
    assert choice == [2, 0]
    assert chosen(some, kl=1e-9) == [2, 2]


def test_a_width_without_gain_is_skipped() -> None:
    assert chosen(parts((1.0, 1.0, 0.01)), bits=8.2) == [2]


def test_too_few_bits_are_refused() -> None:
    with pytest.raises(AiakqError, match=r"at least 3\.1"):
        chosen(parts((1.0, 0.5, 0.1)), bits=3.0)


def test_sensitivity_is_the_divergence_that_rounding_causes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A block's parts, each weighed by its own error, add up to what rounding the whole block does to predictions."""
    options = QuantizeOptions(str(tiny_model("LlamaForCausalLM")), str(tmp_path / "out"), "gptq", device="cpu")
    model = prepare(options).model
    ids = torch.randint(3, 250, (4, 48), generator=torch.Generator().manual_seed(0))
    candidates = [LayerSpec(3, 32), LayerSpec(4, 32), LayerSpec(8, 32)]
    found = measure(model, [ids], candidates, 1, torch.float16, lambda done, total: None)
    assert [len(part.names) for part in found] == [3, 1, 2, 1] * 2
    for part in found:
        assert part.kl[0] > 2 * part.kl[1] > 100 * part.kl[2] > 0
    from aiakq.quantizers.model.groups import block_linears
    from aiakq.quantizers.model.outer_layers import capture, finish, load_outside
    from aiakq.quantizers.planning.sensitivity import _RoundedLinears

    def logits(rounded: int | None) -> torch.Tensor:
        states = capture(model, [ids], lambda _: None)
        for index, block in enumerate(model.blocks):
            model.load(block, model.block_prefix(index))
            if index == rounded:
                with _RoundedLinears(block, block_linears(block), candidates[1], torch.float16):
                    states.advance(block, index)
            else:
                states.advance(block, index)
        load_outside(model)
        return finish(model, ids, states.hidden[0], states.outputs).log_softmax(-1)

    plain = logits(None)
    for index in range(2):
        other = logits(index)
        kl = float((plain.exp() * (plain - other)).sum(-1).mean())
        assert sum(part.kl[1] for part in found[4 * index : 4 * index + 4]) == pytest.approx(kl, rel=0.35)


def test_target_bits_end_to_end(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    common = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}
    report = quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "out"), "gptq", target_bpw=4.6, **common))  # type: ignore[arg-type]
    assert 4.2 < report.bits_per_weight <= 4.6
    checkpoint = Checkpoint.open(tmp_path / "out")
    widths = {checkpoint.read_linear(name).bits for name in checkpoint.quantized_linears()}
    assert widths <= {4, 8}


def test_the_measured_divergence_stays_below_max_kl(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    text = tmp_path / "text.txt"
    text.write_text("A short text to evaluate on. " * 40)
    common = {"samples": 8, "seqlen": 64, "eval_text": text, "device": "cpu"}

    def run(name: str, **fields: object) -> object:
        return quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / name), "gptq", **{**common, **fields}))  # type: ignore[arg-type]

    plain = run("plain", group_size=32)
    wanted = plain.kl * 0.6  # type: ignore[attr-defined]
    report = run("out", max_kl=wanted)
    assert report.kl <= wanted  # type: ignore[attr-defined]
    assert report.bits_per_weight < 8.1  # type: ignore[attr-defined]
    with pytest.raises(AiakqError) as caught:
        run("none", max_kl=1e-12)
    assert caught.value.id == "max_kl"
    assert not (tmp_path / "none").exists()


def test_a_target_below_the_narrowest_is_refused_before_measuring(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    options = QuantizeOptions(
        str(tiny_model("LlamaForCausalLM")), str(tmp_path / "out"), "gptq", target_bpw=2.01, samples=4, seqlen=32,
        device="cpu",
    )  # fmt: skip
    stages: list[str] = []
    with pytest.raises(AiakqError, match="--target-bpw is 2.01") as caught:
        quantize_checkpoint(options, lambda step: stages.append(step.stage))
    assert caught.value.id == "bad_option"
    assert "sensitivity" not in stages
