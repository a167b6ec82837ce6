"""The kind of every tensor of a file: as llama-quantize chooses them, and what rows allow."""

from __future__ import annotations

import pytest

from aiakq.convert.gguf.file_types import FILE_TYPES, commonest, file_type, fitting, kinds_for
from aiakq.errors import AiakqError

SHAPES = {
    "token_embd.weight": (320, 256),
    "output_norm.weight": (256,),
    **{
        f"blk.{layer}.{name}.weight": shape
        for layer in range(6)
        for name, shape in {
            **{"attn_q": (256, 256), "attn_v": (128, 256), "attn_output": (256, 256), "attn_norm": (256,)},
            **{"ffn_up": (768, 256), "ffn_down": (256, 768), "ffn_gate_inp": (8, 256)},
        }.items()
    },
}


def others(name: str, architecture: str = "llama", experts: int = 0, **shapes: tuple[int, ...]) -> dict[str, str]:
    """Return the kinds that are not those of most tensors, without vectors."""
    found = kinds_for(file_type(name), {**SHAPES, **shapes}, architecture, experts)
    assert all(found[each] == "F32" for each in found if "norm" in each or "gate_inp" in each)
    usual = FILE_TYPES[file_type(name).name].kind
    return {each.replace(".weight", ""): kind for each, kind in found.items() if kind not in (usual, "F32")}


def test_embeddings_values_and_down_projections_have_more_bits():
    # What llama-quantize wrote of a model with six layers and these shapes.
    assert others("q4_0") == {"token_embd": "Q6_K"}
    assert others("q8_0") == others("f16") == others("q6_k") == {}
    more = {"token_embd": "Q6_K"}
    assert others("Q4_K_M") == more | {
        f"blk.{layer}.{name}": "Q6_K" for layer in (2, 5) for name in ("attn_v", "ffn_down")
    }
    assert others("q5_k") == others("q4_k")
    assert others("q4_k_s") == more | {f"blk.{layer}.attn_v": "Q5_K" for layer in range(4)}


def test_a_model_of_eight_experts_and_an_output_layer():
    found = others("q4_k_m", experts=8, **{"output.weight": (320, 256)})
    assert found["output"] == "Q6_K" and "token_embd" not in found
    assert found["blk.0.attn_v"] == "Q8_0" and found["blk.0.attn_output"] == "Q5_K"
    assert others("q4_0", architecture="falcon") == {"token_embd": "Q8_0"}


@pytest.mark.parametrize(
    ("kind", "width", "fits"),
    [("Q4_K", 512, "Q4_K"), ("Q4_K", 96, "Q5_0"), ("Q5_K", 96, "Q5_1"), ("Q6_K", 96, "Q8_0"), ("Q8_0", 40, "F16")],
)
def test_narrow_rows_get_smaller_blocks(kind, width, fits):
    assert fitting(kind, width) == fits


def test_types_have_the_words_of_llama_quantize():
    assert file_type(" q4_K ").name == "Q4_K_M" and file_type("fp16").name == "F16"
    assert commonest(["Q4_0", "F32", "Q4_0"]).name == "Q4_0" and commonest(["MXFP4"]).name == "F32"
    with pytest.raises(AiakqError, match="q5_k_m"):
        file_type("q4_x")
