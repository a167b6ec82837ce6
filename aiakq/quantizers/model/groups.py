"""Groups of linears that share an input (q/k/v, gate/up), and folding of scales into them.

Groups are found by tracing one forward pass, so they work for any architecture; smooth_mappings.py finds the preceding
layers into which a scale can be folded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.experts import EXPERT, Experts

_RECURRENT_GATES = ("in_proj_a", "in_proj_b", "a_proj", "b_proj", "dt_proj")
#: Linears that servers join into one, which works only if they share one scheme, and the numbers of a whole linear.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def block_linears(block: nn.Module) -> dict[str, nn.Linear]:
    """Return every linear of a block that transforms activations, by its name inside the block.

    Routers and gates beside experts are left out: they determine where tokens go and with which weight, are small, and
    stay unquantized. So do gates with an output per head, of delta rules (Qwen3.5, OLMo-Hybrid) and attention (LFM3),
    of which files hold no tiles, the steps of Mamba, with whose weight transformers multiplies past the module, the
    index of sparse attention (DeepSeek-V3.2), which is small and chooses the positions that attention reads, the
    low-rank gates inside norms (A.X K2), and AltUp's coefficients (Gemma 3n).
    """
    beside = {child: name for module in block.modules() if _routes(module) for name, child in module.named_children()}
    of_heads = {gate for module in block.modules() if (gate := _head_gate(module)) is not None}
    gates = of_heads.union(beside, *(module.modules() for module, name in beside.items() if name in ("gate", "router")))
    linears = _linears(block).items()
    left_out = {"router", "indexer", "altup", "input_layernorm", "post_attention_layernorm", *_RECURRENT_GATES}
    return {name: module for name, module in linears if module not in gates and left_out.isdisjoint(name.split("."))}


def gates(block: nn.Module) -> list[str]:
    """Return the names of the linears of a block, of any class, that ``block_linears`` leaves out."""
    linears = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    return sorted(linears - set(block_linears(block)))


def _linears(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in block.named_modules() if type(module) is nn.Linear}


def _routes(module: nn.Module) -> bool:
    return any(isinstance(child, Experts) or name == "experts" for name, child in module.named_children())


def _head_gate(module: nn.Module) -> nn.Module | None:
    """Return ``g_proj`` of attention if it has an output per head; OLMo-Hybrid's has one per element of a head."""
    gate, output, size = (getattr(module, name, None) for name in ("g_proj", "o_proj", "head_dim"))
    if not isinstance(gate, nn.Linear) or not isinstance(output, nn.Linear) or not isinstance(size, int):
        return None
    return gate if size > 1 and gate.out_features * size == output.in_features else None


def structure(block: nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for blocks with the same modules and shapes, which can share one trace."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return type(block), shapes


@contextmanager
def forward_pre_hooks(hooks: Mapping[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Context manager: call ``hooks[module](module, args)`` before each module's forward."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensor_key(x: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors [.., K] with the same memory and shape, while both are alive."""
    return x.data_ptr(), x.numel(), x.shape[-1], x.stride()[-2:]


def trace_groups(block: nn.Module, run: Callable[[], object]) -> list[tuple[str, ...]]:
    """Group the linears of ``block`` that receive the same tensor, in execution order.

    ``run`` runs the block once. A linear that does not run is in no group. Experts read the same tensor while tracing
    but different tokens when serving, so the linears of different experts are never in one group.
    """
    seen: dict[tuple[object, ...], list[str]] = {}
    kept: list[Tensor] = []  # an address identifies a tensor only while the tensor is alive

    def hook(name: str) -> Callable[..., None]:
        expert = re.search(EXPERT, name)

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if expert is None:
                kept.append(x)
            names = seen.setdefault((tensor_key(x), expert and expert[0]), [])
            if name not in names:
                names.append(name)

        return note

    linears = block_linears(block)
    with forward_pre_hooks({module: hook(name) for name, module in linears.items()}), torch.inference_mode():
        run()
    return [tuple(names) for names in seen.values()]


@dataclass(frozen=True)
class SmoothMapping:
    """A smooth mapping: a scale per channel is divided out of the smooth layer and multiplied into the balance layers.

    smooth_layer    a norm (its weight and bias are divided) or a linear (its outputs are), by name inside the block.
    balance_layers  all readers of the smooth layer's output: linears, and last the weights of routers beside experts.
                    Their input columns are multiplied.
    parent          the module whose output shows the rounding error of the balance layers; "" is the block.
    heads           whether the channels are key-value heads shared by several query heads: the scales of queries that
                    read one value channel are tied.
    part            (parts, first, length) for fused projections: the rows of the smooth layer are ``parts`` equal
                    parts, and the channels are ``length`` rows of each, starting at ``first``; None: all rows.
    plus_one        whether the norm multiplies by one plus its weight.
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    parent: str
    heads: bool = False
    part: tuple[int, int, int] | None = None
    plus_one: bool = False

    @property
    def probe(self) -> str:
        """The balance layer whose inputs are measured: one that sees every token, such as the router of experts."""
        return next((name for name in self.balance_layers if not re.search(EXPERT, name)), self.balance_layers[0])

    def rows(self, n: int) -> Tensor:
        """Return the indices of the smooth layer's N rows (or channels) that are scaled, [channels] int64."""
        every = torch.arange(n)
        if self.part is None:
            return every
        parts, first, length = self.part
        return every.view(parts, -1)[:, first : first + length].flatten()


@dataclass(frozen=True)
class Heads:
    """The sharing of value channels between query heads: q_heads * head_dim channels read kv_heads * head_dim."""

    q_heads: int
    kv_heads: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Read the numbers of query heads and key-value heads from a transformers config. Where layers differ, no
        sharing is assumed.
        """
        heads = getattr(config, "num_attention_heads", None) or 1
        if (
            getattr(config, "is_heterogeneous", False)
            and len({x.num_key_value_heads for x in config.per_layer_config}) > 1
        ):
            return cls(heads, heads)
        shared = getattr(config, "num_key_value_heads", None)
        if getattr(config, "new_decoder_architecture", False):  # Falcon's spelling
            shared = config.num_kv_heads
        elif shared is None and getattr(config, "multi_query", False):
            shared = 1
        return cls(heads, shared or heads)

    def tie(self, per_channel: Tensor, how: str) -> Tensor:
        """Reduce a statistic of the queries' channels [Hq*D] to the value channels [Hkv*D] by ``mean`` or ``max``."""
        shared: Tensor = per_channel.unflatten(0, (self.kv_heads, self.q_heads // self.kv_heads, -1))
        reduced = shared.amax(1) if how == "max" else shared.mean(1)
        return reduced.flatten()

    def spread(self, per_value: Tensor) -> Tensor:
        """Expand per-value-channel numbers [Hkv*D] to the query channels [Hq*D]: the inverse of ``tie``."""
        heads: Tensor = per_value.unflatten(0, (self.kv_heads, -1))
        return heads.repeat_interleave(self.q_heads // self.kv_heads, dim=0).flatten()


def fold(
    block: nn.Module, mapping: SmoothMapping, scales: Tensor, heads: Heads, storage: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Divide the smooth layer by ``scales`` and multiply the columns of the balance layers, preserving the function.

    scales [channels of the smooth layer] float32, positive. The weights of ``block`` (float32) are modified. A norm's
    weight is stored in ``storage``, so it is rounded to that dtype first and the columns absorb the difference. Returns
    the new tensors of a norm by name inside the block (none for a linear, which is quantized with its bias afterwards),
    and the factors [K] by which the columns of the balance layers were multiplied.
    """
    source = block.get_submodule(mapping.smooth_layer)
    assert isinstance(source.weight, Tensor)
    weight, bias = source.weight.data, getattr(source, "bias", None)
    rows = mapping.rows(len(weight)).to(weight.device)
    changed: dict[str, Tensor] = {}
    if isinstance(source, nn.Linear):
        effective = scales
        weight[rows] /= scales.unsqueeze(1)
        if bias is not None:
            bias.data[rows] = (bias.data[rows] / scales).to(storage).to(torch.float32)
    else:
        one = float(mapping.plus_one)
        old = weight + one
        new = (old / scales - one).to(storage).to(torch.float32) + one
        # Channels whose weight is 0, or becomes 0 or infinite, are not scaled.
        usable = (new != 0) & torch.isfinite(new) & (old != 0)
        new = torch.where(usable, new, old)
        effective = torch.where(usable, old / torch.where(usable, new, torch.ones_like(new)), torch.ones_like(old))
        weight.copy_(torch.where(usable, new - one, weight))
        changed[f"{mapping.smooth_layer}.weight"] = weight
        if bias is not None:
            bias.data.copy_((bias.data / effective).to(storage))
            changed[f"{mapping.smooth_layer}.bias"] = bias.data
    columns = heads.spread(effective) if mapping.heads else effective
    for name in mapping.balance_layers:
        block.get_submodule(name).weight.data.mul_(columns)  # type: ignore[operator]
    return changed, columns
