"""The kind of every tensor of a file: as llama-quantize chooses them, and what rows allow."""

from __future__ import annotations

import pytest

from aiakq.convert.gguf.file_types import FILE_TYPES, MixtureModel, commonest, file_type, fitting, kinds_for
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


def others(
    name: str, architecture: str = "llama", experts: int = 0, sharing: int = 2, **shapes: tuple[int, ...]
) -> dict[str, str]:
    """Return the kinds that are not those of most tensors, without vectors."""
    found = kinds_for(file_type(name), {**SHAPES, **shapes}, MixtureModel(architecture, experts, sharing))
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


def of_layers(**kinds: str) -> dict[str, str]:
    """Return the kinds of these modules in all six layers, and that of the embeddings."""
    return {"token_embd": "Q6_K"} | {
        f"blk.{layer}.{module}": kind for layer in range(6) for module, kind in kinds.items()
    }


def test_mixtures_of_2_and_3_bits_and_of_tables():
    # What llama-quantize wrote of a model with six layers, in which two heads share keys and values.
    assert others("q2_k") == of_layers(attn_v="Q3_K", attn_output="Q3_K", ffn_down="Q3_K")
    first = {f"blk.{layer}.attn_v": "Q5_K" for layer in range(2)}
    assert others("q3_k") == of_layers(attn_v="Q4_K", attn_output="Q4_K", ffn_down="Q4_K") | first
    assert others("q3_k_l") == of_layers(attn_v="Q5_K", attn_output="Q5_K", ffn_down="Q5_K")
    assert others("q3_k_s") == others("iq4_nl") == others("iq4_xs") == others("q2_k_s") == of_layers()
    # By the rules of its source: where four heads share them, values have more bits.
    assert others("q2_k", sharing=4)["blk.0.attn_v"] == others("q2_k_s", sharing=4)["blk.0.attn_v"] == "Q4_K"
    assert others("iq4_xs", sharing=4) == of_layers(attn_v="Q5_K")
    assert others("q2_k", experts=8)["blk.0.attn_output"] == others("iq4_nl", experts=8)["blk.0.attn_output"] == "Q5_K"
    assert others("q3_k_l", architecture="falcon")["blk.0.attn_output"] == "Q4_K"


def test_a_model_of_eight_experts_and_an_output_layer():
    found = others("q4_k_m", experts=8, **{"output.weight": (320, 256)})
    assert found["output"] == "Q6_K" and "token_embd" not in found
    assert found["blk.0.attn_v"] == "Q8_0" and found["blk.0.attn_output"] == "Q5_K"
    assert others("q4_0", architecture="falcon") == {"token_embd": "Q8_0"}


@pytest.mark.parametrize(
    ("kind", "width", "fits"),
    [
        ("Q4_K", 512, "Q4_K"),
        ("Q4_K", 96, "Q5_0"),
        ("Q5_K", 96, "Q5_1"),
        ("Q6_K", 96, "Q8_0"),
        ("Q2_K", 96, "Q4_0"),
        ("IQ4_XS", 96, "IQ4_NL"),
        ("Q8_0", 40, "F16"),
    ],
)
def test_narrow_rows_get_smaller_blocks(kind, width, fits):
    assert fitting(kind, width) == fits


def test_types_have_the_words_of_llama_quantize():
    assert file_type(" q4_K ").name == "Q4_K_M" and file_type("fp16").name == "F16"
    assert commonest(["Q4_0", "F32", "Q4_0"]).name == "Q4_0" and commonest(["MXFP4"]).name == "F32"
    numbers = {"q2_k": 10, "q3_k_s": 11, "q3_k": 12, "q3_k_l": 13, "q2_k_s": 21, "iq4_nl": 25, "iq4_xs": 30}
    assert {word: file_type(word).number for word in numbers} == numbers
    with pytest.raises(AiakqError, match="q5_k_m"):
        file_type("q4_x")
