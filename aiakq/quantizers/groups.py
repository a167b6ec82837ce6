"""Which linears of a block share an input, and which norm or linear feeds them.

The first is found by watching one forward pass, so it holds for any architecture. The second decides into what a scale
can be folded without changing the function; it is a table, because no trace can prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error


def block_linears(block: nn.Module) -> dict[str, nn.Linear]:
    """Every linear of a block, by its name inside the block."""
    return {name: module for name, module in block.named_modules() if type(module) is nn.Linear}


@contextmanager
def watching(hooks: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Call ``hooks[module](module, args)`` before each module's forward, while the context is open."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace_groups(block: nn.Module, run: Callable[[], Any]) -> list[tuple[str, ...]]:
    """The linears of ``block`` in groups that receive the same tensor, in the order in which they run.

    ``run`` runs the block once. A linear that does not run is in no group.
    """
    seen: dict[tuple[Any, ...], list[str]] = {}
    kept: list[Tensor] = []  # while a tensor lives its address is its own

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            kept.append(x)
            names = seen.setdefault((x.data_ptr(), tuple(x.shape), x.stride()), [])
            if name not in names:
                names.append(name)

        return note

    linears = block_linears(block)
    with watching({module: hook(name) for name, module in linears.items()}), torch.inference_mode():
        run()
    return [tuple(names) for names in seen.values()]


@dataclass(frozen=True)
class Pair:
    """A scale per channel can be divided out of ``source`` and multiplied into ``targets``.

    source   a norm (its weight and bias are divided) or a linear (its outputs are), by name inside the block.
    targets  the linears that read nothing but what the source gives, channel by channel.
    parent   the module whose output shows what rounding the targets costs.
    heads    source channels are key-value heads that several query heads share: the scales of the queries that read
             one value channel are tied.
    """

    source: str
    targets: tuple[str, ...]
    parent: str
    heads: bool = False


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _gated(config: Any) -> tuple[Pair, ...]:
    """Norm, attention, norm, gated MLP: the activation multiplies ``up_proj``, so its outputs scale freely."""
    return (
        Pair("input_layernorm", _ATTENTION, "self_attn"),
        Pair("self_attn.v_proj", ("self_attn.o_proj",), "self_attn.o_proj", heads=True),
        Pair("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp"),
        Pair("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj"),
    )


def _opt(config: Any) -> tuple[Pair, ...]:
    """OPT. ReLU lets positive scales through; norms after the sublayers (350m) feed the residual too and stay out."""
    pairs = [Pair("self_attn.v_proj", ("self_attn.out_proj",), "self_attn.out_proj", heads=True)]
    if config.do_layer_norm_before and config.layer_norm_elementwise_affine:
        pairs.insert(0, Pair("self_attn_layer_norm", _ATTENTION, "self_attn"))
        pairs.append(Pair("final_layer_norm", ("fc1",), "fc1"))
    if config.activation_function == "relu":
        pairs.append(Pair("fc1", ("fc2",), "fc2"))
    return tuple(pairs)


#: model_type -> its pairs. Only families where every pair is exact.
SMOOTHING: dict[str, Callable[[Any], tuple[Pair, ...]]] = {
    "llama": _gated,
    "mistral": _gated,
    "qwen2": _gated,
    "qwen3": _gated,
    "opt": _opt,
}


def smoothing_pairs(config: Any, method: str) -> tuple[Pair, ...]:
    """The pairs of a model's blocks, from its transformers config. Raises ``no_smoothing_map``."""
    family = SMOOTHING.get(config.model_type)
    if family is None:
        raise error("no_smoothing_map", method=method, architecture=config.model_type)
    return family(config)


@dataclass(frozen=True)
class Heads:
    """How query heads share value channels: q_heads * head_dim channels read kv_heads * head_dim of them."""

    q_heads: int
    kv_heads: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        heads = getattr(config, "num_attention_heads", None) or 1
        return cls(heads, getattr(config, "num_key_value_heads", None) or heads)

    def tie(self, per_channel: Tensor, how: str) -> Tensor:
        """Reduce a statistic of the queries' channels [Hq*D] to the value channels [Hkv*D] by ``mean`` or ``max``."""
        shared = per_channel.unflatten(0, (self.kv_heads, self.q_heads // self.kv_heads, -1))
        reduced = shared.amax(1) if how == "max" else shared.mean(1)
        return reduced.flatten()

    def spread(self, per_value: Tensor) -> Tensor:
        """The inverse: the value channels' numbers [Hkv*D] for every query channel [Hq*D]."""
        heads = per_value.unflatten(0, (self.kv_heads, -1))
        return heads.repeat_interleave(self.q_heads // self.kv_heads, dim=0).flatten()


def fold(
    block: nn.Module, pair: Pair, scales: Tensor, heads: Heads, storage: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Divide the source by ``scales`` and multiply the targets' input columns, keeping the function.

    scales [channels of the source] float32, positive. The weights of ``block`` (float32) are modified. A norm's weight
    is stored in ``storage``, so it is rounded to that first and the columns take up the difference. Returns the new
    norm tensors by name inside the block (none for a linear source, which is quantized with its bias afterwards), and
    what the targets' columns were multiplied by, [K].
    """
    source = block.get_submodule(pair.source)
    assert isinstance(source.weight, Tensor)
    bias = getattr(source, "bias", None)
    changed: dict[str, Tensor] = {}
    if isinstance(source, nn.Linear):
        effective = scales
        source.weight.data.div_(scales.unsqueeze(1))
        if bias is not None:
            bias.data.copy_((bias.data / scales).to(storage))
    else:
        old = source.weight.data
        new = (old / scales).to(storage).to(torch.float32)
        # A weight that is 0, or becomes 0 or infinite, keeps its channel as it was.
        usable = (new != 0) & torch.isfinite(new)
        new = torch.where(usable, new, old)
        effective = torch.where(usable, old / torch.where(usable, new, torch.ones_like(new)), torch.ones_like(old))
        source.weight.data.copy_(new)
        changed[f"{pair.source}.weight"] = source.weight.data
        if bias is not None:
            bias.data.copy_((bias.data / effective).to(storage))
            changed[f"{pair.source}.bias"] = bias.data
    columns = heads.spread(effective) if pair.heads else effective
    for target in pair.targets:
        block.get_submodule(target).weight.data.mul_(columns)  # type: ignore[operator]
    return changed, columns
