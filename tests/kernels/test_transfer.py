"""Copies between the host and a device."""

from __future__ import annotations

import torch

from aiakq.kernels.transfer import copies_on_host, on_device


def test_numbers_are_copied_before_they_are_read():
    values = torch.arange(3)
    numbers = copies_on_host(values, values.double() / 2)
    assert [each.tolist() for each in numbers()] == [[0, 1, 2], [0, 0.5, 1]]


def test_lists_and_tensors_arrive_as_they_are():
    device = torch.device("cpu")
    assert on_device([[1, 2], [3, 4]], device).tolist() == [[1, 2], [3, 4]]
    assert on_device([1, 2], device, torch.float64).dtype == torch.float64
    assert on_device(torch.ones(2, 3), torch.device("meta")).shape == (2, 3)
