"""Folding scales into a model leaves its function alone, in every family with known mappings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.quantizers.model.groups import Heads, SmoothMapping, block_linears, fold, gates, trace_groups
from aiakq.quantizers.model.smooth_mappings import find_mappings

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
}
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def known_mappings(config: Any) -> tuple[SmoothMapping, ...]:
    """Return the mappings read from the model's code by hand."""
    if config.model_type != "opt":
        return (
            SmoothMapping("input_layernorm", _ATTENTION, "self_attn"),
            SmoothMapping("self_attn.v_proj", ("self_attn.o_proj",), "self_attn.o_proj", heads=True),
            SmoothMapping("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp"),
            SmoothMapping("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj"),
        )
    # ReLU lets positive scales through; norms after the sublayers (350m) feed the residual too and stay out.
    mappings = [SmoothMapping("self_attn.v_proj", ("self_attn.out_proj",), "self_attn.out_proj")]
    if config.do_layer_norm_before:
        mappings.insert(0, SmoothMapping("self_attn_layer_norm", _ATTENTION, "self_attn"))
        mappings.append(SmoothMapping("final_layer_norm", ("fc1",), "fc1"))
    if config.activation_function == "relu":
        mappings.append(SmoothMapping("fc1", ("fc2",), "fc2"))
    return tuple(mappings)


def found_mappings(model: Any, index: int = 0) -> tuple[SmoothMapping, ...]:
    """What the search finds in a block of a loaded model."""
    block = blocks(model)[index]
    seen: dict[str, Tensor] = {}
    handle = block.register_forward_hook(lambda module, args, output: seen.update(out=first(output)))

    def run() -> Tensor:
        model(torch.arange(3, 35).unsqueeze(0))
        return seen["out"]

    mappings = find_mappings(block, run, Heads.of(model.config))
    handle.remove()
    return mappings


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def load(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def blocks(model: Any) -> Any:
    return model.model.decoder.layers if model.config.model_type == "opt" else model.model.layers


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def uneven(model: Any) -> Any:
    """Norms of all ones would hide a forgotten one."""
    make = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter.copy_(torch.rand(parameter.shape, generator=make) + 0.5)
    return model


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_the_known_smooth_mappings_are_found(family: str, tiny_model: Callable[..., Path]) -> None:
    model = uneven(load(tiny_model(ARCHITECTURES[family])))
    assert found_mappings(model) == found_mappings(model, 1) == known_mappings(model.config)


@pytest.mark.parametrize("changes", [{"do_layer_norm_before": False}, {"activation_function": "gelu"}])
def test_opt_variants_drop_mappings_that_are_not_exact(
    changes: dict[str, Any], tiny_model: Callable[..., Path]
) -> None:
    model = uneven(load(tiny_model("OPTForCausalLM", **changes)))
    assert found_mappings(model) == known_mappings(model.config)
    assert len(found_mappings(model)) == (2 if "do_layer_norm_before" in changes else 3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_multi_head_attention_needs_no_tied_heads(family: str, tiny_model: Callable[..., Path]) -> None:
    changes = {} if family == "opt" else {"num_key_value_heads": 4}
    model = uneven(load(tiny_model(ARCHITECTURES[family], **changes)))
    assert found_mappings(model) == tuple(replace(mapping, heads=False) for mapping in known_mappings(model.config))


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_function_is_preserved(family: str, storage: torch.dtype, tiny_model: Callable[..., Path]) -> None:
    model = uneven(load(tiny_model(ARCHITECTURES[family])))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(storage))
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    mappings = known_mappings(model.config)
    heads = Heads.of(model.config)
    assert len(mappings) == 4
    with torch.no_grad():
        before = model(ids).logits
        make = torch.Generator().manual_seed(1)
        for block in blocks(model):
            for mapping in mappings:
                source = block.get_submodule(mapping.smooth_layer)
                scales = torch.exp(torch.randn(source.weight.shape[0], generator=make))
                changed, columns = fold(block, mapping, scales, heads, storage)
                assert columns.shape == (block.get_submodule(mapping.balance_layers[0]).in_features,)
                for name, tensor in changed.items():
                    assert torch.equal(tensor, block.get_parameter(name))
                    assert torch.equal(tensor, tensor.to(storage).float())
        after = model(ids).logits
    # A rounded bias is the only thing that a 16-bit dtype may cost; norms are compensated exactly.
    biased = any(parameter.dim() == 1 and name.endswith("bias") for name, parameter in model.named_parameters())
    assert relative(after, before) < (5e-3 if storage != torch.float32 and biased else 1e-5)


def test_the_index_of_sparse_attention_is_rescaled_and_not_quantized(tiny_model: Callable[..., Path]) -> None:
    """Its linears read what those of attention read, and decide which positions are read: 40 are, of which 8 count."""
    model = uneven(load(tiny_model("DeepseekV32ForCausalLM")))
    mappings, heads = found_mappings(model), Heads.of(model.config)
    readers = {mapping.smooth_layer: set(mapping.balance_layers) for mapping in mappings}
    prefix = "self_attn.indexer"
    assert readers["input_layernorm"] >= {f"{prefix}.wk", f"{prefix}.weights_proj", "self_attn.q_a_proj"}
    assert readers["self_attn.q_a_layernorm"] == {f"{prefix}.wq_b", "self_attn.q_b_proj"}
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, block, make = model(ids).logits, blocks(model)[0], torch.Generator().manual_seed(1)
        for mapping in mappings:
            weight = block.get_submodule(mapping.smooth_layer).weight
            if any("indexer" in name for name in mapping.balance_layers):
                fold(block, mapping, torch.exp(torch.randn(len(weight), generator=make)), heads, torch.float32)
        assert relative(model(ids).logits, before) < 1e-5
    assert not any("indexer" in name for name in block_linears(block))


def test_a_channel_that_cannot_be_scaled_keeps_its_scale() -> None:
    """A norm weight of 0, or one that underflows, must not lose or blow up its channel."""

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
        fold(block, SmoothMapping("norm", ("linear",), "linear"), scales, Heads(1, 1), torch.float16)
        assert bool(torch.isfinite(block.norm.weight).all())
        assert relative(block(x), before) < 1e-3


@pytest.mark.parametrize("family", [*sorted(ARCHITECTURES), "gpt_neox"])
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


def test_the_gates_of_recurrences_stay_as_they_are(tiny_model: Callable[..., Path]) -> None:
    """They have as many outputs as there are heads: often no multiple of 32, and files hold tiles of so many."""
    block = blocks(load(tiny_model("Qwen3_5ForCausalLM")))[0]
    parts = {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert {name.rpartition(".")[2] for name in block_linears(block) if "linear_attn" in name} == parts
    assert gates(block) == ["linear_attn.in_proj_a", "linear_attn.in_proj_b"]
    mappings = found_mappings(load(tiny_model("Qwen3_5ForCausalLM")))
    [scaled] = [each.balance_layers for each in mappings if each.smooth_layer == "input_layernorm"]
    assert set(gates(block)) < set(scaled), "the norm before them is scaled for them, too"


def test_tied_heads() -> None:
    heads = Heads(q_heads=4, kv_heads=2)
    per_query = torch.arange(4 * 3).float()
    assert heads.tie(per_query, "mean").tolist() == [1.5, 2.5, 3.5, 7.5, 8.5, 9.5]
    assert heads.tie(per_query, "max").tolist() == [3, 4, 5, 9, 10, 11]
    assert heads.spread(torch.tensor([1.0, 2, 3, 4, 5, 6])).tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6]


def test_a_norm_that_multiplies_by_one_plus_its_weight() -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    norm: Any = Gemma2RMSNorm(6)
    block = torch.nn.Sequential(norm, torch.nn.Linear(6, 3))
    make = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # One channel is switched off, and must stay so.
        norm.weight.copy_(torch.tensor([0.0, 0.5, -0.3, 2.0, -1.0, 0.1]))
        x = torch.randn(5, 6, generator=make)
        before = block(x)
        mapping = SmoothMapping("0", ("1",), "1", plus_one=True)
        changed, columns = fold(block, mapping, torch.rand(6, generator=make) * 4 + 0.2, Heads(1, 1), torch.bfloat16)
        assert set(changed) == {"0.weight"} and columns[4] == 1 and changed["0.weight"][4] == -1
        assert torch.equal(changed["0.weight"], changed["0.weight"].bfloat16().float())
        assert relative(block(x), before) < 1e-5


def test_only_the_mapped_rows_of_a_fused_layer_are_scaled() -> None:
    mapping = SmoothMapping("qkv", ("o",), "o", part=(2, 4, 2))
    assert mapping.rows(12).tolist() == [4, 5, 10, 11]
    assert SmoothMapping("up", ("down",), "down").rows(3).tolist() == [0, 1, 2]
    block: Any = torch.nn.ModuleDict({"qkv": torch.nn.Linear(3, 12), "o": torch.nn.Linear(4, 3)})
    before = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    scales = torch.tensor([2.0, 4.0, 0.5, 0.25])
    with torch.no_grad():
        changed, columns = fold(block, mapping, scales, Heads(2, 2), torch.float32)
    assert changed == {} and torch.equal(columns, scales)
    rows = torch.ones(12)
    rows[[4, 5, 10, 11]] = scales
    assert torch.equal(block["qkv"].weight, before["qkv.weight"] / rows.unsqueeze(1))
    assert torch.equal(block["qkv"].bias, before["qkv.bias"] / rows)
    assert torch.equal(block["o"].weight, before["o.weight"] * scales)
