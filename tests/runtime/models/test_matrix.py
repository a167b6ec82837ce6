"""Tiny random models of many architectures: each is computed exactly, or refused in one sentence.

A share runs always; all of it with ``AIAKQ_EVERY_ARCHITECTURE=1 pytest tests/runtime/models/test_matrix.py``.
``make models`` writes what it finds to docs/models.md.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.models import ARCHITECTURES
from aiakq.runtime.models.decoder import Decoder

VOCABULARY = 320
LENGTHS = (1, 2, 3, 7, 16, 17, 50, 90, 60)
#: Nats; float32 sums in another order.
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 32}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
#: Shorter than most prompts, with enough heads that no two scores are equal.
INDEX = {"index_topk": 12, "index_head_dim": 32, "index_n_heads": 16}
GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_ctx": 512, "intermediate_size": 512}
FALCON = {"num_kv_heads": 2, "intermediate_size": 512}
BLOOM = {"n_head": 4, "n_layer": 2, "intermediate_size": 512}
SSM = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "mamba_expand": 2,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FOUR = {"num_hidden_layers": 4}
WINDOW = {"sliding_window": 24}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """Rotary scaling beyond a context of 64."""
    return {
        "rope_parameters": {
            "rope_type": kind, "rope_theta": 500.0, "original_max_position_embeddings": 64, **values
        }
    }  # fmt: skip


#: Name of a case -> model type and what its config has besides SIZES.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, config)
    for name, config in {
        "afmoe": {**HEADS, **EXPERTS, **FOUR}, "apertus": HEADS, "arcee": HEADS,
        "aria_text": {**EXPERTS, "moe_num_experts": 4}, "axk1": {**EXPERTS, **LATENT},
        "bailing_hybrid": {**EXPERTS, **HEADS}, "bamba": {**SSM, "attn_layer_indices": [1]}, "biogpt": {},
        "bitnet": {}, "bloom": BLOOM, "codegen": {**GPT2, "rotary_dim": 16}, "cohere": {}, "cohere2": WINDOW,
        "cohere2_moe": {**EXPERTS, **WINDOW}, "ctrl": {"dff": 256, **GPT2}, "cwm": {**HEADS, **WINDOW},
        "deepseek_v2": {**EXPERTS, **LATENT}, "deepseek_v3": {**EXPERTS, **LATENT},
        "deepseek_v32": {**EXPERTS, **LATENT, **INDEX}, "diffllama": {}, "doge": {},
        "ernie4_5": HEADS,
        "ernie4_5_moe": {
            **HEADS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        "exaone4": {**HEADS, **WINDOW, **FOUR}, "exaone_moe": {**HEADS, **EXPERTS, **WINDOW, **FOUR},
        "falcon": FALCON, "falcon_h1": {**SSM, **HEADS, "mamba_d_ssm": 256}, "falcon_mamba": {},
        "flex_olmo": EXPERTS, "gemma": HEADS, "gemma2": {**HEADS, **WINDOW},
        "gemma3_text": {**HEADS, **WINDOW, **FOUR}, "glm": HEADS, "glm4": HEADS, "glm4_moe": {**HEADS, **EXPERTS},
        "glm4_moe_lite": {**EXPERTS, **LATENT},
        "glm_moe_dsa": {**EXPERTS, **LATENT, **INDEX},
        "gpt-sw3": GPT2, "gpt2": GPT2, "gpt_bigcode": GPT2,
        "gpt_neo": {
            "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 24,
        },
        "gpt_neox": {}, "gpt_neox_japanese": {}, "gpt_oss": {**HEADS, **EXPERTS, **WINDOW},
        "gptj": {**GPT2, "rotary_dim": 16},
        "granite": {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        "granitemoe": EXPERTS,
        "granitemoehybrid": {
            **EXPERTS, **SSM, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64,
        },
        "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 64}, "helium": HEADS, "hunyuan_v1_dense": HEADS,
        "hunyuan_v1_moe": {
            **HEADS, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 64, "num_shared_expert": 1,
        },
        "hy_v3": {**HEADS, **EXPERTS}, "hyperclovax": {}, "internlm3": {}, "iquestcoder": {}, "jais2": HEADS,
        "jamba": {
            **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "use_mamba_kernels": False,
        },
        "jetmoe": {**EXPERTS, "kv_channels": 32}, "kimi_linear": {**EXPERTS, **LATENT},
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "llama": {},
        "llama4_text": {
            **HEADS, **EXPERTS, **FOUR, "attention_chunk_size": 24, "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
        },
        "longcat_flash": {
            **EXPERTS, **LATENT, "ffn_hidden_size": 256, "expert_ffn_hidden_size": 64, "zero_expert_num": 1,
            "moe_topk": 2, "num_layers": 2,
        },
        "mamba": {}, "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
        "mellum": {**HEADS, **EXPERTS}, "minicpm3": LATENT, "minimax": {**HEADS, **EXPERTS, "block_size": 16},
        "minimax_m2": {**HEADS, **EXPERTS, "rotary_dim": 16}, "ministral": {**HEADS, **WINDOW}, "ministral3": HEADS,
        "mistral": WINDOW, "mixtral": EXPERTS, "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 2}, "nanochat": {},
        "nemotron": {},
        "nemotron_h": {
            **HEADS, **EXPERTS, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
            "chunk_size": 16, "hybrid_override_pattern": "M*-E", "moe_shared_expert_intermediate_size": 64,
            **FOUR,
        },
        "olmo": {}, "olmo2": {}, "olmo3": {**WINDOW, **FOUR}, "olmo_hybrid": {**LINEAR}, "olmoe": EXPERTS,
        "openai-gpt": GPT2, "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128}, "persimmon": {}, "phi": {},
        "phi3": {}, "phimoe": EXPERTS, "qwen2": {}, "qwen2_moe": EXPERTS, "qwen3": HEADS,
        "qwen3_5_text": {**HEADS, **LINEAR, "linear_num_value_heads": 8},
        "qwen3_5_moe_text": {**HEADS, **EXPERTS, **LINEAR, "linear_num_value_heads": 8},
        "qwen3_moe": {**HEADS, **EXPERTS},
        "qwen3_next": {**HEADS, **EXPERTS, **LINEAR},
        "recurrent_gemma": {"lru_width": 128, "attention_window_size": 24, **HEADS, "num_hidden_layers": 3},
        "rwkv": {}, "seed_oss": HEADS, "smollm3": FOUR,
        "solar_open": {**HEADS, **EXPERTS, "first_k_dense_replace": 0}, "stablelm": {},
        "starcoder2": {}, "vaultgemma": {**HEADS, **WINDOW},
        "xglm": {"d_model": 128, "attention_heads": 4, "num_layers": 2, "ffn_dim": 256}, "xlstm": {}, "youtu": LATENT,
        "dots1": {**HEADS, **EXPERTS},
    }.items()
} | {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, every head its key": ("llama", {"num_key_value_heads": 4}),
    "llama, one key": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 48}),
    "llama, linear scaling": ("llama", rope("linear", factor=4.0)),
    "llama, dynamic scaling": ("llama", {**rope("dynamic", factor=4.0), "max_position_embeddings": 256}),
    "llama, llama3 scaling": ("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, yarn": ("llama", rope("yarn", factor=4.0)),
    "llama, yarn with mscale": ("llama", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.0)),
    "llama, yarn without truncation": ("llama", rope("yarn", factor=4.0, truncate=False)),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 256,
            **rope(
                "longrope",
                short_factor=[1.0 + index / 16 for index in range(16)],
                long_factor=[2.0 + index for index in range(16)],
            ),
        },
    ),
    "phi3, window": ("phi3", WINDOW),
    "qwen2, windows in half the layers": (
        "qwen2", {**WINDOW, **FOUR, "use_sliding_window": True, "max_window_layers": 2}
    ),
    "qwen2_moe, a dense layer": ("qwen2_moe", {**EXPERTS, "mlp_only_layers": [1]}),
    "gemma2, no caps": ("gemma2", {**HEADS, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gpt2, scaled by layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode, every head its key": ("gpt_bigcode", {**GPT2, "multi_query": False}),
    "falcon, new architecture": ("falcon", {**FALCON, "new_decoder_architecture": True, "bias": True}),
    "falcon, in sequence": ("falcon", {**FALCON, "num_kv_heads": 4, "multi_query": False, "parallel_attn": False}),
    "falcon, ALiBi": ("falcon", {**FALCON, "alibi": True}),
    "stablelm, norms of heads": ("stablelm", {"qk_layernorm": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "deepseek_v2, no query latent": ("deepseek_v2", {**EXPERTS, **LATENT, "q_lora_rank": None}),
    "glm_moe_dsa, a shared index": (
        "glm_moe_dsa", {**EXPERTS, **LATENT, **INDEX, "indexer_types": ["full", "shared"]},
    ),
    "deepseek_v3, groups of experts": (
        "deepseek_v3",
        {**EXPERTS, **LATENT, "n_routed_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "falcon_h1, multipliers": (
        "falcon_h1",
        {
            **SSM, **HEADS, "mamba_d_ssm": 192, "mamba_d_head": 24, "mamba_n_groups": 2, "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.8, 1.2, 0.7, 1.4, 0.6], "key_multiplier": 0.8, "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "projectors_bias": True, "attention_bias": True,
            "mlp_bias": True, "mamba_proj_bias": True,
        },
    ),
    "falcon_h1, gated norms": (
        "falcon_h1", {**SSM, **HEADS, "mamba_d_ssm": 256, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "nemotron_h, biases": (
        "nemotron_h",
        {
            **HEADS, **FOUR, "mamba_num_heads": 8, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2,
            "chunk_size": 16, "layers_block_type": ["mlp", "full_attention", "linear_attention", "mlp"],
            "use_bias": True, "mlp_bias": True, "time_step_min": 1.2,
        },
    ),
    "granitemoehybrid, no attention": (
        "granitemoehybrid", {**EXPERTS, **SSM, "layer_types": ["mamba", "mamba"], "shared_intermediate_size": 64}
    ),
}  # fmt: skip
#: Run always: one natively computed, one through transformers, one refused.
SHARE = ("gemma2", "apertus", "rwkv")


@dataclass(frozen=True)
class Outcome:
    """The results of one architecture.

    runs        native, transformers, or refused.
    reason      why it is refused.
    difference  the largest one between log-probabilities of ours and of transformers, in nats.
    same        whether the same tokens follow when prefixes are cached and sequences are preempted.
    same_bits   whether log-probabilities do not change in the last bit then.
    page_bytes  of 16 tokens in a cache of 16 bits, with the states of recurrent layers at their end.
    """

    runs: str
    reason: str = ""
    difference: float = 0.0
    same: bool = True
    same_bits: bool = True
    page_bytes: int = 0

    @property
    def exact(self) -> bool:
        return self.runs != "refused" and self.difference < TOLERANCE and self.same


def prompts() -> list[list[int]]:
    """Random tokens; half of the longer prompts begin alike."""
    draw = random.Random(7)
    made = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return [[*made[7][: len(each) - 5], *each[-5:]] if len(each) in (50, 60) else each for each in made]


def save(name: str, folder: Path, tokenizer: Any) -> None:
    """A random model of the case ``name`` with its tokenizer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, config = CASES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **config}), dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 2 or (parameter.dim() > 2 and "conv" not in path):
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
            elif path.endswith("bias") and "dt_" not in path:
                parameter.normal_(0.0, 0.1)
            elif "norm" in path or "ln_" in path:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def of_transformers(folder: Path) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([each]), use_cache=False).logits[0].log_softmax(-1) for each in prompts()]


def load(folder: Path, **arguments: Any) -> LLM:
    """The model with exact arithmetic."""
    fixed = {"dtype": "float32", "max_model_len": 128, "cpu_math": "exact", "max_logprobs": -1}
    return LLM(str(folder), **{**fixed, "num_gpu_blocks_override": 257, "enable_prefix_caching": False, **arguments})


def log_probabilities(llm: LLM) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCABULARY, logprobs=VOCABULARY)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    rows = [[*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]] for answer in answers]
    return [torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in each]) for each in rows]


def continued(llm: LLM) -> tuple[list[Any], list[Any]]:
    """Tokens that follow every prompt, and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [output.token_ids for output in outputs], [output.logprobs for output in outputs]


def examine(folder: Path) -> Outcome:
    """Compare the model in ``folder`` with transformers and with itself."""
    expected = of_transformers(folder)
    try:
        llm = load(folder)
    except AiakqError as problem:
        return Outcome("refused", reason=problem.message)
    model = llm.engine.executor.runner.model
    found = [log_probabilities(llm), log_probabilities(load(folder, max_num_batched_tokens=16, max_num_seqs=8))]
    alone = continued(llm)
    crowded = load(folder, enable_prefix_caching=True, num_gpu_blocks_override=40, block_size=4)
    again = [continued(crowded) for _ in range(2)]
    assert crowded.engine.stats.preemptions and crowded.engine.stats.prefix_hits
    return Outcome(
        "native" if isinstance(model, Decoder) else "transformers",
        difference=max(float((a - b).abs().max()) for mode in found for a, b in zip(mode, expected, strict=True)),
        same=all(tokens == alone[0] for tokens, _ in again),
        same_bits=all(logprobs == alone[1] for _, logprobs in again),
        page_bytes=16 * model.kv_bytes_per_token(torch.float16) + model.state_bytes(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES if os.environ.get("AIAKQ_EVERY_ARCHITECTURE") else SHARE)
def test_it_is_exact_or_refused_in_one_sentence(name: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    save(name, tmp_path, byte_tokenizer)
    outcome = examine(tmp_path)
    assert outcome.exact or outcome.runs == "refused", outcome
    assert "\n" not in outcome.reason and len(outcome.reason) < 400
    if json.loads((tmp_path / "config.json").read_text())["architectures"][0] in ARCHITECTURES:
        assert outcome.runs != "transformers"
