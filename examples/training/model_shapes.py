"""Models to train from the example model: other architectures, planted outliers, or the same one for dialogues.

What a model can take over from the example model it does, because most of its knowledge of words is in the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import outliers
import torch
from torch import Tensor, nn
from training_loop import Schedule
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

#: Residual channels and gains of the massive activations, relative to the size of the stream.
MASSIVE_CHANNELS, MASSIVE = 2, 60.0
#: The block whose MLP makes them, as in large models one of the first.
MASSIVE_BLOCK = 1


@dataclass(frozen=True)
class Recipe:
    """One of the models.

    make       (example model, ids of the text [T], generator) -> the model before training, float32.
    dialogues  trained and scored on dialogues in the chat template instead of books.
    """

    about: str
    make: Callable[[LlamaForCausalLM, Tensor, torch.Generator], nn.Module]
    schedule: Schedule
    dialogues: bool = False


@torch.no_grad()
def qwen2(example: LlamaForCausalLM, ids: Tensor, generator: torch.Generator) -> nn.Module:
    """A Qwen2: biases of queries, keys and values, six query heads on one key-value head, output layer not tied."""
    config = Qwen2Config(
        **_shared(example),
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    _randomize(model, generator, config.num_hidden_layers)
    table = example.model.embed_tokens.weight
    width = table.shape[1]
    model.model.embed_tokens.weight[:, :width] = table
    model.lm_head.weight[:, :width] = table
    return model


@torch.no_grad()
def mixture(example: LlamaForCausalLM, ids: Tensor, generator: torch.Generator) -> nn.Module:
    """A Qwen3-MoE: the example model's attention, and eight experts of which two are active.

    Every expert is a random third of the example model's MLP; training makes them and the router differ.
    """
    old = example.config
    config = Qwen3MoeConfig(
        **_shared(example),
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        moe_intermediate_size=old.intermediate_size // 3,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.head_dim,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
    )
    model = Qwen3MoeForCausalLM(config)
    _randomize(model, generator, config.num_hidden_layers)
    model.model.embed_tokens.weight.copy_(example.model.embed_tokens.weight)
    model.model.norm.weight.copy_(example.model.norm.weight)
    for ours, theirs in zip(model.model.layers, example.model.layers, strict=True):
        ours.input_layernorm.weight.copy_(theirs.input_layernorm.weight)
        ours.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(ours.self_attn, name).weight.copy_(getattr(theirs.self_attn, name).weight)
        experts = ours.mlp.experts
        for expert in range(config.num_experts):
            chosen = torch.randperm(old.intermediate_size, generator=generator)[: config.moe_intermediate_size]
            gate, up = theirs.mlp.gate_proj.weight[chosen], theirs.mlp.up_proj.weight[chosen]
            experts.gate_up_proj[expert] = torch.cat([gate, up])
            experts.down_proj[expert] = 2 * theirs.mlp.down_proj.weight[:, chosen]
    _normalize_heads(model, example, ids)
    return model


@torch.no_grad()
def with_outliers(example: LlamaForCausalLM, ids: Tensor, generator: torch.Generator) -> nn.Module:
    """The example model with massive activations in the residual stream and outlier channels behind every norm."""
    _plant_massive(example, ids, generator)
    outliers.add_outliers(example, generator)
    # Training would remove the massive activations; the other weights learn to work with them.
    example.model.layers[MASSIVE_BLOCK].mlp.requires_grad_(False)
    return example


def chat(example: LlamaForCausalLM, ids: Tensor, generator: torch.Generator) -> nn.Module:
    """The example model, to be tuned on dialogues."""
    return example


RECIPES = {
    "qwen2": Recipe(
        "Qwen2: biases, 6 query heads on 1 key-value head, untied",
        qwen2,
        Schedule(steps=400, rate=2e-3, muon=5e-3, distillation=0.5),
    ),
    "outliers": Recipe(
        "Llama with massive activations and outlier channels",
        with_outliers,
        Schedule(steps=120, rate=3e-4, distillation=0.5),
    ),
    "moe": Recipe(
        "Qwen3-MoE: 8 experts, 2 active",
        mixture,
        Schedule(steps=250, rate=1e-3, distillation=0.5),
    ),
    "chat": Recipe(
        "Llama tuned on dialogues in a chat template",
        chat,
        Schedule(steps=120, rate=3e-4),
        dialogues=True,
    ),
}


def _shared(example: LlamaForCausalLM) -> dict[str, object]:
    """The entries of the config that come from the tokenizer and the text."""
    names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters")
    return {name: getattr(example.config, name) for name in names}


def _randomize(model: nn.Module, generator: torch.Generator, layers: int) -> None:
    """Random weights of the usual size; what is added to the residual stream is smaller the more blocks there are."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        gain = 1 / math.sqrt(parameter.shape[-1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            gain /= math.sqrt(2 * layers)
        if "embed" in name or "lm_head" in name:
            gain = 0.02
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)


def _normalize_heads(model: nn.Module, example: LlamaForCausalLM, ids: Tensor) -> None:
    """Set the norms of queries and keys to the mean size that the example model gives them."""
    sizes: dict[tuple[int, str], float] = {}

    def note(at: int, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            sizes[at, name] = float(output.unflatten(-1, (-1, example.config.head_dim)).pow(2).mean(-1).sqrt().mean())

        return hook

    hooks = [
        getattr(layer.self_attn, f"{name}_proj").register_forward_hook(note(at, name))
        for at, layer in enumerate(example.model.layers)
        for name in "qk"
    ]
    example(ids[:2048].view(8, 256))
    for hook in hooks:
        hook.remove()
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.q_norm.weight.fill_(sizes[at, "q"])
        layer.self_attn.k_norm.weight.fill_(sizes[at, "k"])


def _plant_massive(model: LlamaForCausalLM, ids: Tensor, generator: torch.Generator) -> None:
    """Let one neuron of an early MLP write huge values into two residual channels at the most frequent token.

    Large models do the same at the first token and at delimiters. The neuron is the one that adds least to the stream;
    its gate is the direction that separates the token from all others.
    """
    windows = ids[:4096].view(16, 256)
    frequent = int(windows.flatten().mode().values)
    block = model.model.layers[MASSIVE_BLOCK]
    seen: dict[str, Tensor] = {}
    hooks = [
        block.mlp.register_forward_pre_hook(lambda module, args: seen.update(input=args[0].flatten(0, 1))),
        block.mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.update(inner=args[0].flatten(0, 1))),
        block.register_forward_hook(lambda module, args, output: seen.update(stream=_first(output).flatten(0, 1))),
    ]
    model(windows)
    for hook in hooks:
        hook.remove()
    mask = windows.flatten() == frequent
    x, others = seen["input"][mask].mean(0), seen["input"][~mask]
    covariance = others.T @ others / len(others) + 0.1 * others.pow(2).mean() * torch.eye(others.shape[1])
    direction = torch.linalg.solve(covariance, x)
    # 6 at the token: there the gate is open, and elsewhere, where the projection is small, nearly closed.
    direction *= 6 / (direction @ x)
    adds = seen["inner"].pow(2).mean(0).sqrt() * block.mlp.down_proj.weight.norm(dim=0)
    neuron = int(adds.argmin())
    block.mlp.gate_proj.weight[neuron] = direction
    block.mlp.up_proj.weight[neuron] = direction
    channels = torch.randperm(model.config.hidden_size, generator=generator)[:MASSIVE_CHANNELS]
    signs = 1 - 2 * torch.randint(0, 2, (MASSIVE_CHANNELS,), generator=generator).float()
    size = MASSIVE * seen["stream"].pow(2).mean().sqrt() / 36
    block.mlp.down_proj.weight[:, neuron] = 0
    block.mlp.down_proj.weight[channels, neuron] = signs * size


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
