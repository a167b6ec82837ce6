"""Make models with outlier channels, and evaluation text for them, for the tables in docs/quality.md.

Text sampled from a random model has, for that model, a perplexity far below the size of the vocabulary, and errors of a
quantized copy raise it. Outliers are added without changing the function: a few channels of a norm, of the value
projection or of the up projection are multiplied by 32 or 64, and the columns that consume them divided by the same
power of two, which is exact in bf16.

    python examples/outliers.py random FOLDER     57 M parameters, random weights, and text sampled from it
    python examples/outliers.py books FOLDER      the example model with added outliers
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

EXAMPLE = Path(__file__).resolve().parent / "tinybooks"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
#: Sequences of text sampled for calibration and for evaluation, and tokens in each.
CALIBRATION, HELDOUT, LENGTH = 16, 16, 512
#: Files in the model folder: JSON lists of lists of token ids.
CALIBRATION_FILE, HELDOUT_FILE = "calibration.json", "heldout.json"
#: The standard deviation of the logits: entropy falls by about half its square below that of the vocabulary.
SHARPNESS = 2.9
#: Standard deviation of each projection's outputs, given inputs of size 1: queries sharpen attention, the last two set
#: how much a block adds to the residual stream.
GAINS = {
    "q_proj": 2.0,
    "k_proj": 1.0,
    "v_proj": 1.0,
    "o_proj": 0.45,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 0.35,
}
#: How many channels become outliers: of the residual stream (the same in every layer), of a value, of an MLP.
NORM_CHANNELS, VALUE_CHANNELS, MLP_CHANNELS = 2, 1, 2


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    {"random": make_random, "books": make_books}[kind](folder)


def make_random(folder: Path, seed: int = 0) -> None:
    """Write the random model with outliers, its tokenizer, and text sampled from it, into ``folder``."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    init_weights(model, torch.Generator().manual_seed(seed))
    add_outliers(model, torch.Generator().manual_seed(seed + 1))
    save(model, folder)
    # Sampled in float32, with the weights as they were saved.
    model.float()
    ids = sample(model, CALIBRATION + HELDOUT, LENGTH, torch.Generator().manual_seed(seed + 2)).tolist()
    (folder / CALIBRATION_FILE).write_text(json.dumps(ids[:CALIBRATION]))
    (folder / HELDOUT_FILE).write_text(json.dumps(ids[CALIBRATION:]))


def make_books(folder: Path, seed: int = 0) -> None:
    """Write the example model with added outliers, which do not change its function, into ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.bfloat16).eval()
    add_outliers(model, torch.Generator().manual_seed(seed + 1))
    save(model, folder)


def save(model: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(EXAMPLE / name, folder / name)


@torch.no_grad()
def init_weights(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Random weights for which every block affects the predictions, which are neither uniform nor one-hot."""
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            gain = GAINS.get(kind, SHARPNESS) / math.sqrt(module.in_features)
        elif isinstance(module, nn.Embedding):
            gain = 1.0
        else:
            continue
        module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * gain)


@torch.no_grad()
def add_outliers(model: nn.Module, generator: torch.Generator) -> None:
    """Add outlier channels to every block. Modifies the weights of ``model``, not its function."""
    config = model.config
    queries_per_value = config.num_attention_heads // config.num_key_value_heads

    def channels(of: int, count: int) -> Tensor:
        return torch.randperm(of, generator=generator)[:count]

    def gains(count: int) -> Tensor:
        return 2.0 ** torch.randint(5, 7, (count,), generator=generator)

    stream = channels(config.hidden_size, NORM_CHANNELS)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, consumers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            scale = gains(len(stream))
            norm.weight[stream] *= scale.to(norm.weight.dtype)
            divide(consumers, stream, scale)
        value = channels(attention.v_proj.out_features, VALUE_CHANNELS)
        scale = gains(len(value))
        attention.v_proj.weight[value] *= scale.unsqueeze(1).to(attention.v_proj.weight.dtype)
        # Channel c of value head h is consumed by every query head that shares h.
        head, inside = value // attention.head_dim, value % attention.head_dim
        for query in range(queries_per_value):
            divide((attention.o_proj,), (head * queries_per_value + query) * attention.head_dim + inside, scale)
        hidden = channels(config.intermediate_size, MLP_CHANNELS)
        scale = gains(len(hidden))
        mlp.up_proj.weight[hidden] *= scale.unsqueeze(1).to(mlp.up_proj.weight.dtype)
        divide((mlp.down_proj,), hidden, scale)


def divide(linears: Iterable[nn.Linear], columns: Tensor, scale: Tensor) -> None:
    """Divide some input columns of linears; exact, because the scales are powers of two."""
    for linear in linears:
        linear.weight[:, columns] /= scale.to(linear.weight.dtype)


@torch.no_grad()
def sample(model: LlamaForCausalLM, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Token ids [count, length] int64 sampled from the model, the first token of each at random."""
    ids = torch.randint(4, model.config.vocab_size, (count, 1), generator=generator)
    cache, step = DynamicCache(config=model.config), ids
    while ids.shape[1] < length:
        logits = model(step, past_key_values=cache, use_cache=True).logits[:, -1]
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from their softmax.
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        step = (logits + noise).argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], dim=1)
    return ids


if __name__ == "__main__":
    main()
