"""The problem sizes that ``bench kernels`` measures: linear layers, and sequences in a KV cache for attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiakq.spec import LayerSpec, QuantSpec

if TYPE_CHECKING:
    import torch

    from aiakq.kernels.ops import Ops
    from aiakq.kernels.types import AttentionContext, AttentionSpec, LayerCache
    from aiakq.runtime.config.engine import EngineConfig


@dataclass(frozen=True)
class Product:
    """``count`` linear layers of N outputs and K inputs; ``spec`` None where weights are not quantized."""

    name: str
    n: int
    k: int
    spec: LayerSpec | QuantSpec | None
    count: int = 1

    @property
    def kind(self) -> str:
        if self.spec is None:
            return "w16"
        if self.spec.activation_bits:
            return "w8a8"
        return f"w{self.spec.bits}a16" + (f" g{self.spec.group_size}" if self.spec.group_size > 0 else "")


@dataclass
class Problem:
    """What is measured: where, in what arithmetic, which products, and the model that attention is of, if any."""

    device: torch.device
    dtype: torch.dtype
    products: list[Product]
    config: EngineConfig | None = None
    ceilings: dict[str, float] = field(default_factory=dict)

    def ops(self) -> Ops:
        """The operations of the device, with arithmetic as ``serve`` uses it by default; nothing is bound yet."""
        from aiakq.kernels.ops import Ops

        kv_dtype = None if self.config is None else self.config.cache.dtype
        return Ops(self.device, self.dtype, kv_dtype, excluded={"dequantized"}, exact=False)


def products_of_model(config: EngineConfig) -> list[Product]:
    """The linear layers that the model of ``config`` runs, equal ones together."""
    from aiakq.formats.checkpoint import Checkpoint
    from aiakq.runtime.loader.shapes import linear_shapes

    counts: dict[tuple[int, int, Any], int] = {}
    names: dict[tuple[int, int, Any], str] = {}
    for name, n, k in linear_shapes(config.model, Checkpoint.open(config.load.path)):
        spec = None if config.spec is None else config.spec.for_layer(name)
        key = (n, k, None if spec is None else spec.layer)
        counts[key] = counts.get(key, 0) + 1
        names.setdefault(key, name.rpartition(".")[2])
    return [Product(names[key], *key, count=count) for key, count in counts.items()]


def attention_of(config: EngineConfig) -> AttentionSpec:
    """The attention of a layer of the model of ``config``, without what comes before it."""
    from aiakq.kernels.types import AttentionSpec

    hf = config.model
    return AttentionSpec(hf.num_heads, hf.num_kv_heads, hf.head_dim, hf.head_dim**-0.5)


def sequences(
    config: EngineConfig, lengths: list[tuple[int, int]], ops: Ops
) -> tuple[torch.Tensor, LayerCache, AttentionContext]:
    """Queries of sequences of (cached, new) tokens, a cache of pages in no order, and where they are in it."""
    import torch

    from aiakq.kernels.types import AttentionContext

    device = ops.device
    page, hf = config.cache.block_size, config.model
    pages = [-(-(old + new) // page) for old, new in lengths]
    cache = ops.new_cache(attention_of(config), sum(pages) + 1, page)
    draw = torch.Generator().manual_seed(0)
    order = (torch.randperm(sum(pages), generator=draw) + 1).to(torch.int32).split(pages)
    starts = [0]
    for _, new in lengths:
        starts.append(starts[-1] + new)
    ends = [old + new for old, new in lengths]
    context = AttentionContext(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor(ends, dtype=torch.int32, device=device),
        slots=torch.empty(0, dtype=torch.int64, device=device),
        page_table=torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device),
        num_decodes=sum(new == 1 for _, new in lengths),
        query_start_list=starts,
        kv_len_list=ends,
    )
    query = torch.randn(starts[-1], hf.num_heads, hf.head_dim, dtype=ops.dtype, device=device)
    return query, cache, context
