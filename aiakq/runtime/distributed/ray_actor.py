"""ProcessActor: the Ray actor that starts a rank or a worker on its node, and reports how it exited.

The rank runs in a child process, which ends with the actor but has memory, signal handlers and threads of its own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.runtime.distributed.connections import CONTROL, Address, Peer, connect
from aiakq.system.child import describe_exit, start_child


class ProcessActor:
    """The class that ``ray_processes`` turns into an actor.

    The child process runs ``code`` with two arguments: the descriptor of an inherited socket that is connected to the
    first process, and an address of its node to listen at. It reads the secret of the group from standard input.
    """

    def __init__(self, number: int, code: str) -> None:
        self._number = number
        self._code = code
        self._process: subprocess.Popen[bytes] | None = None

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
        environment = {**variables, **os.environ}
        try:
            self._process = start_child(
                self._code, sock, host, pass_fds=[sock], threads=threads, environment=environment, stdin=subprocess.PIPE
            )
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(secret)
        except OSError as failure:
            reason = f"it could not be started: {failure}"
            raise error("rank_failed", rank=self._number, reason=reason) from None

    def pids(self) -> tuple[int, int]:
        """Return the process ids of the actor and of its child process."""
        assert self._process is not None
        return os.getpid(), self._process.pid

    def wait(self) -> str:
        """Wait until the child process exits, and return a description of why it did."""
        assert self._process is not None
        return describe_exit(self._process.wait())


def _node_address() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())
