"""Names of stored tensors, and quantization in Mistral's format."""

from __future__ import annotations

import pytest
import torch
from mistral_files import write_mistral
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.hub import resolve_model
from aiakq.formats.mistral.tensors import hf_name


@pytest.mark.parametrize(
    "stored, name",
    [
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("output.qscale_weight", "lm_head.weight_scale"),
        ("layers.12.attention.wq.qscale_act", "model.layers.12.self_attn.q_proj.input_scale"),
        ("layers.0.attention.wk.weight_packed", "model.layers.0.self_attn.k_proj.weight_packed"),
        ("layers.0.feed_forward.experts.7.w2.weight", "model.layers.0.block_sparse_moe.experts.7.w2.weight"),
        ("layers.1.attention.k_fake_quantizer.qscale_act", "model.layers.1.self_attn.k_scale"),
        ("layers.1.attention.wq.bias", None),
        ("vision_encoder.ln_pre.weight", None),
        ("layers.1.feed_forward.experts.x.w2.weight", None),
    ],
)
def test_names(stored, name):
    assert hf_name(stored) == name


def test_eight_bit_floats_keep_their_bytes_and_scales(tmp_path):
    folder = write_mistral(tmp_path / "model", fp8=True)
    stored = load_file(folder / "consolidated.safetensors")
    checkpoint = Checkpoint.fetch(str(folder))
    assert checkpoint.spec is not None and checkpoint.spec.static_input and len(checkpoint.quantized_linears()) == 14
    key = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight")
    # The first half of a head has its even rows.
    rows = [*range(0, 32, 2), *range(1, 32, 2), *range(32, 64, 2), *range(33, 64, 2)]
    expected = stored["layers.0.attention.wk.weight"].view(torch.uint8)[rows]
    assert key.dtype == torch.float8_e4m3fn and torch.equal(key.view(torch.uint8), expected)
    scale = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight_scale")
    assert torch.equal(scale, stored["layers.0.attention.wk.qscale_weight"])


def test_unknown_tensors_and_quantizations_are_refused_by_name(tmp_path):
    folder = write_mistral(tmp_path / "model")
    tensors = load_file(folder / "consolidated.safetensors")
    save_file({**tensors, "layers.0.attention.sinks": torch.zeros(4)}, folder / "consolidated.safetensors")
    with pytest.raises(AiakqError, match=r"layers\.0\.attention\.sinks"):
        resolve_model(folder)
    write_mistral(folder, quantization={"qformat_weight": "nvfp4"})
    with pytest.raises(AiakqError, match="nvfp4"):
        resolve_model(folder)
