"""The model of the benchmark: a Llama of 1.04 B random parameters on disk, the same quantized, and the same as GGUF.

Speed does not depend on the values of the weights, so they are random and rounded to nearest. One shard per layer is
written at a time, so that the model is never in memory as a whole.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.formats import load, quantization_config, safetensors_file
from aiakq.kernels.types import QWeight
from aiakq.rounding.integers import round_weight
from aiakq.spec import QuantSpec

HIDDEN, LAYERS, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 16, 8192, 32, 8, 64, 32000
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
#: [N, K] of the linears of a layer.
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
SPECS = {
    "w4": QuantSpec("gptq", "gptq", 4, 128),
    "w4-awq": QuantSpec("awq", "awq", 4, 128, symmetric=False),
    "w8": QuantSpec("weight_only_int8", "compressed-tensors", 8),
    "w8a8": QuantSpec("smooth_quant", "compressed-tensors", 8, activation_bits=8),
}
FLOATS = ("bfloat16", "float32")


def parameters() -> int:
    """Weights of the linears and the embedding; a few thousand of the norms are left out."""
    return LAYERS * sum(n * k for n, k in LINEARS.values()) + VOCAB * HIDDEN


def folder(kind: str, root: Path) -> Path:
    """The model folder of ``kind``, a key of SPECS or ``source``, under ``root``; created if it does not exist."""
    made = root / kind
    if not (made / "config.json").is_file():
        print(f"making the model {kind}", file=sys.stderr)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        spec = SPECS.get(kind)
        if spec is None:
            _write(made, _random_shards())
        else:
            _write(made, _rounded_shards(folder("source", root), spec))
        config = dict(CONFIG) if spec is None else CONFIG | {"quantization_config": quantization_config.write(spec)}
        (made / "config.json").write_text(json.dumps(config, indent=1))
    return made


def _write(made: Path, shards: Iterable[dict[str, Tensor]]) -> None:
    """Write shards, index and tokenizer, and last the config, which marks the folder as complete."""
    where: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(shards):
        name = f"model-{number:05d}.safetensors"
        size += safetensors_file.write_file(made / name, tensors)[0]
        where.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_tokenizer(made)


def _random_shards() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def random(n: int, k: int) -> Tensor:
        return (torch.randn((n, k), generator=generator) * k**-0.5).bfloat16()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": ones.clone()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{name}.weight": random(*shape) for name, shape in LINEARS.items()}
        yield tensors | {f"{prefix}{name}_layernorm.weight": ones.clone() for name in ("input", "post_attention")}


def _rounded_shards(source: Path, spec: QuantSpec) -> Iterator[dict[str, Tensor]]:
    """The shards of ``source`` with every linear rounded to the nearest code."""
    from safetensors.torch import load_file

    layout = load(spec.format)
    storage = torch.bfloat16 if spec.format == "compressed-tensors" else torch.float16
    for file in sorted(source.glob("*.safetensors")):
        written: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            linear = name.removesuffix(".weight")
            if not linear.endswith("_proj"):
                written[name] = tensor
                continue
            codes, scales, zeros = round_weight(tensor.float(), spec.bits, spec.group_size, spec.symmetric, storage)
            kept = None if spec.symmetric else zeros.to(torch.uint8)
            size = spec.group_size if spec.group_size > 0 else tensor.shape[1]
            weight = QWeight(spec.scheme, codes, scales, kept, group_size=size)
            tensors = layout.write(weight, spec, torch.bfloat16)
            written |= {f"{linear}.{suffix}": value for suffix, value in tensors.items()}
        yield written


def _write_tokenizer(made: Path) -> None:
    """A word for every id, because engines want a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w0")
    wrapped.save_pretrained(made)


# --- bytes per token --------------------------------------------------------------------------------------------------


def bytes_per_token(kind: str, context: float, number_bytes: int) -> int:
    """Return the bytes that one token of one sequence reads: every weight with scales and head once, and its KV cache.

    kind          a key of SPECS, or a dtype of FLOATS.
    context       tokens in the cache, on average over the tokens generated.
    number_bytes  of a number in the cache.
    """
    linears = LAYERS * sum(n * k for n, k in LINEARS.values())
    rows = LAYERS * sum(n for n, k in LINEARS.values())
    head = VOCAB * HIDDEN * 2
    if kind == "float32":
        weights, head = linears * 4, head * 2
    elif kind == "bfloat16":
        weights = linears * 2
    elif kind.startswith("w4"):
        weights = linears // 2 + linears // 128 * 2 + (0 if kind == "w4" else linears // 256)
    else:
        weights = linears + rows * (4 if kind == "w8a8" else 2)
    return weights + head + kv_bytes(context, number_bytes)


def kv_bytes(context: float, number_bytes: int) -> int:
    """The keys and values of ``context`` tokens."""
    return int(context * 2 * LAYERS * KV_HEADS * HEAD_DIM * number_bytes)


# --- GGUF -------------------------------------------------------------------------------------------------------------

#: Names of llama.cpp for those of Hugging Face, within a layer.
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(source: Path, file: Path, package: Path) -> None:
    """The model of the folder ``source`` as F16 in one GGUF file, with llama.cpp's own Python package at ``package``.

    Rows of the query and key projections keep the order of Hugging Face: with random weights the order is irrelevant.
    """
    sys.path.insert(0, str(package))
    import gguf
    from safetensors.torch import load_file

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            values = tensor.float() if tensor.dim() == 1 else tensor.half()
            writer.add_tensor(gguf_name(name), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
