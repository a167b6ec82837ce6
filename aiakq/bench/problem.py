"""The problem sizes that ``bench kernels`` measures: linear layers, and sequences in a KV cache for attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiakq.spec import LayerSpec, QuantSpec

if TYPE_CHECKING:
    import torch

    from aiakq.kernels.ops import Ops
    from aiakq.kernels.types import AttentionContext, AttentionSpec, LayerCache
    from aiakq.runtime.config.engine import EngineConfig


@dataclass(frozen=True)
class Product:
    """``count`` linear layers of shape [N, K]; ``spec`` is None if the weights are not quantized."""

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
            return "w8a8" if self.spec.float8 is None else "fp8a8"
        stored = "fp8" if self.spec.float8 else self.spec.table or f"w{self.spec.bits}"
        return f"{stored}a16" + (f" g{self.spec.group_size}" if self.spec.group_size > 0 else "")


@dataclass
class Problem:
    """What to measure.

    products  linear layers.
    config    engine configuration of the model to take attention and norms from, or None.
    ceilings  peak rates of the device, see ``timing.ceilings``.
    """

    device: torch.device
    dtype: torch.dtype
    products: list[Product]
    config: EngineConfig | None = None
    ceilings: dict[str, float] = field(default_factory=dict)

    def ops(self) -> Ops:
        """Return new operations for the device, with the same arithmetic as ``serve`` by default."""
        from aiakq.kernels.ops import Ops

        kv_dtype = None if self.config is None else self.config.cache.dtype
        return Ops(self.device, self.dtype, kv_dtype, excluded={"dequantized"}, exact=False)


def products_of_model(config: EngineConfig) -> list[Product]:
    """Return the linear layers of the model of ``config``, grouped by shape and scheme."""
    from aiakq.formats.checkpoint import Checkpoint
    from aiakq.runtime.loader.shapes import linear_shapes

    counts: dict[tuple[int, int, LayerSpec | QuantSpec | None], int] = {}
    names: dict[tuple[int, int, LayerSpec | QuantSpec | None], str] = {}
    for name, n, k in linear_shapes(config.model, Checkpoint.open(config.load.path)):
        spec = None if config.spec is None else config.spec.for_layer(name)
        key = (n, k, None if spec is None else spec.layer)
        counts[key] = counts.get(key, 0) + 1
        names.setdefault(key, name.rpartition(".")[2])
    return [Product(names[key], *key, count=count) for key, count in counts.items()]


def attention_of(config: EngineConfig) -> AttentionSpec:
    """Return the attention of one layer of the model of ``config``, without projections and rotary embedding."""
    from aiakq.kernels.types import AttentionSpec

    hf = config.model
    return AttentionSpec(hf.num_heads, hf.num_kv_heads, hf.head_dim, hf.head_dim**-0.5)


def sequences(
    config: EngineConfig, lengths: list[tuple[int, int]], ops: Ops
) -> tuple[torch.Tensor, LayerCache, AttentionContext]:
    """Build the inputs of attention over sequences of (cached, new) tokens.

    Returns random queries [T, H, D], a KV cache with randomly ordered pages, and the context that locates them.
    """
    import torch

    from aiakq.kernels.types import AttentionContext

    device = ops.device
    page, hf = config.cache.block_size, config.model
    pages = [-(-(old + new) // page) for old, new in lengths]
    cache = ops.new_cache(attention_of(config), sum(pages) + 1, page)
    generator = torch.Generator().manual_seed(0)
    order = (torch.randperm(sum(pages), generator=generator) + 1).to(torch.int32).split(pages)
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
