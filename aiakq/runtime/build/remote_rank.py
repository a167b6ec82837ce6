"""The process of a rank that Ray has started, possibly on another machine than rank 0.

See ``ray_actor`` for its arguments; it listens at the address for the other ranks.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import TYPE_CHECKING

from aiakq.errors import error
from aiakq.runtime.build.rank_process import run_rank
from aiakq.runtime.distributed.connections import SECRET_BYTES, Listener
from aiakq.runtime.distributed.messages import FollowerChannel, Listening, Load, ToRank
from aiakq.system.channel import Disconnected
from aiakq.system.child import begin_child, exit_child, parent_socket

if TYPE_CHECKING:
    from aiakq.runtime.distributed.rendezvous import Connections


def main() -> None:
    """Entry point of the process; never returns."""
    begin_child()
    channel = FollowerChannel(parent_socket(), ToRank)
    with parent_socket(2) as pipe:
        secret = pipe.recv(SECRET_BYTES, socket.MSG_WAITALL)
    try:
        listener = Listener(sys.argv[2], secret)
    except (OSError, ValueError) as problem:
        reason = f"the address {sys.argv[2]} does not belong to its node: {problem}"
        failure = error("ray_unavailable", reason=reason)
        channel.send_failure(failure)
        exit_child(failure.exit_code)
    assert isinstance(listener.address, tuple)
    # Imported before the address is announced: torch may take longer to import than ranks wait for each other.
    from aiakq.runtime.build import model_loader, new_runner  # noqa: F401
    from aiakq.runtime.distributed.rendezvous import Rendezvous

    with contextlib.suppress(Disconnected):
        channel.send(Listening(*listener.address))

    def connect(load: Load) -> Connections:
        rendezvous = Rendezvous(load.rank, load.size, load.addresses, listener, secret)
        try:
            return rendezvous.connect(load.time_limit)
        finally:
            listener.close()

    exit_child(run_rank(channel, connect))
