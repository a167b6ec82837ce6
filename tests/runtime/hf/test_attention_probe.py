"""Models that transformers runs with more than paged attention does are refused by name, and never answer wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from aiakq import LLM
from aiakq.errors import AiakqError
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.hf import attention_probe, transformers_fallback
from aiakq.runtime.hf.attention_probe import is_mask_of

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
}  # fmt: skip
#: Model type -> its config and what the refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "layers of the type conv"),
    "diffllama": ({}, "calls attention twice"),
    "doge": ({}, "its own attention mask"),
    "falcon": ({}, "transformers offers no way to replace its attention"),
}


def checkpoint(folder: Path, model_type: str, **more: Any) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SMALL, **more}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return str(folder)


def load(folder: str, dtype: str = "float32") -> LLM:
    return LLM(folder, skip_tokenizer_init=True, dtype=dtype, num_gpu_blocks_override=40, model_impl="transformers")


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_paged_attention_does_not_do_is_refused_by_name(model_type, tmp_path):
    config, reason = REFUSED[model_type]
    with pytest.raises(AiakqError, match=reason) as caught:
        load(checkpoint(tmp_path, model_type, **config))
    assert "is not supported" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("gemma3_text", {"head_dim": 16, "sliding_window": 8}),
        ("olmo2", {}),
        ("starcoder2", {"sliding_window": 8}),
        ("gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 8}),
        ("gpt_oss", {"head_dim": 16, "sliding_window": 8, **EXPERTS}),
        ("llama4_text", {"head_dim": 16, "attention_chunk_size": 8, "intermediate_size_mlp": 96, **EXPERTS}),
        ("deepseek_v3", LATENT),
        ("deepseek_v2", LATENT | {"topk_method": "greedy", "scoring_func": "softmax"}),
    ],
)
def test_what_paged_attention_does_is_served(model_type, more, tmp_path):
    """The comparison at load time says that the results are those of transformers."""
    assert load(checkpoint(tmp_path, model_type, **more)).engine.facts["attention"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_16_bits_is_no_other_attention(dtype, tmp_path, monkeypatch):
    """Deep models round so much that single log-probabilities are off by more than a nat in bfloat16."""
    seen = []
    compare = attention_probe.compare
    monkeypatch.setattr(attention_probe, "compare", lambda *args: seen.append(compare(*args)) or seen[-1])
    deep = checkpoint(tmp_path, "granite", num_hidden_layers=16)
    assert load(deep, dtype).engine.facts["attention"]
    assert seen[0].measured < seen[0].allowed / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_arithmetic_is_refused_in_16_bits_too(dtype, tmp_path, monkeypatch):
    """Of a model whose config does not tell: convolutions that reach over the borders of sequences."""
    monkeypatch.setattr(transformers_fallback, "_config_refusal", lambda config: None)
    with pytest.raises(AiakqError, match="differ from transformers"):
        load(checkpoint(tmp_path, "lfm2", layer_types=["conv", "full_attention"] * 2), dtype)


def test_the_cache_has_the_shape_that_the_model_uses(tmp_path):
    """Multi-query models have one key-value head, whatever their config says or leaves out."""
    llm = load(checkpoint(tmp_path, "gpt_bigcode"))
    runner = llm.engine.executor.runner
    assert [tuple(keys.shape[2:]) for keys, _ in runner.caches] == 4 * [(1, 16)]
    assert runner.model.kv_bytes_per_token(torch.float16) == 4 * 2 * 16 * 2


def test_masks_are_tried_beyond_every_window_and_chunk():
    def causal(batch, head, q, k):
        return k <= q

    def window(batch, head, q, k):
        return (k <= q) & (k > q - 5000)

    def chunked(batch, head, q, k):
        return (k <= q) & (k // 8192 == q // 8192)

    def prefix(batch, head, q, k):
        return (k <= q) | (k < 3)

    def spec(window=None, chunk=None):
        return AttentionSpec(1, 1, 16, 1.0, window, chunk_size=chunk)

    assert is_mask_of(causal, [spec()], 0) and is_mask_of(causal, [spec(5000)], 0)
    assert is_mask_of(window, [spec(), spec(5000)], 0)
    assert not is_mask_of(window, [spec(), spec(5001)], 0) and not is_mask_of(window, [spec()], 6000)
    assert not is_mask_of(chunked, [spec()], 8192) and is_mask_of(chunked, [spec(), spec(chunk=8192)], 8192)
    assert not is_mask_of(prefix, [spec()], 0)
