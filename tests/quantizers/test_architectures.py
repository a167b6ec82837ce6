"""Every method on many architectures: what is written is served, and computes what transformers makes of it; or the
model is refused by name before any work.

A share runs always; all of it with ``AIAKQ_EVERY_ARCHITECTURE=1 pytest tests/quantizers/test_architectures.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.hf.mimo import register_mimo

SIZES = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 16}
GPT2 = {"intermediate_size": 256, "num_key_value_heads": 4, "n_head": 4, "n_layer": 2, "n_embd": 64, "n_positions": 256}
XGLM = {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 96}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
INDEXED = {**LATENT, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
HUNYUAN = {**HEADS, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 32, "num_shared_expert": 1}
ERNIE = {
    **HEADS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 32, "mamba_d_head": 4, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GEMMA4 = {**HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
INPUTS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 259}

#: Model type -> its config; what is written is served.
SERVED: dict[str, dict[str, Any]] = {
    "llama": {}, "phi3": {}, "glm4": HEADS, "glm": HEADS, "gemma": HEADS, "gemma3_text": {**HEADS, "sliding_window": 8},
    "mimo": {}, "olmo": {}, "olmo2": {}, "olmo3": {"sliding_window": 8}, "starcoder2": {}, "cohere": {}, "cohere2": {},
    "granite": {}, "phi": {}, "smollm3": {}, "exaone4": HEADS, "nemotron": {}, "persimmon": {}, "gpt_bigcode": {},
    "gpt_neox": {}, "helium": HEADS, "arcee": {}, "seed_oss": HEADS, "apertus": {}, "ernie4_5": HEADS,
    "hunyuan_v1_dense": HEADS, "opt": {"ffn_dim": 96}, "xglm": XGLM, "gpt2": GPT2,
    "gemma2": HEADS, "falcon": {"intermediate_size": 256},
    "bloom": {"n_head": 4, "n_layer": 2, "intermediate_size": 256, "num_key_value_heads": 4},
    "deepseek_v2": {**EXPERTS, **LATENT}, "deepseek_v3": {**EXPERTS, **LATENT},
    "deepseek_v32": {**EXPERTS, **INDEXED}, "glm_moe_dsa": {**EXPERTS, **INDEXED},
    "axk2": {**{name: each for name, each in EXPERTS.items() if "group" not in name}, **INDEXED, "gated_norm_rank": 8},
    "mixtral": LOCAL, "qwen3_moe": {**EXPERTS, **HEADS}, "olmoe": EXPERTS, "flex_olmo": EXPERTS,
    "llama4_text": {
        **HEADS, **LOCAL, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "attention_chunk_size": 24,
    },
    "glm4_moe": {**EXPERTS, **HEADS}, "dots1": {**EXPERTS, **HEADS}, "hunyuan_v1_moe": HUNYUAN,
    "minimax_m2": {**HEADS, **LOCAL, "rotary_dim": 8}, "granitemoe": LOCAL,
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 32}, "phimoe": LOCAL, "ernie4_5_moe": ERNIE,
    "bamba": {**MAMBA, "attn_layer_indices": [1]}, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {**HEADS, "layer_types": ["conv", "full_attention"], "sliding_window": 8},
    "falcon_h1": {**MAMBA, **HEADS, "mamba_d_ssm": 128},
    "nemotron_h": {
        **HEADS, **EXPERTS, "mamba_num_heads": 32, "mamba_head_dim": 4, "ssm_state_size": 16, "chunk_size": 16,
        "n_groups": 1, "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "num_hidden_layers": 4, "moe_shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": {
        **MAMBA, **LOCAL, "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 32,
    },
    "qwen3_next": {**EXPERTS, **HEADS, **DELTA_RULE, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**HEADS, **DELTA_RULE}, "qwen3_5_moe_text": {
        **EXPERTS, **HEADS, **DELTA_RULE, "shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": DELTA_RULE, "gemma4_unified_text": {**GEMMA4, "per_layer_config": {"01": {"head_dim": 32}}},
    "longcat_flash": {
        **EXPERTS, **LATENT, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 1, "moe_topk": 2,
        "num_layers": 2,
    },
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "recurrent_gemma": {"lru_width": 64, **HEADS, "num_hidden_layers": 3, "intermediate_size": 192},
    "mamba": {"state_size": 4, "time_step_rank": 24}, "falcon_mamba": {"state_size": 4, "time_step_rank": 24},
    "jamba": {**EXPERTS, "mamba_d_state": 4, "mamba_dt_rank": 24, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 32, "head_dim": 4, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "ministral": {**HEADS, "sliding_window": 8}, "ministral3": HEADS, "glm4_moe_lite": {**EXPERTS, **LATENT},
    "solar_open": {**EXPERTS, **HEADS, "first_k_dense_replace": 0}, "stablelm": {},
    "codegen": {**GPT2, "rotary_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 8},
    "kimi_linear": {
        **EXPERTS, **LATENT, "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 8,
        "linear_head_dim": 32,
    },
    "gemma4_text": {
        **GEMMA4, **FOUR, **INPUTS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": True,
        "per_layer_config": dict.fromkeys((1, 3), {"head_dim": 64, "num_key_value_heads": 1}),
    },
    "gemma4_text, experts": {
        **GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0, "per_layer_config": {1: {"head_dim": 32}},
    },
    "gemma3n_text": {
        **GEMMA4, **FOUR, **INPUTS, "laurel_rank": 32, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.8, 0.0] * 2, "altup_num_inputs": 3,
    },
    "minimax": {**HEADS, **LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
}  # fmt: skip
#: What is written is for other programs, and the report says so.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "diffllama": {},
}  # fmt: skip
#: Nothing would run what would be written.
REFUSED: dict[str, dict[str, Any]] = {
    "jetmoe": {**LOCAL, "kv_channels": 16},
    "hy_v4": {**EXPERTS, **INDEXED, "indexer_types": ["full", "full"]},
    "zamba": {"mamba_d_state": 4, "mamba_dt_rank": 8, "num_key_value_heads": 4, "num_hidden_layers": 3},
    "zamba2": {
        "layers_block_type": ["hybrid", "hybrid"], "num_key_value_heads": 4, "n_mamba_heads": 8, "adapter_rank": 16,
    },
}  # fmt: skip
#: Part of the reason.
REASONS = {"jetmoe": "experts that share one tensor", "zamba2": "some share their weights"}
METHODS = ("weight_only_int8", "smooth_quant", "awq", "gptq")
#: Run always: each method, separate and fused experts, renamed tensors, weights [K, N], ALiBi, latent attention.
SHARE = {
    ("olmoe", "awq"), ("phimoe", "awq"), ("granitemoe", "gptq"), ("llama4_text", "gptq"), ("glm4_moe", "smooth_quant"),
    ("gpt2", "gptq"), ("bloom", "awq"), ("deepseek_v3", "gptq"), ("falcon_h1", "weight_only_int8"),
    ("olmo_hybrid", "weight_only_int8"),
    ("diffllama", "weight_only_int8"),
    ("mamba", "weight_only_int8"), ("mamba2", "awq"), ("recurrent_gemma", "weight_only_int8"),
    ("jetmoe", "weight_only_int8"),
    ("gemma4_text", "gptq"), ("gemma4_text", "awq"), ("gemma3n_text", "gptq"), ("gemma3n_text", "awq"),
}  # fmt: skip


def cases(table: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    every = bool(os.environ.get("AIAKQ_EVERY_ARCHITECTURE"))
    return [(kind, method) for kind in table for method in METHODS if every or (kind, method) in SHARE]


@pytest.fixture(scope="module")
def source(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``source(model_type, config)`` -> folder of a tiny random model, made once."""
    made: dict[str, Path] = {}

    def make(kind: str, config: dict[str, Any]) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            register_mimo()
            sizes = {**SIZES, **config}
            hf_config = CONFIG_MAPPING[kind.partition(",")[0]](**sizes)
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() > 1 and "conv" not in name:
                        parameter.normal_(0, 0.08)
                    elif name.endswith("correct_output_scale"):  # Gemma 3n's are zero
                        parameter.normal_(0, 0.5)
            model.save_pretrained(made[kind])
            byte_tokenizer.save_pretrained(made[kind])
        return made[kind]

    return make


def in_transformers(output: Path, folder: Path, dense: Callable[..., Tensor]) -> Any:
    """What transformers loads if every quantized linear is replaced by the weights it stands for."""
    from transformers import AutoConfig

    checkpoint = Checkpoint.open(output)
    own: set[str] = set()
    tensors: dict[str, Tensor] = {}
    for name in checkpoint.quantized_linears():
        weight = checkpoint.read_linear(name)
        tensors[f"{name}.weight"] = dense(weight)
        if weight.bias is not None:
            tensors[f"{name}.bias"] = weight.bias.float()
        own.update(checkpoint.linear_tensors(name).values())
    tensors |= {name: checkpoint.tensor(name).float() for name in checkpoint.inventory if name not in own}
    config = AutoConfig.from_pretrained(output)
    del config.quantization_config
    if config.model_type.startswith("granitemoe"):
        fuse(tensors, config.num_hidden_layers, config.num_local_experts)
    if config.model_type == "gemma4_text" and config.enable_moe_block:
        fuse(tensors, config.num_hidden_layers, config.num_experts, "", ("experts.gate_up_proj", "experts.down_proj"))
    if config.model_type == "llama4_text":
        names = ("experts.gate_up_proj", "experts.down_proj")
        fuse(tensors, config.num_hidden_layers, config.num_local_experts, ".feed_forward", names)
        for name in [name for name in tensors if name.endswith(names)]:
            tensors[name] = tensors[name].mT  # [E, K, N]
    if config.model_type == "gpt2":
        for name in checkpoint.quantized_linears():
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].T
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config.save_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"] and not info["mismatched_keys"]
    return model.eval()


def fuse(
    tensors: dict[str, Tensor], layers: int, experts: int, module: str = ".block_sparse_moe",
    names: tuple[str, str] = ("input_linear.weight", "output_linear.weight"),
) -> None:  # fmt: skip
    """Granite's and Gemma 4's checkpoints hold experts as one tensor."""
    for at in [f"model.layers.{layer}{module}" for layer in range(layers)]:
        if f"{at}.experts.0.down_proj.weight" not in tensors:
            continue

        def all_of(name: str, at: str = at) -> Tensor:
            return torch.stack([tensors.pop(f"{at}.experts.{number}.{name}.weight") for number in range(experts)])

        tensors[f"{at}.{names[0]}"] = torch.cat([all_of("gate_proj"), all_of("up_proj")], 1)
        tensors[f"{at}.{names[1]}"] = all_of("down_proj")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), cases(SERVED))
def test_what_is_written_is_served(
    kind: str, method: str, source: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any],
    dense_weight: Callable[..., Tensor], ids: Tensor,
) -> None:  # fmt: skip
    folder = source(kind, SERVED[kind])
    report = quantize(folder, tmp_path / "out", method)
    assert not any("cannot serve" in line for line in report.warnings)
    assert not any("router" in layer.name or ".gate." in layer.name for layer in report.layers)
    found = load_for_scoring(tmp_path / "out", "float32", "cpu").logits(ids).log_softmax(-1)
    if method == "smooth_quant":  # activations are rounded too, which transformers would not do
        exact = load_for_scoring(folder, "float32", "cpu").logits(ids).log_softmax(-1)
        assert float((exact.exp() * (exact - found)).sum(-1).median()) < 0.05
        return
    model = in_transformers(tmp_path / "out", tmp_path / "dense", dense_weight)
    with torch.inference_mode():
        expected = torch.cat([model(each[None]).logits for each in ids]).log_softmax(-1)
    # A router that changes its mind over the last bit changes one row.
    assert float((found - expected).abs().amax(-1).median()) < 0.01
    if report.experts:
        assert all(sum(mixture.tokens) > 0 for mixture in report.experts)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), cases(ELSEWHERE))
def test_models_that_cannot_be_served_are_named_before_any_work(
    kind: str, method: str, source: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any], ids: Tensor
) -> None:
    report = quantize(source(kind, ELSEWHERE[kind]), tmp_path / "out", method, group_size=-1)
    assert [line for line in report.warnings if line.startswith("aiakq cannot serve this model: ")]
    with pytest.raises(AiakqError) as caught:
        load_for_scoring(tmp_path / "out", "float32", "cpu")
    assert caught.value.id == "model_unsupported"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), cases(REFUSED))
def test_what_nothing_would_run_is_refused_by_name(
    kind: str, method: str, source: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    with pytest.raises(AiakqError) as caught:
        quantize(source(kind, REFUSED[kind]), tmp_path / "out", method)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    assert REASONS.get(kind, "") in str(caught.value)
