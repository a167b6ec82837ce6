"""The process of a rank other than 0: loads its share of the model, and carries out what rank 0 sends until that ends.

Started by ``rank_group`` with the number of an inherited socket as its only argument. Signals are ignored: the process
ends when rank 0 closes the socket.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import socket
import sys
import traceback
from importlib.metadata import version

from aiakq.errors import WORKER, AiakqError, error, one_line
from aiakq.runtime.distributed.messages import Channel, Configure, Load, RankFailed, RankLoaded, RankReady, frame
from aiakq.system.processes import end_with_parent


def main() -> None:
    """Entry point of the child process; never returns."""
    # Ctrl-C in a terminal and a service manager's TERM also reach this process; only the parent acts on them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    end_with_parent()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        code = _run(channel)
    except OSError:  # rank 0 went away while we were sending
        code = 0
    # Skips the interpreter's tear-down, where thread pools of torch now and then hang.
    sys.stderr.flush()
    os._exit(code)


def _run(channel: Channel) -> int:
    """Load and compute; returns the exit code."""
    first = channel.receive_at_rank()
    if first is None:
        return 0
    assert isinstance(first, Load), "the first message says what to load"
    try:
        _follow(channel, first)
    except AiakqError as failure:
        channel.send(frame(RankFailed(failure.id, failure.plain_fields)))
        return failure.exit_code
    except OSError:
        raise
    except BaseException as failure:
        traceback.print_exc()
        channel.send(frame(RankFailed("rank_failed", {"rank": first.rank, "reason": one_line(failure)})))
        return WORKER
    return 0


def _follow(channel: Channel, load: Load) -> None:
    """Everything between the first message and the end of rank 0."""
    if load.cpus:
        os.sched_setaffinity(0, load.cpus)
    import torch

    from aiakq.kernels.cpu.gather import NativeCollective, memory_bytes
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.distributed.rank_group import checkpoint_digest
    from aiakq.runtime.executor.cpu_program import Bounds
    from aiakq.runtime.executor.follower import Follower
    from aiakq.runtime.executor.kv_cache import fit_positions, state_rows
    from aiakq.runtime.executor.runner import Runner
    from aiakq.runtime.loader.model_loader import load_model

    torch.set_num_threads(load.threads)
    memory = mmap.mmap(load.memory, memory_bytes(load.size))
    os.close(load.memory)
    collective = NativeCollective(memory, load.rank, load.size, load.time_limit)
    config = fit_positions(EngineConfig.from_args(load.arguments))
    model, _ = load_model(config, collective)
    channel.send(frame(RankLoaded(version("aiakq"), checkpoint_digest(config))))
    sizes = channel.receive_at_rank()
    if sizes is None:
        return
    assert isinstance(sizes, Configure), "the second message says how large the cache is"
    states = state_rows(config, model, sizes.num_pages, sizes.num_slots)
    runner = Runner(model, sizes.num_pages, config.cache.block_size, config.device.device, states)
    runner.capture(Bounds(sizes.tokens, sizes.rows, sizes.length), config.compilation)
    follower = Follower(runner, collective, sizes.num_slots, -(-sizes.length // config.cache.block_size))
    channel.send(frame(RankReady()))
    while (message := channel.receive_at_rank()) is not None:
        answer = follower.apply(message)
        if answer is not None:
            channel.send(frame(answer))
        if collective.late_rank is not None:
            limit, place = load.time_limit, f"gather {collective.num_meetings}"
            raise error("rank_late", rank=collective.late_rank, limit=limit, place=place)
