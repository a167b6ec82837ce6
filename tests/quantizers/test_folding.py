"""Folding scales into a model leaves its function alone, in every family of the table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.quantizers.groups import SMOOTHING, Heads, block_linears, fold, smoothing_pairs, trace_groups

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
}


def load(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def blocks(model: Any) -> Any:
    return model.model.decoder.layers if model.config.model_type == "opt" else model.model.layers


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_the_table_is_tested() -> None:
    assert set(SMOOTHING) == set(ARCHITECTURES)


@pytest.mark.parametrize("family", sorted(SMOOTHING))
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_function_is_preserved(family: str, storage: torch.dtype, tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model(ARCHITECTURES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(storage))
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    pairs = smoothing_pairs(model.config, "awq")
    heads = Heads.of(model.config)
    assert len(pairs) == 4
    with torch.no_grad():
        before = model(ids).logits
        make = torch.Generator().manual_seed(1)
        for block in blocks(model):
            for pair in pairs:
                source = block.get_submodule(pair.source)
                scales = torch.exp(torch.randn(source.weight.shape[0], generator=make))
                changed, columns = fold(block, pair, scales, heads, storage)
                assert columns.shape == (block.get_submodule(pair.targets[0]).in_features,)
                for name, tensor in changed.items():
                    assert torch.equal(tensor, block.get_parameter(name))
                    assert torch.equal(tensor, tensor.to(storage).float())
        after = model(ids).logits
    # A rounded bias is the only thing that a 16-bit dtype may cost; norms are compensated exactly.
    biased = any(parameter.dim() == 1 and name.endswith("bias") for name, parameter in model.named_parameters())
    assert relative(after, before) < (5e-3 if storage != torch.float32 and biased else 1e-5)


def test_opt_variants_lose_the_pairs_that_are_not_exact(tiny_model: Callable[..., Path]) -> None:
    from transformers import OPTConfig

    sources = [pair.source for pair in smoothing_pairs(OPTConfig(do_layer_norm_before=False), "awq")]
    assert sources == ["self_attn.v_proj", "fc1"]
    sources = [pair.source for pair in smoothing_pairs(OPTConfig(activation_function="gelu"), "awq")]
    assert "fc1" not in sources


def test_unknown_families_are_refused() -> None:
    from transformers import GPTNeoXConfig

    with pytest.raises(AiakqError) as caught:
        smoothing_pairs(GPTNeoXConfig(), "awq")
    assert caught.value.id == "no_smoothing_map"


def test_a_channel_that_cannot_be_scaled_keeps_its_scale() -> None:
    """A norm weight of 0, or one that underflows, must not lose or blow up its channel."""
    from aiakq.quantizers.groups import Pair

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(4)
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    block = Block()
    with torch.no_grad():
        block.norm.weight.copy_(torch.tensor([0.0, 1e-6, 1.0, 60000.0]))
        block.norm.bias.fill_(0.5)
        x = torch.randn(5, 4)
        before = block(x)
        scales = torch.tensor([7.0, 1e4, 2.0, 1e-3])
        fold(block, Pair("norm", ("linear",), "linear"), scales, Heads(1, 1), torch.float16)
        assert bool(torch.isfinite(block.norm.weight).all())
        assert relative(block(x), before) < 1e-3


@pytest.mark.parametrize("family", [*sorted(SMOOTHING), "gpt_neox"])
def test_groups_are_found_by_tracing(family: str, tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model({**ARCHITECTURES, "gpt_neox": "GPTNeoXForCausalLM"}[family]))
    block = model.gpt_neox.layers[0] if family == "gpt_neox" else blocks(model)[0]
    groups = trace_groups(block, lambda: model(torch.arange(3, 20).unsqueeze(0)))
    shapes = [tuple(name.rpartition(".")[2] for name in group) for group in groups]
    expected = {
        "opt": [("q_proj", "k_proj", "v_proj"), ("out_proj",), ("fc1",), ("fc2",)],
        "gpt_neox": [("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",)],
    }.get(family, [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)])
    assert [set(names) for names in shapes] == [set(names) for names in expected]
    assert {name for group in groups for name in group} == set(block_linears(block))


def test_tied_heads() -> None:
    heads = Heads(q_heads=4, kv_heads=2)
    per_query = torch.arange(4 * 3).float()
    assert heads.tie(per_query, "mean").tolist() == [1.5, 2.5, 3.5, 7.5, 8.5, 9.5]
    assert heads.tie(per_query, "max").tolist() == [3, 4, 5, 9, 10, 11]
    assert heads.spread(torch.tensor([1.0, 2, 3, 4, 5, 6])).tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6]
