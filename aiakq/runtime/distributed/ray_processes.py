"""Processes that Ray starts on one or several nodes, each connected to this process. Ray detects lost nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from typing import Any

import torch

from aiakq.arguments.environment import SETTINGS
from aiakq.errors import error
from aiakq.runtime.distributed.connections import CONTROL, Listener, new_secret
from aiakq.runtime.distributed.ray_actor import ProcessActor
from aiakq.runtime.distributed.ray_cluster import Placement, Session
from aiakq.system.threads import RestoreThreads

logger = logging.getLogger("aiakq.runtime")

#: Time limit in seconds for Ray to start all processes.
START_SECONDS = 180.0
#: Time limit in seconds for each process, once it runs, to connect to this one.
CONNECT_SECONDS = 20.0
#: Seconds to wait for Ray to report why a process exited, after its connection ended.
_REASON_SECONDS = 1.5
_LOOPBACK = "127.0.0.1"
#: Environment variables that are passed on to the other processes unless set on their nodes: those that choose kernels
#: and the model hub. Addresses, interfaces, paths and secrets are left to each node.
SHARED_VARIABLES = (
    *sorted(SETTINGS.keys() & {"AIAKQ_KERNELS", "AIAKQ_CPU_ISA", "AIAKQ_DEBUG"}),
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)


class RayProcess:
    """A process that Ray has started.

    number  index of its slot.
    socket  socket connected to it.
    host    address of its node.
    pids    process ids of its actor and of the process itself, on its node.
    """

    def __init__(self, session: Session, number: int, actor: Any, sock: socket.socket, host: str) -> None:
        self.number, self.socket, self.host = number, sock, host
        self._session, self._ray, self._actor = session, session.ray, actor
        self._reason: str | None = None
        self.pids: tuple[int, int] = self._ray.get(actor.pids.remote())
        logger.debug("process %d: %d of node %s", number, self.pids[1], host)
        self._exit_ref = actor.wait.remote()
        self._watch = threading.Thread(target=self._wait, name=f"ray-process-{number}", daemon=True)
        self._watch.start()

    def kill(self) -> None:
        """Kill the process immediately."""
        if self._session.is_current:
            with contextlib.suppress(Exception):
                self._ray.kill(self._actor)

    def end(self) -> None:
        """Wait for the process to exit after its connection was shut down, and kill it if it does not."""
        self._watch.join(2.0)
        self.kill()

    def exit_reason(self) -> str:
        """Return a description of why the process exited."""
        self._watch.join(_REASON_SECONDS)
        return self._reason or f"its connection from node {self.host} ended"

    def _wait(self) -> None:
        """Wait until Ray reports that the process exited; for a lost node that may precede the connection's timeout."""
        try:
            self._reason = f"{self._ray.get(self._exit_ref)} on node {self.host}"
        except Exception as failure:
            self._reason = f"Ray lost it on node {self.host}: {_first_line(failure)}"
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class RayProcesses:
    """The processes in all slots of a placement except the first, which belongs to this process.

    placement  the placement.
    listener   listener that the processes connect to, open to later peers that know ``secret``; the owner closes it.
    sockets    index of the slot -> socket connected to its process.
    """

    def __init__(self, count: int, size: int, code: str) -> None:
        """Reserve the slots, see Placement. Raises ``ray_missing``, ``ray_unavailable`` and ``ray_resources``.

        code  Python code that the processes run; see ProcessActor.
        """
        self._restore = RestoreThreads(torch.get_num_threads(), torch.set_num_threads)
        self._session = Session()
        self._ray = self._session.ray
        self.placement = Placement(self._session, count, size)
        self.secret = new_secret()
        slots = self.placement.slots
        self._host = _LOOPBACK if all(slot.host == slots[0].host for slot in slots) else ""
        try:
            self.listener = Listener(self._host or slots[0].host, self.secret)
        except BaseException:
            self.placement.close()
            raise
        self.sockets: dict[int, socket.socket] = {}
        self._code = code
        self._actors: list[object] = []

    def use_threads(self) -> int:
        """Make this process use the threads that its slot reserves, and return their number."""
        threads = min(self.placement.slots[0].threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        return threads

    def start(self) -> None:
        """Start all processes and wait until they have connected.

        Raises ``rank_failed``, ``rank_late`` and ``rank_unreachable``.
        """
        refs, count = self._start(), len(self.placement.slots)
        deadline = time.monotonic() + START_SECONDS
        while len(self.sockets) < count - 1:
            try:
                peer, sock = self.listener.accept(0.5)
            except TimeoutError:
                self._check_start(refs)
                if time.monotonic() > deadline:
                    rank = min(set(range(1, count)) - self.sockets.keys())
                    operation = "connecting to rank 0"
                    raise error("rank_late", rank=rank, limit=START_SECONDS, operation=operation) from None
                continue
            if peer.purpose != CONTROL or not 0 < peer.rank < count:
                sock.close()
                continue
            if peer.rank in self.sockets:  # it did not receive the reply, and has reconnected
                self.sockets[peer.rank].close()
            self.sockets[peer.rank] = sock

    def process(self, number: int) -> RayProcess:
        """Return the process of a slot, and start watching it: its connection is shut down when it exits."""
        host = self.placement.slots[number].host
        return RayProcess(self._session, number, self._actors[number - 1], self.sockets[number], host)

    def close(self) -> None:
        """Kill all processes, close their connections, and release the slots and the threads of this process."""
        self.listener.close()
        for sock in self.sockets.values():
            sock.close()
        for actor in self._actors if self._session.is_current else ():
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        self.placement.close()
        self._restore()

    def _start(self) -> dict[int, object]:
        """Have Ray start the processes; return the object refs of the ``ProcessActor.start`` calls, by slot index."""
        environment = {name: os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
        remote, refs, address = self._ray.remote(ProcessActor), {}, self.listener.address
        for number, slot in list(enumerate(self.placement.slots))[1:]:
            strategy = self.placement.strategy(slot)
            options = {"num_cpus": slot.threads, "max_restarts": 0, "scheduling_strategy": strategy}
            actor = remote.options(**options).remote(number, self._code)
            self._actors.append(actor)
            settings = (self._host, environment, slot.threads)
            refs[number] = actor.start.remote(address, CONNECT_SECONDS, self.secret, *settings)
        return refs

    def _check_start(self, refs: dict[int, object]) -> None:
        for number, ref in refs.items():
            if not self._ray.wait([ref], timeout=0)[0]:
                continue
            try:
                failure = self._ray.get(ref)
            except Exception as problem:
                raise error("rank_failed", rank=number, reason=_first_line(problem)) from problem
            if failure is not None:
                raise error(failure[0], **failure[1])


def _first_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    return lines[-1 if "Traceback" in lines[0] else 0].strip().rstrip(".")
