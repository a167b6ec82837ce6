"""ProcessActor: the Ray actor that starts a rank or a worker on its node, and reports how it exited.

The rank runs in a child process, which ends with the actor but has memory, signal handlers and threads of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.runtime.distributed.connections import CONTROL, Address, Peer, connect
from aiakq.system.child import Child, child_command


class ProcessActor:
    """The class that ``ray_processes`` turns into an actor.

    The child process runs ``code`` with three arguments: the descriptor of an inherited socket that is connected to the
    first process, an address of its node to listen at, and a descriptor to read the secret of the group from.
    """

    def __init__(self, number: int, code: str) -> None:
        self._number = number
        self._code = code
        self._child: Child | None = None

    def start(
        self,
        address: Address,
        time_limit: float,
        secret: bytes,
        host: str,
        environment: Mapping[str, str],
        threads: int,
    ) -> tuple[str, dict[str, Any]] | None:
        """Connect to ``address`` and start the child process; return the id and fields of the error if that failed.

        time_limit   seconds for connecting.
        host         address for the child process to listen at; empty for the address of its node.
        environment  environment variables of the first process, used where they are not set on this node.
        """
        try:
            sock = connect(address, secret, Peer(self._number, CONTROL), 0, time_limit)
            with sock:
                self._start(sock.fileno(), secret, host or _node_address(), environment, threads)
        except AiakqError as failure:
            return failure.id, failure.plain_fields
        return None

    def _start(self, sock: int, secret: bytes, host: str, variables: Mapping[str, str], threads: int) -> None:
        command, environment = child_command(self._code, sock, host), {**variables, **os.environ}
        try:
            self._child = Child(command, environment, threads=threads, pass_fds=[sock])
            with self._child.sockets[0] as pipe:
                pipe.sendall(secret)
        except OSError as failure:
            reason = f"it could not be started: {failure}"
            raise error("rank_failed", rank=self._number, reason=reason) from None

    def pids(self) -> tuple[int, int]:
        """Return the process ids of the actor and of its child process."""
        assert self._child is not None
        return os.getpid(), self._child.pid

    def wait(self) -> str:
        """Wait until the child process exits, and return a description of why it did."""
        assert self._child is not None
        return self._child.exit_reason(None)


def _node_address() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())
