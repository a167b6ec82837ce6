"""Hidden states on their way from one stage to the next."""

from __future__ import annotations

import socket

import pytest
import torch

from aiakq.runtime.distributed.links import LinkReceiver, LinkSender
from aiakq.runtime.models.interface import StageOutput


@pytest.fixture
def ends():
    first, second = socket.socketpair()
    sender, receiver = LinkSender(first), LinkReceiver(second)
    yield sender, receiver
    sender.close()
    receiver.close()


def hidden(number: float) -> StageOutput:
    return StageOutput(
        torch.full((3, 8), number, dtype=torch.bfloat16), torch.full((3, 8), -number, dtype=torch.bfloat16)
    )


def test_hidden_states_may_be_overwritten_once_they_are_sent(ends):
    sender, receiver = ends
    sent = hidden(2.0)
    sender.send(7, sent)
    sent.x.zero_()
    found = receiver.receive(7, sent.x, lambda: True)
    assert torch.equal(found.x, hidden(2.0).x) and torch.equal(found.residual, hidden(2.0).residual)


def test_hidden_states_arrive_on_the_device_of_the_next_stage(ends):
    sender, receiver = ends
    sender.send(0, hidden(1.0))
    found = receiver.receive(0, torch.empty(3, 8, dtype=torch.bfloat16, device="meta"), lambda: True)
    assert found.x.device.type == found.residual.device.type == "meta" and found.x.shape == (3, 8)


def test_what_ranks_that_gave_up_have_computed_is_not_sent(ends):
    sender, receiver = ends
    sender.send(0, hidden(1.0), lambda: False)
    sender.send(1, hidden(2.0), lambda: True)
    assert torch.equal(receiver.receive(1, hidden(0.0).x, lambda: True).x, hidden(2.0).x)
