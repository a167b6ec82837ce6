"""The engine process: loads the model and runs steps until the HTTP process exits.

It is started by ``engine_client`` with the descriptor of an inherited socket as its only argument. It ignores signals
and exits when the HTTP process closes the socket.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING

from aiakq.errors import WORKER, AiakqError, error, memory_error, one_line
from aiakq.runtime.engine.loop import run
from aiakq.runtime.engine.messages import Abort, Inbox, StepOutput, UnloadAdapter
from aiakq.server.process.adapter_checks import AdapterChecks
from aiakq.server.process.held_requests import HeldRequests
from aiakq.server.process.ipc import (
    CheckAdapter,
    Configured,
    EngineLink,
    Failed,
    GiveVocabulary,
    Loading,
    PrefetchAdapter,
    Ready,
    Start,
    Started,
    Stepped,
    Submit,
    call_on_hangup,
    encode_error,
)
from aiakq.system.child import begin_child, exit_child
from aiakq.system.memory import freeze_objects

if TYPE_CHECKING:
    from aiakq.runtime.build.loading import Phase
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.engine.engine import Engine

#: Seconds that a step may continue after the HTTP process is gone.
LAST_STEP_SECONDS = 1.0


def main() -> None:
    """Entry point of the child process; never returns."""
    begin_child()
    peer = socket.socket(fileno=int(sys.argv[1]))
    # For systems where the kernel does not end this process, as the main thread may be loading or in a step.
    call_on_hangup(peer, _end_soon)
    link = EngineLink(peer)
    try:
        code = _run(link)
    except ConnectionError:  # the HTTP process exited while this process was sending
        code = 0
    exit_child(code)


def _end_soon() -> None:
    time.sleep(LAST_STEP_SECONDS)
    os._exit(0)


def _run(link: EngineLink) -> int:
    """Load the model and serve; return the exit code."""
    first = link.receive(wait=True)
    if first is None:
        return 0
    assert isinstance(first[0], Start), "the first frame holds the arguments"
    if first[0].cpus:
        os.sched_setaffinity(0, first[0].cpus)  # before torch counts them
    try:
        engine = _load(link, first[0])
    except AiakqError as failure:
        link.send(encode_error(failure))
        return failure.exit_code
    except BaseException as failure:
        if lacking := memory_error(failure):
            link.send(encode_error(lacking))
            return lacking.exit_code
        if isinstance(failure, ConnectionError) and link.receive(wait=False) is None:
            return 0  # the server ended while the model was loading
        traceback.print_exc()
        link.send(Failed("engine_start", {"reason": one_line(failure), "hint": "The traceback is above."}))
        return WORKER
    try:
        _serve(link, engine)
    except ConnectionError:
        return 0
    except AiakqError as failure:
        link.send(encode_error(failure))
        return failure.exit_code
    except BaseException as failure:
        traceback.print_exc()
        link.send(encode_error(error("engine_dead", reason=one_line(failure))))
        return WORKER
    return 0


def _load(link: EngineLink, start: Start) -> Engine:
    """Build the engine, reporting every phase to the HTTP process."""
    began = time.monotonic()
    from aiakq.formats.model_folder import folder_identity
    from aiakq.runtime.build.loading import load_engine
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.distributed.replica import take_devices

    take_devices(start.arguments, start.replica, start.num_replicas)
    link.send(Loading("libraries", time.monotonic() - began, "torch and aiakq imported"))
    config = EngineConfig.from_args(start.arguments)
    link.send(
        Configured(
            model=str(config.load.path),
            tokenizer=config.tokenizer,
            dtype=str(config.device.dtype).removeprefix("torch."),
            sampling=dict(config.generation.sampling),
            files=folder_identity(config.load.path),
        )
    )

    def on_phase(phase: Phase) -> None:
        link.send(Loading(phase.name, phase.seconds, phase.detail))

    engine = load_engine(config, on_phase)
    freeze_objects()
    link.send(Ready(engine.limits, dict(engine.facts), _settings(config), config.scheduler.max_num_seqs))
    return engine


def _serve(link: EngineLink, engine: Engine) -> None:
    """Run the engine on the requests of the HTTP process until it is gone."""

    held, checks = HeldRequests(engine.executor), AdapterChecks(engine)

    def receive(idle: bool) -> Inbox | None:
        records = link.receive(wait=idle and not (held.wait() or checks.wait()))
        if records is None:
            return None
        inbox: Inbox = []
        for record in records:
            if isinstance(record, Submit):
                inbox.extend(held.hold(record.specs()))
            elif isinstance(record, GiveVocabulary):
                engine.set_vocabulary(record.vocabulary())
            elif isinstance(record, CheckAdapter):
                checks.start(record)
            elif isinstance(record, PrefetchAdapter):
                checks.prefetch(record)
            elif isinstance(record, UnloadAdapter):
                checks.unload(record.key)
            elif not isinstance(record, Start):
                if isinstance(record, Abort):
                    held.cancel(record.request_ids)
                inbox.append(record)
        for checked in checks.done():
            link.send(checked)
        inbox += held.ready()
        return inbox + checks.unloads(held.adapters)

    engine.on_start = lambda request_ids: link.send(Started(request_ids))

    def deliver(output: StepOutput) -> None:
        held.finish(output.outputs)
        link.send(Stepped(output))

    run(engine, receive, deliver)


def _settings(config: EngineConfig) -> dict[str, str]:
    """The labels of the ``cache_config_info`` metric."""
    return {
        "block_size": str(config.cache.block_size),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
        "max_num_batched_tokens": str(config.scheduler.max_num_batched_tokens),
        "max_num_seqs": str(config.scheduler.max_num_seqs),
    }
