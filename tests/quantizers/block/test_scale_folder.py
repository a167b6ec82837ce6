"""ScaleFolder keeps the folded factors, so that they can be undone."""

from __future__ import annotations

import torch
from torch import nn

from aiakq.formats.folded_scales import LinearScales
from aiakq.quantizers.block.scale_folder import ScaleFolder
from aiakq.quantizers.model.groups import Heads, SmoothMapping


def test_factors_of_rows_and_columns_give_the_weights_back() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"v": nn.Linear(8, 12), "o": nn.Linear(8, 6)})
    before = {name: layer.weight.data.clone() for name, layer in module.items()}
    # Keys are in front of the values, and four query heads of 2 read two value heads.
    mapping = SmoothMapping("v", ("o",), "", heads=True, part=(1, 8, 4))
    folder = ScaleFolder(module, {"v", "o"}, Heads(4, 2), torch.float32)
    for scales in (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.5, 2.0, 1.5])):
        folder.fold(mapping, scales)
    assert folder.rows["v"].tolist() == [1.0] * 8 + [0.5, 1.0, 6.0, 6.0]
    assert folder.columns["o"].tolist() == [0.5, 1.0, 0.5, 1.0, 6.0, 6.0, 6.0, 6.0]
    for name, layer in module.items():
        scales = LinearScales(folder.columns.get(name), folder.rows.get(name))
        torch.testing.assert_close(scales.unfolded(layer.weight.data), before[name])
    folder.clear()
    assert not folder.rows and not folder.columns
