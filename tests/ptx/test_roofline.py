"""The cost model, on launches whose costs are easy to count."""

from __future__ import annotations

import pytest
from ptx.roofline import (
    BANDWIDTH,
    CACHE,
    L2_BANDWIDTH,
    LAUNCH,
    MEMORY,
    PROCESSORS,
    Launch,
    Object,
    Turn,
    decoding,
    estimate,
    latents,
    missed_bytes,
    product,
    prompt,
)

SMALL = Object(64, 30000, 4, 100)


@pytest.mark.parametrize(
    ("made", "blocks"),
    [(Object(32, 1000, 1, 1), 32), (Object(32, 1000, 4, 1), 16), (Object(128, 1000, 4, 1), 4),
     (Object(129, 1000, 4, 1), 3), (Object(64, 100000, 4, 1), 2), (Object(254, 0, 8, 1), 1)],
)  # fmt: skip
def test_blocks_that_a_multiprocessor_holds(made, blocks):
    """By registers, in steps of eight per thread, shared memory, warps and a number of blocks."""
    assert made.occupancy == blocks


def test_what_limits_a_launch():
    turn = Turn(0.0, "bf16", 1000.0, 3)
    issue = estimate(Launch(SMALL, turn, [10.0] * PROCESSORS, stream=1.0))
    assert issue.limit == "latency" and issue.causes["issue"] > 0
    memory = estimate(Launch(SMALL, turn, [1.0] * PROCESSORS, stream=BANDWIDTH))
    assert memory.limit == "memory" and memory.seconds == pytest.approx(1 / MEMORY + LAUNCH)
    tensor = estimate(Launch(SMALL, Turn(1e12, "int8", 1.0, 3), [1.0] * PROCESSORS))
    assert tensor.limit == "tensor" and tensor.waves == pytest.approx(1 / SMALL.occupancy)


def test_a_last_block_keeps_one_multiprocessor_busy():
    turn = Turn(1e9, "bf16", 1.0, 3)
    whole, more = (estimate(Launch(SMALL, turn, [1.0] * (PROCESSORS * 7 + extra))).causes for extra in (0, 1))
    assert SMALL.occupancy == 7 and more["tensor"] == pytest.approx(whole["tensor"] * 8 / 7)
    assert more["latency"] == pytest.approx(2 * whole["latency"])


def test_parts_that_are_used_again_are_read_once_while_the_cache_holds_them():
    blocks = [[(("x", a), CACHE / 8), (("w", b), CACHE / 80)] for b in range(10) for a in range(4)]
    assert missed_bytes(blocks, 4) == pytest.approx(CACHE * (4 / 8 + 10 / 80))
    large = [[(("x", a), CACHE / 2), (("w", b), 1.0)] for b in range(10) for a in range(4)]
    assert missed_bytes(large, 4) > 10 * CACHE, "each wave needs more than there is"


def test_heads_beside_each_other_read_latents_once():
    """And those of other heads read them again, if that is when all have been read and the cache holds fewer."""
    beside, apart = (
        estimate(latents(SMALL, [65536] * 16, [64] * 16, (128, 576, 512), 64, 64, apart)) for apart in (False, True)
    )
    assert beside.bytes == pytest.approx(16 * 65536 * 1152) and apart.bytes > 1.9 * beside.bytes
    assert beside.causes["L2"] == apart.causes["L2"] == pytest.approx(2 * 16 * 65536 * 1152 / L2_BANDWIDTH)


def test_groups_of_rows_need_less_of_many_rows_again():
    """The raster order of a product of so many rows that a wave touches all of them."""
    made, tile, sizes = Object(120, 98304, 8, 84), (128, 128, 128, 3, 1), (16384, 28672, 4096)
    rows, outputs, group = 128, 224, 16
    order = [(a, b) for g in range(0, rows, group) for b in range(outputs) for a in range(g, g + group)]
    plain, grouped = (estimate(product(made, "int8", 8, sizes, tile, tiles)) for tiles in (None, order))
    assert grouped.bytes < 0.6 * plain.bytes and grouped.seconds <= plain.seconds


def test_one_long_sequence_among_short_ones_is_what_all_wait_for():
    lengths = [32768] + [1024] * 63
    made = Object(96, 39424, 4, 339)
    together = estimate(decoding(made, lengths, 8, 128, 64, 3, 16, [1] * 64)).seconds
    apart = estimate(decoding(made, lengths, 8, 128, 64, 3, 16, [32] + [1] * 63)).seconds
    assert apart < 0.6 * together


def test_the_longest_blocks_of_a_prompt_first_leave_no_tail():
    ends = [16 * (number + 1) for number in range(60)]
    last, first = (
        estimate(prompt(Object(255, 100000, 8, 424), order, (32, 8), 128, 64, 2, 64)).causes["issue"]
        for order in (ends, ends[::-1])
    )
    assert first < last
