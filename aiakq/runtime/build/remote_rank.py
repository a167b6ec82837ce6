"""The process of a rank that Ray has started, possibly on another machine than rank 0.

``ray_actor`` starts it with the descriptor of an inherited socket that is connected to rank 0, and the address at which
it listens for the other ranks. It reads the secret of the ranks from standard input.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from aiakq.errors import error
from aiakq.runtime.build.rank_process import run_rank
from aiakq.runtime.distributed.connections import SECRET_BYTES, Listener
from aiakq.runtime.distributed.messages import FollowerChannel, Listening, Load, ToRank
from aiakq.system.child import begin_child, exit_child, parent_socket, run_for_parent

if TYPE_CHECKING:
    from aiakq.runtime.distributed.rendezvous import Connections


def main() -> None:
    """Entry point of the process; never returns."""
    begin_child()
    channel = FollowerChannel(parent_socket(), ToRank)
    secret = sys.stdin.buffer.read(SECRET_BYTES)
    listener: Listener

    def listen() -> None:
        nonlocal listener
        listener = _listen(sys.argv[2], secret)
        assert isinstance(listener.address, tuple)
        channel.send(Listening(*listener.address))

    def connect(load: Load) -> Connections:
        from aiakq.runtime.distributed.rendezvous import Rendezvous  # imported late, because it imports torch

        rendezvous = Rendezvous(load.rank, load.size, load.addresses, listener, secret)
        try:
            return rendezvous.connect(load.time_limit)
        finally:
            listener.close()

    code = run_for_parent(channel, listen, lambda reason: error("ray_unavailable", reason=reason))
    exit_child(code or run_rank(channel, connect))


def _listen(host: str, secret: bytes) -> Listener:
    try:
        return Listener(host, secret)
    except (OSError, ValueError) as failure:
        raise error("ray_unavailable", reason=f"the address {host} does not belong to its node: {failure}") from None
