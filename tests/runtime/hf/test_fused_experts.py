"""Fused experts are found, named as checkpoints name them, and computed apart only where that is the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiakq.runtime.hf.fused_experts import Expert, SeparateExperts, computes_the_same, fused_experts

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("model_type", "numbers", "stored"),
    [
        ("mixtral", {"num_local_experts": 4}, "model.layers.0.block_sparse_moe.experts.3.w2"),
        ("phimoe", {"num_local_experts": 4}, "model.layers.0.block_sparse_moe.experts.3.w2"),
        (
            "kimi_linear",
            {
                "num_local_experts": 4,
                "moe_intermediate_size": 96,
                "num_experts_per_tok": 2,
                "mlp_layer_types": ["sparse"] * 2,
            },
            "model.layers.0.block_sparse_moe.experts.3.w2",
        ),
        ("olmoe", {"num_experts": 4}, "model.layers.0.mlp.experts.3.down_proj"),
        ("granitemoe", {"num_local_experts": 4}, "model.layers.0.block_sparse_moe.experts.3.down_proj"),
    ],
)
def test_linears_of_experts_have_the_names_of_checkpoints(model_type: str, numbers: dict, stored: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SIZES, **numbers, num_key_value_heads=2, vocab_size=64, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = list(fused_experts(model, "", model_type))
    assert len(found) == 2 and found[0].shape == (4, 64, 96)
    assert found[0].linears(3)[2] == (stored, 64, 96)
    assert found[0].spelling.transformers_reads == (model_type != "granitemoe")


def test_experts_without_gates_have_two_projections() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = ["linear_attention", "moe"]
    config = AutoConfig.for_model(
        "nemotron_h", hidden_size=64, moe_intermediate_size=96, n_routed_experts=4, layers_block_type=kinds,
        mamba_num_heads=4, mamba_head_dim=32, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    [found] = fused_experts(model, "", "nemotron_h")
    stored = "model.layers.1.mixer.experts.3"
    assert found.linears(3) == [(f"{stored}.up_proj", 96, 64), (f"{stored}.down_proj", 64, 96)]
    assert found.places == (("up_proj", None), ("down_proj", None)) and found.spelling.transformers_reads


def test_experts_that_return_their_input_are_computed() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 48, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "longcat_flash", **sizes, num_layers=1, n_routed_experts=4, zero_expert_num=3, moe_topk=2, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    [found] = fused_experts(model, "", "longcat_flash")
    assert found.shape == (4, 32, 48) and found.zero_experts == 3
    experts = SeparateExperts([torch.nn.Tanh() for _ in range(4)], zero_experts=3)
    x, index, weights = torch.randn(2, 32), torch.tensor([[1, 5], [4, 6]]), torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    expected = torch.stack([0.5 * x[0].tanh() + 2 * x[0], 4 * x[1]])
    assert torch.allclose(experts(x, index, weights), expected)


def test_experts_with_other_arithmetic_are_not_split() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = AutoConfig.for_model("mixtral", hidden_size=32, intermediate_size=48, num_local_experts=5)
    fused = MixtralExperts(config)
    assert computes_the_same(fused)
    fused.act_fn = torch.nn.Tanh()
    assert computes_the_same(fused), "the activation is the model's own"

    class Swapped(MixtralExperts):
        def _apply_gate(self, both: Tensor) -> Tensor:
            up, gate = both.chunk(2, dim=-1)
            return self.act_fn(gate) * up

        def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for number in range(self.num_experts):
                tokens, at = torch.where(index == number)
                inner = self._apply_gate(x[tokens] @ self.gate_up_proj[number].T) @ self.down_proj[number].T
                out.index_add_(0, tokens, inner * weights[tokens, at, None])
            return out

    assert not computes_the_same(Swapped(config))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("gpt_oss", **sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=64)
    other = AutoModelForCausalLM.from_config(config)
    assert not list(fused_experts(other, "", "gpt_oss"))


def test_experts_of_llama_4_are_given_weighted_inputs() -> None:
    from transformers import AutoConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 5, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("llama4_text", **sizes)
    module = Llama4TextMoe(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    holder = torch.nn.ModuleDict({"feed_forward": module})
    [found] = fused_experts(holder, "", "llama4_text")
    assert found.shape == (5, 32, 48) and found.spelling.transformers_reads and found.weigh_inputs
    assert found.linears(3)[2] == ("feed_forward.experts.3.down_proj", 32, 48)
    linears = [[torch.nn.Linear(k, n, bias=False) for _, n, k in found.linears(number)] for number in range(5)]
    for each, both, down in zip(linears, module.experts.gate_up_proj, module.experts.down_proj, strict=True):
        for linear, weight in zip(each, (*both.T.chunk(2), down.T), strict=True):
            linear.weight = torch.nn.Parameter(weight.contiguous())
    experts = [Expert(module.experts.act_fn, found.spelling, each) for each in linears]
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        expected = module(x)
        found.replace(holder, found.name, SeparateExperts(experts, weigh_inputs=True))
        actual = module(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    class Halved(Llama4TextMoe):
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            out, logits = super().forward(hidden_states)
            return out / 2, logits

    Halved.__name__ = "Llama4TextMoe"
    assert not list(fused_experts(torch.nn.ModuleDict({"feed_forward": Halved(config)}), "", "llama4_text"))
