"""Smoothed models: the same function before rounding, and without the outliers of their activations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.rounding.integers import Rounding, round_activations

FAMILIES = {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM"}


@pytest.mark.parametrize("method", ["awq", "smooth_quant"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_smoothed_but_unrounded_is_the_same_function(
    family: str,
    method: str,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantize: Callable[..., Any],
    dequantized: Callable[[Path], Any],
    relative_error: Callable[[Tensor, Tensor], float],
    ids: Tensor,
) -> None:
    """What a method folds into the model must cost nothing before rounding."""
    from aiakq.quantizers.block.decoder_block import DecoderBlock

    kept: dict[str, Tensor] = {}
    folded: dict[str, Tensor] = {}
    finish = DecoderBlock.finish

    def note(block: DecoderBlock, name: str, rounding: Rounding) -> None:
        linear = block.linears[name]
        kept[f"{block.prefix}.{name}.weight"] = linear.weight.data.clone()
        if linear.bias is not None:
            kept[f"{block.prefix}.{name}.bias"] = linear.bias.data.clone()
        folded.update({f"{block.prefix}.{key}": value.clone() for key, value in block.folder.changed.items()})
        finish(block, name, rounding)

    monkeypatch.setattr(DecoderBlock, "finish", note)
    source = tiny_model(FAMILIES[family])
    quantize(source, tmp_path / "out", method)
    original, smoothed = dequantized(source), dequantized(source)
    assert folded
    smoothed.model.load_state_dict({**kept, **folded}, strict=False)
    changed = [name for name, value in smoothed.model.named_parameters()
               if not torch.equal(value, original.model.get_parameter(name))]  # fmt: skip
    assert len(changed) > 8
    assert relative_error(smoothed.logits(ids), original.logits(ids)) < 1e-5


def plant_outliers(source: Path, target: Path, factor: float = 100.0) -> Path:
    """Make some channels of the first norm of each block huge and the next columns small: the same function."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for block in model.model.layers:
            for norm, linears in (
                (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
                (block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)),
            ):
                norm.weight[5::32] *= factor
                for linear in linears:
                    linear.weight[:, 5::32] /= factor
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_smoothing_removes_outliers(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
    dequantized: Callable[[Path], Any],
    relative_error: Callable[[Tensor, Tensor], float],
    ids: Tensor,
) -> None:
    source = tiny_model("LlamaForCausalLM")
    wanted = dequantized(source).logits(ids)
    planted = plant_outliers(source, tmp_path / "planted")
    assert relative_error(dequantized(planted).logits(ids), wanted) < 1e-5
    errors = {}
    for alpha in (0.0, 0.5, 0.8):
        quantize(planted, tmp_path / f"out-{alpha}", "smooth_quant", smooth_alpha=alpha)
        errors[alpha] = relative_error(dequantized(tmp_path / f"out-{alpha}").logits(ids), wanted)
    quantize(source, tmp_path / "plain", "smooth_quant")
    plain = relative_error(dequantized(tmp_path / "plain").logits(ids), wanted)
    assert min(errors.values()) < 1.5 * plain
    # Without smoothing the outliers own the scale of every token.
    unsmoothed = dequantized(planted)
    from aiakq.quantizers.model.groups import block_linears
    from aiakq.rounding.integers import dequantize, round_weight

    for block in unsmoothed.model.model.layers:
        for linear in block_linears(block).values():
            rounded = round_weight(linear.weight.data, 8, -1, True, torch.float32)
            linear.weight.data = dequantize(*rounded, linear.in_features)
            linear.register_forward_pre_hook(lambda _, args: round_activations(args[0]))
    assert relative_error(unsmoothed.logits(ids), wanted) > 3 * min(errors.values())
