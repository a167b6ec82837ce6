"""BitNet: words that are packed as transformers packs them, and what its linear layers compute from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats import bitnet, quantization_config
from aiakq.formats.decoded_weight import as_floats
from aiakq.spec import QuantSpec

AUTO = {"linear_class": "autobitlinear"}


def config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "bitnet", "modules_to_not_convert": None, **changes}


def packed(values: Tensor) -> Tensor:
    """Values -1 to 1 [N, K] -> [N/4, K] uint8."""
    parts = (values + 1).to(torch.uint8).chunk(4)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def ternary(n: int, k: int) -> Tensor:
    return torch.randint(-1, 2, (n, k), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("scale", [0.4, 3.0])
def test_weights_are_multiplied_or_divided_by_their_scale(scale: float) -> None:
    values, bias = ternary(12, 8), torch.randn(12)
    tensors = {"weight": packed(values), "weight_scale": torch.tensor([scale]), "bias": bias}
    divided = bitnet.read(tensors, quantization_config.read(config()))
    assert divided.scheme == "w8a8" and torch.equal(as_floats(divided), values * (1 / torch.tensor(scale)))
    assert divided.bias is not None and torch.equal(divided.bias, bias)
    multiplied = bitnet.read(tensors, quantization_config.read(config(**AUTO)))
    assert torch.equal(as_floats(multiplied), values * torch.tensor(scale))
    assert multiplied.bias is not None and torch.equal(multiplied.bias, bias * scale)


def test_words_are_those_of_transformers() -> None:
    from transformers.integrations.bitnet import pack_weights

    values = ternary(16, 8)
    assert torch.equal(pack_weights(values.clone()), packed(values))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_rms_norm": True}, "use_rms_norm"),
        ({**AUTO, "quantization_mode": "online"}, "online"),
        ({"linear_class": "other"}, "other"),
        ({"more": 1}, "more"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(AiakqError, match=reason) as caught:
        quantization_config.read(config(**changes))
    assert caught.value.id == "format_unsupported"


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": torch.full((2, 8), 3, dtype=torch.uint8)},
        {"weight": torch.zeros(2, 8)},
        {"weight_scale": torch.zeros(1)},
        {"weight_scale": torch.ones(2)},
        {"bias": torch.zeros(2)},
    ],
    ids=str,
)
def test_damaged_tensors_are_refused(changes: dict[str, Tensor]) -> None:
    tensors = {"weight": packed(ternary(8, 8)), "weight_scale": torch.ones(1)}
    spec = quantization_config.read(config())
    assert bitnet.read(tensors, spec).n == 8
    with pytest.raises(AiakqError):
        bitnet.read({**tensors, **changes}, spec)


def test_without_a_config_of_bitnet_nothing_is_guessed() -> None:
    tensors = {"weight": packed(ternary(8, 8)), "weight_scale": torch.ones(1)}
    with pytest.raises(AiakqError, match="no config of BitNet"):
        bitnet.read(tensors, QuantSpec("fp8", "bitnet", 8))


@pytest.mark.parametrize("settings", [{}, AUTO], ids=["bitlinear", "autobitlinear"])
def test_checkpoints_are_computed_as_transformers_does(
    settings: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Of a Llama with ternary weights, which transformers computes with the same weights and rounded activations."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(5))

    source = tiny_model("LlamaForCausalLM")
    tensors, dense = load_file(source / "model.safetensors"), AutoModelForCausalLM.from_pretrained(source).eval()
    for name, module in list(dense.named_modules()):
        if not name.endswith("_proj"):
            continue
        values, scale = ternary(*module.weight.shape), torch.tensor([0.05]) if settings else torch.tensor([20.0])
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = packed(values), scale
        module.weight.data = values * scale if settings else values / scale
        module.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0]))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    raw = json.loads((source / "config.json").read_text()) | {"quantization_config": config(**settings)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = load_for_scoring(tmp_path, "float32", "cpu").logits(ids).log_softmax(-1)
    with torch.inference_mode():
        expected = torch.cat([dense(each[None]).logits for each in ids]).log_softmax(-1)
    # A value between two codes may be rounded either way.
    assert float((found - expected).abs().amax(-1).median()) < 1e-4


def rounded(x: Tensor) -> Tensor:
    """Activations [..., K] as the linear layers of BitNet round them."""
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale
