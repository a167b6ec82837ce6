"""Launcher of experts_kernel.py: the experts of a mixture, in a number of launches that does not depend on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.experts import ExpertLayers, GroupedExperts, Routed, TorchExperts, grouped_rows
from aiakq.kernels.triton.experts_products import Blocks, ExpertProduct, product_of
from aiakq.kernels.triton.layouts import COLUMNS, block_for, warps_for
from aiakq.kernels.types import ExpertsProblem

#: Pairs that a program of the sort reads at once.
TILE = 1024


def supports(problem: ExpertsProblem) -> str | None:
    """Return None, or why not."""
    return triton.unsupported_dtype("experts", problem)


def prepare(layers: ExpertLayers, problem: ExpertsProblem) -> GroupedExperts:
    """Put the weights of all experts into one tensor of each kind, which the layers then share."""
    products = []
    for group in (layers.first, layers.second):
        product = product_of(group, problem)
        if isinstance(product, str):
            return LoopedExperts(layers, product)
        products.append(product)
    return TritonExperts(layers, *products)


class PairwiseExperts(GroupedExperts):
    """Experts, of which a GPU sums what each token was routed to; see PairExperts in ops/experts.py."""

    def __init__(self, layers: ExpertLayers) -> None:
        self._layers = layers

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [S, K] -> [S, N], expert by expert; see GroupedExperts."""
        return TorchExperts(self._layers)(x, counts)

    def mixture(self, x: Tensor, routed: Routed) -> Tensor:
        """x [T, K] -> [T, N] float32; see GroupedExperts."""
        return self.weighted_sums(self.outputs(x, routed, zeros=False), routed, own=False)

    def outputs(self, x: Tensor, routed: Routed, zeros: bool) -> Tensor:
        """x [T, K] -> [T * A, N]; see PairExperts."""
        raise NotImplementedError

    def weighted_sums(self, outputs: Tensor, routed: Routed, own: bool) -> Tensor:
        """outputs [T * A, N] -> [T, N] float32; see PairExperts."""
        from aiakq.kernels.triton.experts_kernel import experts_sum_kernel

        tokens, top = routed.selected.shape
        width, start = outputs.shape[1], self._layers.start
        sums = torch.empty(tokens, width, dtype=torch.float32, device=outputs.device)
        block = min(COLUMNS, block_for(width))
        first, end = (start, start + len(self._layers.first)) if own else (0, routed.count)
        if tokens:
            experts_sum_kernel[(tokens, -(-width // block))](
                outputs, routed.selected.contiguous(), routed.weights.contiguous(), sums, width, first, end,
                TOP=top, SLOTS=block_for(top), WEIGHTED=not routed.weigh_inputs, BLOCK=block,
                num_warps=warps_for(block),
            )  # fmt: skip
        return sums


class LoopedExperts(PairwiseExperts):
    """Experts that no kernel computes together: one runs after the other, on rows that the host counts."""

    def __init__(self, layers: ExpertLayers, reason: str) -> None:
        super().__init__(layers)
        self._reason = reason

    @property
    def host_reason(self) -> str | None:
        """See GroupedExperts."""
        return f"experts run one after the other, because {self._reason}"

    def outputs(self, x: Tensor, routed: Routed, zeros: bool) -> Tensor:
        """x [T, K] -> [T * A, N], rows of other ranks' experts zero."""
        rows, _, order, counts = grouped_rows(x, routed)
        end = self._layers.start + len(self._layers.first)
        first, own = sum(counts[: self._layers.start]), counts[self._layers.start : end]
        mine = slice(first, first + sum(own))
        found = self(rows[mine], own)
        outputs = found.new_zeros(len(order), found.shape[1])
        outputs[order[mine]] = found
        return outputs


class TritonExperts(PairwiseExperts):
    """Experts whose pairs are sorted and multiplied by a fixed number of launches; the host reads nothing."""

    def __init__(self, layers: ExpertLayers, first: ExpertProduct, second: ExpertProduct) -> None:
        super().__init__(layers)
        self._first, self._second = first, second

    @property
    def host_reason(self) -> str | None:
        """See GroupedExperts."""
        return None

    def outputs(self, x: Tensor, routed: Routed, zeros: bool) -> Tensor:
        """x [T, K] -> [T * A, N]; see PairExperts."""
        tokens, top = routed.selected.shape
        pairs, share = tokens * top, top
        if routed.weigh_inputs:
            x, share = (x.unsqueeze(1) * routed.weights.unsqueeze(2)).to(x.dtype).flatten(0, 1), 1
        mean = mean_rows(routed)
        blocks: dict[int, Blocks] = {}
        # The activation function also runs over the rows of other ranks' experts.
        all_here = len(self._layers.first) == routed.count
        both = (x.new_empty if all_here else x.new_zeros)(pairs, self._first.n)
        y = (torch.zeros if zeros else torch.empty)(pairs, self._second.n, dtype=x.dtype, device=x.device)
        if pairs:
            self._first(x, self._blocks(routed, self._first.rows(mean), blocks), mean, share, both)
            hidden = self._layers.activated(both, self._second.input_layout(pairs, mean))
            self._second(hidden, self._blocks(routed, self._second.rows(mean), blocks), mean, 1, y)
        return y

    def _blocks(self, routed: Routed, rows: int, known: dict[int, Blocks]) -> Blocks:
        """Return the pairs of these experts in blocks of ``rows``, sorted unless ``known`` has them."""
        if rows not in known:
            known[rows] = sort_pairs(routed.selected, self._layers.start, len(self._layers.first), rows)
        return known[rows]


def mean_rows(routed: Routed) -> int:
    """Return the mean number of pairs of an expert, rounded up, which decides how kernels are launched: all ranks agree
    on it, and it does not depend on where tokens are routed.
    """
    return -(-routed.selected.numel() // routed.count)


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return how many blocks of ``rows`` the pairs may need, however they are distributed: every expert with a pair may
    have a block that is not full.
    """
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def sort_pairs(selected: Tensor, start: int, experts: int, rows: int) -> Blocks:
    """Sort the pairs of ``selected`` [T, A] int64 by expert into blocks of ``rows``, those of ``experts`` experts from
    number ``start`` on. The sizes of the results, and of the launches, depend on T alone.
    """
    from aiakq.kernels.triton import experts_kernel as kernels

    selected = selected.contiguous()
    count, device = selected.numel(), selected.device
    blocks = most_blocks(count, experts, rows)
    counts, numbers = (torch.empty(size, dtype=torch.int32, device=device) for size in (experts, blocks))
    pairs = torch.empty(blocks, rows, dtype=torch.int32, device=device)
    tile = min(TILE, max(32, block_for(count)))
    kernels.experts_count_kernel[(experts,)](selected, counts, start, count, TILE=tile, num_warps=4)
    kernels.experts_place_kernel[(experts,)](
        selected, counts, pairs, numbers, start, count, blocks,
        COUNT=experts, EXPERTS=block_for(experts), BM=rows, TILE=tile, num_warps=4,
    )  # fmt: skip
    return Blocks(pairs, numbers, count)
