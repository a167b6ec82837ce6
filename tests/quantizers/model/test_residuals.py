"""Which outputs are added to the residual stream, in blocks of several architectures."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from aiakq.quantizers.model.residuals import Residual, find_residuals

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}


def found(name: str, **config: Any) -> dict[str, Residual]:
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, f"{name}ForCausalLM")(made).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(1 + 0.3 * torch.randn(parameter.shape))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    block = max(lists, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))[0]
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    def run() -> Tensor:
        handle = block.register_forward_hook(keep)
        model(torch.arange(40).view(2, 20))
        handle.remove()
        return outputs.pop()

    with torch.no_grad():
        return find_residuals(block, run)


@pytest.mark.parametrize(
    ("name", "config", "wanted"),
    [
        ("Llama", SMALL, {"self_attn.o_proj": ("", 1, 1), "mlp.down_proj": ("post_attention_layernorm", 1, 1)}),
        ("Qwen2", SMALL, {"self_attn.o_proj": ("", 1, 1), "mlp.down_proj": ("post_attention_layernorm", 1, 1)}),
        (
            "Granite",
            {**SMALL, "residual_multiplier": 0.22},
            {"self_attn.o_proj": ("", 0.22, 1), "mlp.down_proj": ("post_attention_layernorm", 0.22, 1)},
        ),
        (
            "GPTNeoX",
            {**SIZES, "use_parallel_residual": True, "rotary_pct": 1.0},
            {"attention.dense": ("", 1, 0.5), "mlp.dense_4h_to_h": ("", 1, 0.5)},
        ),
        ("Phi", SIZES, {"self_attn.dense": ("", 1, 0.5), "mlp.fc2": ("", 1, 0.5)}),
        ("Gemma2", SMALL, {}),
        (
            "OPT",
            {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
            {"self_attn.out_proj": ("", 1, 1), "fc2": ("fc1", 1, 1)},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_residual_outputs_are_found(
    name: str, config: dict[str, Any], wanted: dict[str, tuple[str, float, float]]
) -> None:
    assert found(name, **config) == {key: Residual(*value) for key, value in wanted.items()}
