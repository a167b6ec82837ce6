"""Every native family against transformers: log-probabilities of every position, in batches and in chunks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.models import ARCHITECTURES

VOCABULARY = 320
LENGTHS = (1, 2, 3, 7, 16, 17, 50, 90, 60)
#: Nats; float32 sums in another order.
TOLERANCE = 1e-4
#: Where transformers' own float32 is further than that from its float64, or both together are: the chunked form of the
#: delta rule by 1.5e-4 (ours by 0.8e-4), that of Kimi Linear by 1.2e-4 (ours by 0.6e-4), OLMo-Hybrid by up to 3.4e-4
#: (ours by 0.8e-4), Mamba by 0.4e-4 (ours by 0.6e-4), FalconMamba by 0.5e-4 (ours by 1.2e-4).
RECURRENT = ("Zamba2", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "KimiLinear", "Mamba", "FalconMamba", "Jamba")
TOLERANCES = {f"{name}ForCausalLM": 3e-4 for name in RECURRENT} | {"OlmoHybridForCausalLM": 6e-4}
MODES: dict[str, dict[str, Any]] = {
    "batch": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_chunked_prefill": True},
    "operation by operation": {"max_num_seqs": 1, "enforce_eager": True},
}


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def of_transformers(folder: Path, change: Callable[[Any], None] | None = None) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt, after a ``change`` of the model."""
    from transformers import AutoModelForCausalLM

    # Its eager attention adds Falcon's ALiBi twice: to the scores, and in the mask.
    kind = "sdpa" if json.loads((folder / "config.json").read_text()).get("alibi") else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()
    with torch.inference_mode():
        if change is not None:
            change(model)
        return [model(torch.tensor([each]), use_cache=False).logits[0].log_softmax(-1) for each in prompts()]


def ours(folder: Path, **arguments: Any) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=128,
        cpu_math="exact",
        num_gpu_blocks_override=257,
        enable_prefix_caching=False,
        max_logprobs=-1,
        **arguments,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCABULARY, logprobs=VOCABULARY)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    rows = [[*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]] for answer in answers]
    return [torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in each]) for each in rows]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_those_of_transformers(architecture, tiny_model):
    folder = tiny_model(architecture)
    expected = of_transformers(folder)
    differences = {mode: largest_difference(ours(folder, **arguments), expected) for mode, arguments in MODES.items()}
    assert max(differences.values()) < TOLERANCES.get(architecture, TOLERANCE), differences


#: Other spellings and settings of a family: architecture, what its tiny config has besides, what config.json says.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt_bigcode without shared keys": ("GPTBigCodeForCausalLM", {"multi_query": False}, {}),
    "gpt2 scaled by layer": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, {}),
    "phi3 longrope": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + index / 16 for index in range(16)],
                "long_factor": [2.0 + index for index in range(16)],
            },
        },
        {},
    ),
    "phi3 longrope, short and long texts": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + index / 16 for index in range(16)],
                "long_factor": [2.0 + index for index in range(16)],
            },
        },
        {},
    ),
    "yarn beyond its original context": (
        "Qwen2ForCausalLM",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 500.0,
                "original_max_position_embeddings": 32,
            },
        },
        {},
    ),
    "dynamic within what it was trained for": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 4.0,
                "rope_theta": 500.0,
                "original_max_position_embeddings": 32,
            }
        },
        {},
    ),
    "top-level partial_rotary_factor": (
        "PhiForCausalLM",
        {},
        {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "olmo3 with old rope_scaling": (
        "Olmo3ForCausalLM",
        {},
        {
            "rope_parameters": None,
            "rope_theta": 300.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "falcon with groups": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        {},
    ),
    "falcon with groups and one norm": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {},
    ),
    "falcon in sequence with keys for every head": (
        "FalconForCausalLM",
        {"multi_query": False, "parallel_attn": False},
        {},
    ),
    "falcon with ALiBi": ("FalconForCausalLM", {"alibi": True, "bias": True}, {}),
    "falcon with ALiBi, in sequence with keys for every head": (
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        {},
    ),
    "falcon with ALiBi and groups": (
        "FalconForCausalLM",
        {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
        {},
    ),
    "gemma3 in the old spelling": (
        "Gemma3ForCausalLM",
        {},
        {
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "gemma2 without caps": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {},
    ),
    "gptj that rotates whole heads": ("GPTJForCausalLM", {"rotary_dim": 32}, {}),
    "llama4 with experts in every layer": (
        "Llama4ForCausalLM",
        {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "use_qk_norm": False},
        {},
    ),
    "smollm3 that names its layers": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 0, 1]}, {}),
    "deepseek v2 lite, with biases": (
        "DeepseekV2ForCausalLM",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": None,
        },
        {},
    ),
    "deepseek v3 with halves rotated and yarn": (
        "DeepseekV3ForCausalLM",
        {
            "rope_interleave": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 300.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {},
    ),
    "deepseek v3.2 with biases, yarn and a list of dense layers": (
        "DeepseekV32ForCausalLM",
        {
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense"],
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 300.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
        {},
    ),
    "glm 5 with a schedule of indices": (
        "GlmMoeDsaForCausalLM",
        {"num_hidden_layers": 4, "indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"indexer_types": None, "mlp_layer_types": None},
    ),
    "lfm2 in the old spelling, with biases": (
        "Lfm2ForCausalLM",
        {"conv_bias": True, "conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3},
        {"layer_types": None, "full_attn_idxs": [1], "intermediate_size": None, "block_ff_dim": 384},
    ),
    "lfm3 with layers that follow from their number": (
        "Lfm3ForCausalLM",
        {
            "layer_types": None,
            "num_hidden_layers": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
                "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            },
        },
        {"layer_types": None},
    ),
    "lfm3 with biases, without gates and outer norms": (
        "Lfm3ForCausalLM",
        {
            **dict.fromkeys(("attention_bias", "conv_bias"), True),
            **dict.fromkeys(("use_attention_gate", "use_sandwich_norm", "tie_word_embeddings"), False),
            "conv_L_cache": 3,
        },
        {},
    ),
    "gemma 4 with experts beside the MLP, and without inputs of layers": (
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 128,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
        },
        {},
    ),
    "gemma 4 as files from the hub spell it": (
        "Gemma4ForCausalLM",
        {
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
            "attention_k_eq_v": False,
            "per_layer_config": {5: {"head_dim": 64}},
            "final_logit_softcapping": None,
        },
        {"layer_types": None, "per_layer_config": None, "global_head_dim": 64, "num_global_key_value_heads": 1},
    ),
    "lfm2 with the width it states": ("Lfm2ForCausalLM", {"block_auto_adjust_ff_dim": False}, {}),
    "mamba2 with biases and limits": (
        "Mamba2ForCausalLM",
        {"use_bias": True, "use_conv_bias": False, "time_step_limit": [0.05, 0.4], "tie_word_embeddings": True},
        {},
    ),
    "mamba with another width": (
        "MambaForCausalLM",
        {"expand": 3, "use_bias": False, "use_conv_bias": False, "tie_word_embeddings": False, "time_step_rank": 8},
        {"intermediate_size": None, "time_step_rank": "auto", "rms_norm": True, "d_inner": 384, "ssm_cfg": {}},
    ),
    "qwen3_next with biases and a pattern": (
        "Qwen3NextForCausalLM",
        {
            "attention_bias": True,
            "norm_topk_prob": False,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
        },
        {"layer_types": None, "full_attention_interval": 2},
    ),
    "olmo hybrid with positions and sizes that follow from others": (
        "OlmoHybridForCausalLM",
        {
            "num_hidden_layers": 4,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")),
            **dict.fromkeys(("linear_value_head_dim", "layer_types", "rope_parameters")),
        },
        {},
    ),
    "kimi linear in its authors' spelling, with low-rank queries and biases": (
        "KimiLinearForCausalLM",
        {"q_lora_rank": 64, "attention_bias": True, "linear_conv_kernel_dim": 3, "num_expert_group": 2},
        {
            "linear_attn_config": {
                "num_heads": 3,
                "head_dim": 32,
                "short_conv_kernel_size": 3,
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
            },
            **dict.fromkeys(("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads")),
            **{"linear_conv_kernel_dim": None, "first_k_dense_replace": 1, "mla_use_nope": True, "rope_theta": 1e4},
        },
    ),
    "minimax with another epsilon, which the norm of lightning attention has not": (
        "MiniMaxForCausalLM",
        {"rms_norm_eps": 0.05},
        {},
    ),
    "granite 4 without experts, with positions": (
        "GraniteMoeHybridForCausalLM",
        {"num_local_experts": 0, "position_embedding_type": "rope"},
        {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "hunyuan with biases, and without a stretched base": (
        "HunYuanDenseV1ForCausalLM",
        {"attention_bias": True, "rope_parameters": None},
        {},
    ),
    "hunyuan with lists by layer": ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 3]}, {"num_shared_expert": [1, 1]}),
    "mpt with scores of zero": ("MptForCausalLM", {"attn_config": {"softmax_scale": 0.0}}, {}),
    "granite with multipliers of zero": (
        "GraniteForCausalLM",
        {"residual_multiplier": 0.0, "attention_multiplier": 0.0},
        {},
    ),
    "cohere with norms of heads": ("CohereForCausalLM", {"use_qk_norm": True}, {}),
    "stablelm with norms of heads": ("StableLmForCausalLM", {"qk_layernorm": True}, {}),
    "exaone4 without windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        {},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_families(name, tiny_model, tmp_path):
    architecture, settings, written = VARIANTS[name]
    folder = tiny_model(architecture, **settings)
    expected = of_transformers(folder)
    if written:
        folder = rewritten(folder, tmp_path / "model", written)
    assert largest_difference(ours(folder), expected) < TOLERANCES.get(architecture, TOLERANCE)


def test_biases_of_falcon_are_not_rounded(tiny_model, monkeypatch):
    """transformers rounds ALiBi's biases to bfloat16, exactly only for powers of two and up to 256 tokens."""
    settings = {"hidden_size": 192, "num_attention_heads": 6, "multi_query": False, "parallel_attn": False}
    folder = tiny_model("FalconForCausalLM", alibi=True, **settings)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda slopes: slopes)
    expected = of_transformers(folder)
    monkeypatch.undo()
    assert largest_difference(ours(folder), expected) < TOLERANCE


def test_minimax_rotates_the_first_elements_of_heads_that_its_authors_state(tiny_model, tmp_path):
    """transformers ignores ``rotary_dim``: there, the same with other elements as pairs, and others not rotated."""
    folder = rewritten(tiny_model("MiniMaxForCausalLM"), tmp_path / "model", {"rotary_dim": 16})
    order = torch.tensor([*range(8), *range(16, 32), *range(8, 16), *range(32, 48)])

    def change(model: Any) -> None:
        rotary, attention = model.model.rotary_emb, model.model.layers[1].self_attn
        base = model.config.rope_parameters["rope_theta"]
        rotary.inv_freq = torch.cat([base ** (-torch.arange(8.0) / 8), torch.zeros(16)])
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight.copy_(linear.weight.unflatten(0, (-1, 48))[:, order].flatten(0, 1))

    assert largest_difference(ours(folder), of_transformers(folder, change)) < TOLERANCE


def test_a_rotary_scaling_that_norms_of_llama4_undo_is_refused(tiny_model, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0, "original_max_position_embeddings": 64}
    source, plain = tiny_model("Llama4ForCausalLM"), {"rope_parameters": {**yarn, "attention_factor": 1.0}}
    with pytest.raises(AiakqError, match="yarn with an attention_factor in a Llama4ForCausalLM"):
        ours(rewritten(source, tmp_path / "model", {"rope_parameters": yarn}))
    folder = rewritten(source, tmp_path / "plain", plain)
    assert largest_difference(ours(folder), of_transformers(folder)) < TOLERANCE


@pytest.mark.parametrize("family", ["MiniMax", "MiniMaxM2"])
def test_a_rotary_dim_of_minimax_beside_another_part_of_heads_is_refused(family, tiny_model, tmp_path):
    rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    config = {"rotary_dim": 16, "rope_parameters": rope}
    folder = rewritten(tiny_model(f"{family}ForCausalLM"), tmp_path / "model", config)
    with pytest.raises(AiakqError, match=r"its rotary_dim is 16, its partial_rotary_factor 0\.5, and head_dim 48"):
        ours(folder)


def test_minimax_with_two_lists_of_layers_that_differ_is_refused(tiny_model, tmp_path):
    kept, other = (tmp_path / name for name in ("kept", "other"))
    ours(rewritten(tiny_model("MiniMaxForCausalLM"), kept, {"attn_type_list": [0, 1, 0]}))
    with pytest.raises(AiakqError, match="attn_type_list has other layers"):
        ours(rewritten(tiny_model("MiniMaxForCausalLM"), other, {"attn_type_list": [0, 1, 1]}))


def test_convolutions_may_have_more_channels_than_the_file_has_tensors(tiny_model):
    folder = tiny_model("KimiLinearForCausalLM", linear_num_heads=64)
    checkpoint = Checkpoint.open(folder)
    assert check_inventory(ModelConfig.from_hf(checkpoint.config), checkpoint) == set()


def test_dense_layers_of_kimi_linear_are_read_under_both_names(tiny_model, tmp_path):
    folder = tiny_model("KimiLinearForCausalLM")
    renamed = rewritten(folder, tmp_path / "model", {})
    tensors = load_file(folder / "model.safetensors")
    names = {name: name.replace("layers.0.block_sparse_moe", "layers.0.mlp") for name in tensors}
    assert sum(name != new for name, new in names.items()) == 3
    save_file({names[name]: tensor for name, tensor in tensors.items()}, renamed / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(ours(folder), ours(renamed), strict=True))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("Mamba2", "expand"), ("FalconMamba", "state_size"), ("Qwen3Next", "linear_num_value_heads")],
)
def test_sizes_that_no_model_has_are_refused(architecture, name, tiny_model, tmp_path):
    folder = rewritten(tiny_model(f"{architecture}ForCausalLM"), tmp_path / "model", {name: 2**26})
    with pytest.raises(AiakqError, match="linear_num_value_heads|outputs|do not make|A_log"):
        ours(folder)


def test_gates_of_lfm3_may_have_the_name_of_their_module(tiny_model, tmp_path):
    source = tiny_model("Lfm3ForCausalLM")
    folder = rewritten(source, tmp_path / "model", {})
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace(".gate_proj.", ".g_proj."): tensor for name, tensor in tensors.items()}
    assert named.keys() != tensors.keys()
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    assert largest_difference(ours(folder), ours(source)) == 0


@pytest.mark.parametrize(
    "family", ["Llama", "Gemma2", "Cohere", "Olmo2", "Granite", "Exaone4", "DeepseekV2", "DeepseekV3", "MiniMax"]
)
def test_a_part_of_heads_that_transformers_would_not_rotate_alone_is_refused(family, tiny_model, tmp_path):
    folder = rewritten(tiny_model(f"{family}ForCausalLM"), tmp_path / "model", {"partial_rotary_factor": 0.5})
    with pytest.raises(AiakqError, match=f"partial_rotary_factor 0.5 in a {family}ForCausalLM"):
        ours(folder)


def rewritten(folder: Path, target: Path, values: dict[str, Any]) -> Path:
    """The model with other values in config.json; None removes one."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None or name not in values}
    (target / "config.json").write_text(json.dumps(config))
    return target
