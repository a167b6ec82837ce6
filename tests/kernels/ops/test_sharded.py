"""How layers are shared out, and that an expert is loaded by one rank."""

import pytest
import torch

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.parallel import ExpertRole
from aiakq.kernels.ops.sharded import ShardedExperts, ShardedOps, head_shares, shares
from aiakq.kernels.types import AttentionContext, AttentionSpec


@pytest.mark.parametrize(
    "count, size, multiple, bounds",
    [
        (10, 3, 1, [0, 4, 7, 10]),
        (1001, 2, 32, [0, 512, 1001]),
        (40, 3, 32, [0, 32, 40, 40]),
        (5, 4, 32, [0, 5, 5, 5, 5]),
    ],
)
def test_shares_are_even_and_whole_tiles(count, size, multiple, bounds):
    assert shares(count, size, multiple) == bounds


@pytest.mark.parametrize(
    "heads, kv_heads, size, bounds",
    [
        (8, 4, 2, [0, 4, 8]),
        (6, 6, 4, [0, 2, 4, 5, 6]),
        (8, 2, 4, [0, 2, 4, 6, 8]),  # two ranks hold one key head
        (6, 2, 4, [0, 2, 3, 5, 6]),
        (4, 1, 3, [0, 2, 3, 4]),
        (2, 2, 5, [0, 1, 1, 1, 2, 2]),  # three ranks have no head
    ],
)
def test_heads_of_a_rank_share_keys_evenly(heads, kv_heads, size, bounds):
    found = head_shares(heads, kv_heads, size)
    assert found == bounds
    group = heads // kv_heads
    for first, end in zip(found, found[1:], strict=False):
        whole_groups = first % group == 0 and end % group == 0
        assert first == end or whole_groups or first // group == (end - 1) // group


class OneOfTwo:
    """Rank 0 of two, alone: what the other would give is zeros."""

    rank, size = 0, 2

    def gather(self, x, bounds):
        whole = torch.zeros(len(x), bounds[-1], dtype=x.dtype)
        whole[:, bounds[0] : bounds[1]] = x
        return whole


@pytest.fixture
def ops() -> ShardedOps:
    return ShardedOps(Ops(torch.device("cpu"), torch.float32), OneOfTwo())


def test_a_linear_layer_computes_its_share(ops):
    weight, x = torch.randn(96, 64), torch.randn(3, 64)
    y = ops.dense(weight)(x)
    assert torch.allclose(y[:, :64], x @ weight[:64].T, atol=1e-4) and not y[:, 64:].any()


def test_experts_are_whole_on_their_rank_and_not_loaded_on_others(ops):
    roles = [ExpertRole(number, 4) for number in range(4)]
    pairs = [(ops.dense(torch.randn(64, 32), role=role), ops.dense(torch.randn(32, 32), role=role)) for role in roles]
    assert all(layer.own is None for pair in pairs[2:] for layer in pair)
    layer = ops.experts(pairs, ops.activation("silu"))
    assert isinstance(layer, ShardedExperts)
    x = torch.randn(6, 32)
    y = layer(x, [1, 2, 0, 3])
    plain = Ops(torch.device("cpu"), torch.float32)
    own = plain.experts([(one.own, two.own) for one, two in pairs[:2]], plain.activation("silu"))
    assert torch.equal(y[:3], own(x[:3], [1, 2])) and not y[3:].any()


def test_experts_without_their_role_are_shared_by_their_rows(ops):
    pairs = [(ops.dense(torch.randn(64, 32)), ops.dense(torch.randn(32, 32))) for _ in range(2)]
    assert not isinstance(ops.experts(pairs, ops.activation("silu")), ShardedExperts)


class OneOf:
    """A rank that puts its own columns in place and leaves those of others 0, so that the sum of all ranks is whole."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, x, bounds):
        out = x.new_zeros(len(x), bounds[-1])
        out[:, bounds[self.rank] : bounds[self.rank + 1]] = x
        return out


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    "spec", [AttentionSpec(5, 1, 24, 0.3, value_dim=16, latent=True), AttentionSpec(8, 4, 16, 0.25)]
)
def test_ranks_write_and_attend_to_keys_separately(size, spec):
    T, whole = 7, Ops(torch.device("cpu"), torch.float32)
    query, key = torch.randn(T, spec.num_heads, spec.head_dim), torch.randn(T, spec.num_kv_heads, spec.head_dim)
    value = torch.randn(T, spec.num_kv_heads, spec.value_dim)

    def attended(ops):
        numbers = torch.tensor([[0, T], [1, 2]], dtype=torch.int32)
        lengths = torch.tensor([T], dtype=torch.int32)
        context = AttentionContext(numbers[0], lengths, torch.arange(4, 4 + T), numbers[1:], 0, [0, T], [T])
        attention, cache = ops.attention(spec), ops.new_cache(spec, 4, 4)
        attention.write(key, value, cache, context.slots)
        return attention.attend(query, cache, context)

    parts = [attended(ShardedOps(whole, OneOf(rank, size))) for rank in range(size)]
    assert torch.equal(sum(parts), attended(whole))
