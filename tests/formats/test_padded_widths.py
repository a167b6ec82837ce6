"""Padding of MLP widths: tensors, and what config.json says of it."""

from __future__ import annotations

import torch

from aiakq.formats.padded_widths import pad, pads_to, read_widths, record_widths

WIDTHS = {"intermediate_size": (3, 4)}


def test_a_tensor_is_padded_with_zeros_at_the_end_of_each_part():
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(pad(rows, (4, 2), WIDTHS), torch.cat([rows, torch.zeros(1, 2)]))
    assert torch.equal(pad(rows.T, (2, 4), WIDTHS), torch.cat([rows.T, torch.zeros(2, 1)], 1))
    fused = torch.arange(6.0)
    assert pad(fused, (8,), WIDTHS, "mlp.gate_up_proj.weight").tolist() == [0, 1, 2, 0, 3, 4, 5, 0]
    assert pad(fused, (8,), WIDTHS, "mlp.other.weight") is fused  # not ours to explain
    assert pad(rows, (5, 2), WIDTHS) is rows
    assert pads_to(3, 5, WIDTHS, "x") is None


def test_a_config_gives_back_the_widths_that_it_records():
    assert read_widths({"aiakq": {"padded": record_widths(WIDTHS)}}) == WIDTHS
    for broken in (
        None,
        [],
        {"padded": 3},
        {"padded": {"a": {"from": 4, "to": 3}, "b": {"from": True, "to": 2}, "c": 1}},
    ):
        assert read_widths({"aiakq": broken}) == {}
