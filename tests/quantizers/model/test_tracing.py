"""Tracing finds which layers feed which in unlisted families, and folding along it keeps every block's function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.model import smooth_mappings as search
from aiakq.quantizers.model.activations import Activations, Call
from aiakq.quantizers.model.experts import all_experts
from aiakq.quantizers.model.groups import Heads, SmoothMapping, fold, structure, trace_groups
from aiakq.quantizers.model.outer_layers import capture
from aiakq.quantizers.model.smooth_mappings import BlockTrace, find_mappings
from aiakq.quantizers.model.source import SourceModel

_SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_HEADS = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {**_HEADS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_GATED = "mlp.gate_proj mlp.up_proj"
_OUTPUT = ("self_attn.v_proj", "self_attn.o_proj")
_DOWN = ("mlp.up_proj", "mlp.down_proj")
_LLAMA = [("input_layernorm", _ATTENTION), _OUTPUT, ("post_attention_layernorm", _GATED), _DOWN]
_GEMMA = [("1+input_layernorm", _ATTENTION), _OUTPUT, ("1+pre_feedforward_layernorm", _GATED), _DOWN]
_PARALLEL = [("input_layernorm", f"{_ATTENTION} {_GATED}"), _OUTPUT, _DOWN]


def _each_expert(source: str, target: str, count: int) -> list[tuple[str, str]]:
    return [(source.format(number), target.format(number)) for number in range(count)]


def _all_experts(names: str, count: int) -> str:
    return " ".join(name.format(number) for number in range(count) for name in names.split())


#: model_type -> its config, and its last block's mappings: (source, targets); "1+" marks a norm times 1 + weight, and
#: (parts, first, length) follows the name of a fused source.
FAMILIES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "phi3": (
        {**_HEADS, "pad_token_id": 0},
        [
            ("input_layernorm", "self_attn.qkv_proj"),
            ("self_attn.qkv_proj(1, 96, 32)", "self_attn.o_proj"),
            ("post_attention_layernorm", "mlp.gate_up_proj"),
            ("mlp.gate_up_proj(1, 96, 96)", "mlp.down_proj"),
        ],
    ),
    "gemma": ({**_HEADS, "head_dim": 24}, [*_GEMMA[:2], ("1+post_attention_layernorm", _GATED), _DOWN]),
    "gemma2": ({**_HEADS, "head_dim": 24}, _GEMMA),
    "gemma3_text": ({**_HEADS, "head_dim": 24}, _GEMMA),
    "cohere": (_HEADS, _PARALLEL),
    "gpt_neox": (
        {**_SIZES, "num_attention_heads": 4},
        [
            ("input_layernorm", "attention.query_key_value"),
            ("attention.query_key_value(4, 32, 16)", "attention.dense"),
            ("post_attention_layernorm", "mlp.dense_h_to_4h"),
        ],
    ),
    "falcon": (
        {**_SIZES, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
        [
            ("ln_attn", "self_attention.query_key_value"),
            ("self_attention.query_key_value(2, 48, 16)", "self_attention.dense"),
            ("ln_mlp", "mlp.dense_h_to_4h"),
        ],
    ),
    "stablelm": (_HEADS, _LLAMA),
    "olmo2": (_HEADS, [_OUTPUT, _DOWN]),
    "granite": (_HEADS, _LLAMA),
    "starcoder2": (
        _HEADS,
        [("input_layernorm", _ATTENTION), _OUTPUT, ("post_attention_layernorm", "mlp.c_fc")],
    ),
    "mixtral": (
        {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
        [
            *_LLAMA[:2],
            (
                "post_attention_layernorm",
                _all_experts("block_sparse_moe.experts.{0}.w1 block_sparse_moe.experts.{0}.w3", 4)
                + " block_sparse_moe.gate",
            ),
            *_each_expert("block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2", 4),
        ],
    ),
    "qwen2_moe": (
        {**_EXPERTS, "shared_expert_intermediate_size": 48},
        [
            *_LLAMA[:2],
            (
                "post_attention_layernorm",
                "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj "
                + _all_experts("mlp.experts.{0}.gate_proj mlp.experts.{0}.up_proj", 6)
                + " mlp.shared_expert_gate mlp.gate",
            ),
            ("mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
            *_each_expert("mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj", 6),
        ],
    ),
    "qwen3_moe": (
        {**_EXPERTS, "head_dim": 24},
        [
            *_LLAMA[:2],
            (
                "post_attention_layernorm",
                _all_experts("mlp.experts.{0}.gate_proj mlp.experts.{0}.up_proj", 6) + " mlp.gate",
            ),
            *_each_expert("mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj", 6),
        ],
    ),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[SourceModel, Activations]]:
    """``opened(family)`` -> its model with every block loaded, and calibration inputs of the first block."""
    made: dict[str, tuple[SourceModel, Activations]] = {}

    def make(family: str) -> tuple[SourceModel, Activations]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            _save(family, FAMILIES[family][0], folder)
            model = SourceModel(Checkpoint.open(folder), None, torch.device("cpu"))
            batches = [torch.randint(3, 300, (2, 26), generator=torch.Generator().manual_seed(1))]
            made[family] = model, capture(model, batches, lambda done: None)
            for index, block in enumerate(model.blocks):
                model.load(block, model.block_prefix(index))
        return made[family]

    return make


def _save(family: str, numbers: dict[str, Any], folder: Path) -> None:
    import transformers

    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **{**ends, **numbers})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:  # norms of all ones would hide a forgotten one
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)


def _spelled(mapping: SmoothMapping) -> tuple[str, str]:
    source = f"{'1+' if mapping.plus_one else ''}{mapping.smooth_layer}{mapping.part or ''}"
    return source, " ".join(mapping.balance_layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_smooth_mappings_are_found_and_preserve_the_function(family: str, opened: Callable[..., Any]) -> None:
    model, inputs = opened(family)
    heads = Heads.of(model.config)
    index, block = len(model.blocks) - 1, model.blocks[-1]

    def run() -> Tensor:
        return inputs.run_one(block, index)

    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    with all_experts(block):
        mappings = find_mappings(block, run, heads)
    assert [_spelled(mapping) for mapping in mappings] == FAMILIES[family][1]
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter, before[name]), f"{name} was not put back"
    plain = run()
    make = torch.Generator().manual_seed(2)
    for mapping in mappings:
        count = len(mapping.rows(len(block.get_submodule(mapping.smooth_layer).weight)))
        fold(block, mapping, torch.exp(torch.randn(count, generator=make)), heads, torch.float32)
    assert float((run() - plain).norm() / plain.norm()) < 2e-5
    assert not torch.equal(
        before[f"{mappings[0].balance_layers[0]}.weight"],
        block.get_parameter(f"{mappings[0].balance_layers[0]}.weight"),
    )
    model.load(block, model.block_prefix(index))


@pytest.mark.parametrize("family", ["cohere", "falcon", "qwen2_moe"])
def test_groups_are_the_linears_with_the_same_input(family: str, opened: Callable[..., Any]) -> None:
    model, inputs = opened(family)
    block = model.blocks[0]
    with all_experts(block):
        groups = trace_groups(block, lambda: inputs.run_one(block, 0))
    if family == "cohere":
        assert tuple(f"{_ATTENTION} {_GATED}".split()) in groups
    elif family == "falcon":
        assert ("self_attention.query_key_value",) in groups and ("mlp.dense_h_to_4h",) in groups
    else:
        # Each expert has other tokens, so experts share no input.
        assert ("mlp.experts.3.gate_proj", "mlp.experts.3.up_proj") in groups
        assert ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj") in groups
        assert not any("shared_expert_gate" in name for group in groups for name in group)


def test_equal_blocks_are_traced_once_and_others_of_their_own(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = opened("qwen2_moe")
    calls: list[torch.nn.Module] = []
    real = search.find_mappings

    def counted(block: torch.nn.Module, *rest: Any) -> tuple[SmoothMapping, ...]:
        calls.append(block)
        return real(block, *rest)

    monkeypatch.setattr(search, "find_mappings", counted)
    trace = BlockTrace(Heads.of(model.config), fold=True)
    first, second = (trace.trace(block, index, inputs) for index, block in enumerate(model.blocks))
    assert first == second and len(calls) == 1
    other, _ = opened("qwen3_moe")
    assert structure(other.blocks[0]) != structure(model.blocks[0])
    assert BlockTrace(Heads.of(model.config), fold=False).trace(model.blocks[0], 0, inputs)[1] == ()


def test_a_consumer_that_cannot_be_scaled_excludes_the_mapping() -> None:
    """The norm's output also leaves the block on its own, so nothing may be folded into it."""

    class Leaky(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)
            self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            seen = self.norm(x)
            return seen + self.down(torch.relu(self.up(seen)))

    torch.manual_seed(0)
    block = Leaky()
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        mappings = find_mappings(block, lambda: block(x), Heads(1, 1))
    assert [_spelled(mapping) for mapping in mappings] == [("up", "down")]


def test_tokens_with_non_finite_values_do_not_hide_a_mapping() -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 5))
    x = torch.randn(1, 9, 8)
    x[0, 4] = float("nan")
    mappings = find_mappings(block, lambda: block(x), Heads(1, 1))
    assert [_spelled(mapping) for mapping in mappings] == [("0", "1")]


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "falcon", "mixtral"])
def test_probing_a_few_tokens_equals_probing_the_sequence(family: str, opened: Callable[..., Any]) -> None:
    model, inputs = opened(family)
    for index, block in enumerate(model.blocks):
        run = inputs.sample_forward(block, index, 10)
        assert run is not None
        found = run()
        assert found.shape == (1, 10, 64)
        torch.testing.assert_close(found, inputs.run_one(block, index)[:, :10], rtol=1e-4, atol=1e-5)


def test_a_non_causal_block_is_probed_on_the_whole_sequence() -> None:
    class Ahead(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.mean(1, keepdim=True)

    inputs = Activations([torch.randn(2, 9, 4)], {(2, 9): [Call((), {})]}, torch.device("cpu"))
    ahead, alone = inputs.sample_forward(Ahead(), 0, 3), inputs.sample_forward(torch.nn.Identity(), 0, 3)
    assert ahead is not None and ahead().shape == (1, 9, 4)
    assert alone is not None and alone().shape == (1, 3, 4)


def test_a_sequence_with_non_finite_values_is_skipped() -> None:
    hidden = [torch.full((2, 9, 4), float("nan")), torch.randn(2, 9, 4)]
    hidden[1][0, 2] = float("inf")
    hidden[1][0, 4:] = float("nan")
    inputs = Activations(hidden, {(2, 9): [Call((), {})]}, torch.device("cpu"))
    run = inputs.sample_forward(torch.nn.Identity(), 0, 3)
    assert run is not None and torch.equal(run(), hidden[1][1:, :3])
    assert Activations(hidden[:1], inputs.calls, inputs.device).sample_forward(torch.nn.Identity(), 0, 3) is None
