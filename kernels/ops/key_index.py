"""Index of keys for sparse attention (DeepSeek-V3.2 2025, arXiv:2512.02556): torch reference.

A few small heads score every cached position for a query; attention then reads only the positions with the highest
scores. The functions have no registry: what they compute is indices into the cache, in no implementation's layout.

As in ops/attention.py, positions are processed in chunks of CHUNK, counted from position 0 of the sequence, and rows
are padded to a multiple of ROWS, so that the scores of a token have the same bits in any batch and chunk of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.attention import CHUNK, ROWS

#: Most products, of all heads of a block of rows with all positions, that are in memory at once.
_MAX_PRODUCTS = 2**24


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return sum over h of weights[:, h] * relu(scale * queries[:, h] . keys), [R, L] float32.

    queries  [R, H, D].
    weights  [R, H] float32.
    keys     [L, D].
    """
    R, H, D = queries.shape
    chunks = F.pad(keys.float(), (0, 0, 0, -len(keys) % CHUNK)).view(-1, CHUNK, D)
    rows = R + -R % ROWS
    queries = F.pad(queries.float(), (0, 0, 0, 0, 0, rows - R)).view(1, rows * H, D).expand(len(chunks), -1, -1)
    products = torch.bmm(queries, chunks.transpose(1, 2)).mul_(scale).relu_().view(-1, rows, H, CHUNK)[:, :R]
    scores = products.new_zeros(len(chunks), R, CHUNK)
    for head in range(H):  # in this order for every row, which a sum or product over heads does not promise
        scores += products[:, :, head] * weights[:, head, None]
    return scores.transpose(0, 1).flatten(1)[:, : len(keys)]


def best_positions(scores: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return the ``count`` positions with the highest scores of each row, ascending, [R, count] int64.

    Of positions with the same score, the first ones are taken. Scores that are not numbers count as the lowest.

    scores   [R, L] float32.
    lengths  [R] int64, number of positions of each row, ``count`` at least; later ones are ignored.
    """
    lowest = torch.finfo(scores.dtype).min
    hidden = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)
    scores = scores.nan_to_num(nan=lowest).masked_fill(hidden, float("-inf"))
    least = scores.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, tied = scores > least, scores == least
    missing = count - above.sum(dim=1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(dim=1) <= missing))
    return chosen.nonzero()[:, 1].view(len(scores), count)


def row_blocks(rows: int, heads: int, length: int) -> list[range]:
    """Return blocks of rows whose scores over ``length`` positions are computed at once, to limit the memory."""
    step = max(1, _MAX_PRODUCTS // (heads * (length + -length % CHUNK)) // ROWS) * ROWS
    return [range(first, min(rows, first + step)) for first in range(0, rows, step)]
