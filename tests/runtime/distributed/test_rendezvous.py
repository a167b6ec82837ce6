"""Rendezvous of ranks: collectives through memory or sockets, links to the next stage, and missing ranks are named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.kernels.cpu.gather_sockets import SocketCollective
from aiakq.runtime.distributed import rendezvous
from aiakq.runtime.distributed.connections import Listener, new_secret
from aiakq.runtime.distributed.rendezvous import Connections, Rendezvous


@pytest.fixture
def meet() -> Callable[..., list[Connections | AiakqError]]:
    """``meet(size, stages, absent, limit)`` -> the connections or error of every rank; each runs in a thread."""

    def run(
        size: int, stages: int, absent: tuple[int, ...] = (), limit: float = 10.0
    ) -> list[Connections | AiakqError]:
        secret = new_secret()
        listeners = [Listener("127.0.0.1", secret) for _ in range(size * stages)]
        addresses = [listener.address for listener in listeners]
        found: list = [None] * len(listeners)

        def work(rank: int) -> None:
            try:
                found[rank] = Rendezvous(rank, size, addresses, listeners[rank], secret).connect(limit)
            except AiakqError as failure:
                found[rank] = failure

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank in range(len(listeners))
            if rank not in absent
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.01)  # ranks start at different times
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        for listener in listeners:
            listener.close()
        return found

    return run


def gather_all(collectives: list) -> None:
    size = len(collectives)
    whole = torch.randn(4, size)
    results: list = [None] * size

    def work(place: int) -> None:
        results[place] = collectives[place].gather(whole[:, place : place + 1], list(range(size + 1)))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(torch.equal(result, whole) for result in results)


@pytest.mark.parametrize("size, stages", [(2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("kind", ["memory", "sockets"])
def test_ranks_of_a_stage_gather_and_links_connect_the_stages(meet, monkeypatch, size, stages, kind):
    if kind == "sockets":  # as on another machine, where the name does not exist
        monkeypatch.setattr(
            rendezvous, "_receive_memory", lambda *args: (_ for _ in ()).throw(ConnectionRefusedError())
        )
    found = meet(size, stages)
    for stage in range(stages):
        own = found[stage * size : (stage + 1) * size]
        if size == 1:
            assert own[0].collective is None
            continue
        assert all(isinstance(one.collective, SocketCollective) == (kind == "sockets") for one in own)
        gather_all([one.collective for one in own])
    for rank, one in enumerate(found):
        assert (one.link_in is None) == (rank < size)
        assert (one.link_out is None) == (rank >= size * (stages - 1))
        if one.link_out is not None:
            one.link_out.sendall(bytes([rank]))
            assert found[rank + size].link_in.recv(10) == bytes([rank])


def test_all_ranks_gather_over_sockets_if_one_is_on_another_machine(meet, monkeypatch):
    original = rendezvous._receive_memory

    def receive(name, size, secret, rank):
        return original(name.replace("aiakq", "other") if rank == 2 else name, size, secret, rank)

    monkeypatch.setattr(rendezvous, "_receive_memory", receive)
    found = meet(3, 1)
    assert all(isinstance(one.collective, SocketCollective) for one in found)
    gather_all([one.collective for one in found])


@pytest.mark.parametrize(("limit", "waits"), [(0.2, 0.5), (0.7, 0.7)])
def test_a_missing_rank_is_named_after_the_longer_time_limit(meet, monkeypatch, limit, waits):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 0.5)
    found = meet(3, 1, absent=(1,), limit=limit)
    assert isinstance(found[0], AiakqError) and found[0].id == "rank_late"
    assert found[0].message.startswith(f"Rank 1 timed out after {waits} s: connecting to rank 0")
    # A socket listens at rank 1's address, but does not reply.
    assert isinstance(found[2], AiakqError) and found[2].id == "rank_unreachable"
