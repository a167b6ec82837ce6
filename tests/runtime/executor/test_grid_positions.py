"""GridPositions: positions in three dimensions, equal to those of transformers."""

from __future__ import annotations

import pytest
import torch
from vision_models import config_of

from aiakq.runtime.executor.grid_positions import GridPositions, grid_positions
from aiakq.runtime.protocol.media import MediaItem

#: First token and grid of each image: at the beginning, in the middle, behind another but for two tokens.
ITEMS = ((0, (2, 3)), (9, (1, 4)), (15, (3, 1)))


def item(first: int, grid: tuple[int, int] | None) -> MediaItem:
    rows, columns = grid or (2, 2)
    return MediaItem("image", "key", [(first, rows * columns)], {}, grid)


def computed(first: int, end: int) -> list[list[int]]:
    """The three positions of tokens ``first`` to ``end`` - 1."""
    positions: list[int] = []
    grids: list = []
    GridPositions([item(*each) for each in ITEMS]).append(first, end, positions, grids, 1000)
    own = [row for grid in grids for row in grid.tolist()]
    rows = [position - 1000 for position in positions if position >= 1000]
    assert rows == list(range(len(own)))
    return [own[each - 1000] if each >= 1000 else [each] * 3 for each in positions]


def reference(length: int) -> tuple[list[list[int]], int]:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    with torch.device("meta"):
        model = Qwen2_5_VLModel(config_of("qwen2_5_vl"))
    kinds = torch.zeros(1, length, dtype=torch.int32)
    for first, (rows, columns) in ITEMS:
        kinds[0, first : first + rows * columns] = 1
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for _, (rows, columns) in ITEMS])
    positions, delta = model.get_rope_index(torch.zeros(1, length, dtype=torch.int64), kinds, image_grid_thw=grids)
    return positions[:, 0].T.tolist(), int(delta)


@pytest.mark.parametrize("chunks", [[0, 30], [0, 2, 11, 12, 16, 30], list(range(31))])
def test_positions_are_those_of_transformers_in_any_chunks(chunks):
    expected, _ = reference(30)
    found = [each for first, end in zip(chunks, chunks[1:], strict=False) for each in computed(first, end)]
    assert found == expected


def test_tokens_behind_the_images_are_shifted():
    positions = GridPositions([item(*each) for each in ITEMS])
    assert positions.shift == reference(30)[1]
    assert computed(100, 101) == [[100 + positions.shift] * 3]


def test_images_without_a_grid_leave_positions_as_they_are():
    assert grid_positions([item(3, None)]) is None and grid_positions([]) is None
