"""transformers loads our outputs unchanged: compressed-tensors natively, gptq and awq through gptqmodel."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.rounding.integers import round_activations

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
NEEDS = {"gptq": "gptqmodel", "awq": "gptqmodel"}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((method, {}) for method in ("awq", "gptq", "smooth_quant", "weight_only_int8")),
    ("gptq", {"symmetric": False}),
    ("gptq", {"bits": 8}),
    ("gptq", {"act_order": "group"}),
    ("awq", {"symmetric": True}),
    ("weight_only_int8", {"group_size": 64}),
]


def expected_logits(folder: Path, ids: Tensor) -> Tensor:
    """The dequantized weights in float32."""
    import transformers

    checkpoint = Checkpoint.open(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state: dict[str, Tensor] = {}
    own: set[str] = set()
    for prefix in checkpoint.quantized_linears():
        weight = checkpoint.read_linear(prefix)
        group = torch.arange(weight.k) // weight.group_size
        zeros = weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 2 ** (weight.bits - 1))
        state[f"{prefix}.weight"] = (weight.codes.float() - zeros.float()[:, group]) * weight.scales.float()[:, group]
        if weight.bias is not None:
            state[f"{prefix}.bias"] = weight.bias.float()
        own.update(checkpoint.linear_tensors(prefix).values())
        if weight.scheme == "w8a8":
            model.get_submodule(prefix).register_forward_pre_hook(lambda _, args: round_activations(args[0]))
    state |= {name: checkpoint.tensor(name).float() for name in checkpoint.inventory if name not in own}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.slow
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "OPTForCausalLM"])
@pytest.mark.parametrize(("method", "fields"), VARIANTS, ids=lambda value: str(value))
def test_transformers_reads_it(
    method: str, fields: dict[str, Any], family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip(NEEDS.get(method, "compressed_tensors"))
    import transformers

    usual = {"group_size": 32} if method in NEEDS else {}
    output = tmp_path / "out"
    quantize_checkpoint(
        QuantizeOptions(
            str(tiny_model(family)), str(output), method, dtype="bf16", samples=8, seqlen=64, evaluate=False,
            device="cpu", **{**usual, **fields},
        )
    )  # fmt: skip
    model, info = transformers.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        got = model.eval()(ids).logits.float()
    wanted = expected_logits(output, ids)
    # bfloat16 arithmetic; rounding activations of slightly different inputs may move a code.
    assert float((got - wanted).norm() / wanted.norm()) < (0.06 if method == "smooth_quant" else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gates_of_recurrent_layers_are_read_as_floats(
    method: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """They stay unquantized, and transformers would replace them like all linears of a block."""
    pytest.importorskip("gptqmodel")
    import transformers

    source, output = tiny_model("Qwen3_5ForCausalLM"), tmp_path / "out"
    options = QuantizeOptions(
        str(source), str(output), method, group_size=32, samples=8, seqlen=64, evaluate=False, device="cpu"
    )
    quantize_checkpoint(options)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    name = "model.layers.0.linear_attn.in_proj_a.weight"
    assert torch.equal(model.get_parameter(name).float(), Checkpoint.open(output).tensor(name).float())
