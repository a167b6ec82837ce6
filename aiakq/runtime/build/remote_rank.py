"""The process of a rank that Ray has started, possibly on another machine than rank 0.

``ray_actor`` starts it with the descriptor of an inherited socket that is connected to rank 0, and the address at which
it listens for the other ranks. It reads the secret of the ranks from standard input.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from aiakq.errors import AiakqError, error
from aiakq.runtime.build.rank_process import run_and_exit, run_rank
from aiakq.runtime.distributed.connections import SECRET_BYTES, Listener
from aiakq.runtime.distributed.messages import Listening, Load, RankChannel, RankFailed, frame

if TYPE_CHECKING:
    from aiakq.runtime.distributed.rendezvous import Connections


def main() -> None:
    """Entry point of the process; never returns."""
    run_and_exit(int(sys.argv[1]), lambda channel: _run(channel, sys.argv[2]))


def _run(channel: RankChannel, host: str) -> int:
    """Load the model and execute messages; return the exit code. Raises OSError if rank 0 is gone."""
    secret = sys.stdin.buffer.read(SECRET_BYTES)
    try:
        listener = _listen(host, secret)
    except AiakqError as failure:
        channel.send(frame(RankFailed(failure.id, failure.plain_fields)))
        return failure.exit_code
    assert isinstance(listener.address, tuple)
    channel.send(frame(Listening(*listener.address)))

    def connect(load: Load) -> Connections:
        from aiakq.runtime.distributed.rendezvous import Rendezvous  # imported late, because it imports torch

        rendezvous = Rendezvous(load.rank, load.size, load.addresses, listener, secret)
        try:
            return rendezvous.connect(load.time_limit)
        finally:
            listener.close()

    return run_rank(channel, connect)


def _listen(host: str, secret: bytes) -> Listener:
    try:
        return Listener(host, secret)
    except (OSError, ValueError) as failure:
        raise error("ray_unavailable", reason=f"the address {host} does not belong to its node: {failure}") from None
