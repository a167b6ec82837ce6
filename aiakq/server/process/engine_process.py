"""The engine process: loads the model and runs steps until the HTTP process exits.

It is started by ``engine_client`` with the descriptor of an inherited socket as its only argument. It ignores signals
and exits when the HTTP process closes the socket.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.loop import run
from aiakq.runtime.protocol.command import Abort, Inbox
from aiakq.runtime.protocol.output import StepOutput
from aiakq.server.process.adapter_checks import AdapterChecks
from aiakq.server.process.held_requests import HeldRequests
from aiakq.server.process.ipc import (
    CheckAdapter,
    Configured,
    EngineChannel,
    GiveVocabulary,
    Loading,
    PrefetchAdapter,
    Ready,
    Start,
    Started,
    Stepped,
    Submit,
    ToEngine,
)
from aiakq.system.child import begin_child, exit_child, parent_socket, run_for_parent
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
    channel = EngineChannel(parent_socket(), ToEngine)
    # For systems where the kernel does not end this process, as the main thread may be loading or in a step.
    channel.on_hangup(_end_soon)
    exit_child(_run(channel))


def _end_soon() -> None:
    time.sleep(LAST_STEP_SECONDS)
    os._exit(0)


def _run(channel: EngineChannel) -> int:
    """Load the model and serve; return the exit code."""
    engine: Engine | None = None

    def work(start: Start) -> None:
        nonlocal engine
        if start.cpus:
            os.sched_setaffinity(0, start.cpus)  # before torch counts them
        engine = _load(channel, start)
        _serve(channel, engine)

    def unexpected(start: Start, reason: str) -> AiakqError:
        if engine is None:
            return error("engine_start", reason=reason, hint="The traceback is above.")
        return error("engine_dead", reason=reason)

    return run_for_parent(channel, Start, work, unexpected)


def _load(channel: EngineChannel, start: Start) -> Engine:
    """Build the engine, reporting every phase to the HTTP process."""
    began = time.monotonic()
    from aiakq.formats.model_folder import folder_identity
    from aiakq.runtime.build.loading import load_engine
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.distributed.replica import take_devices

    take_devices(start.arguments, start.replica, start.num_replicas)
    channel.send(Loading("libraries", time.monotonic() - began, "torch and aiakq imported"))
    config = EngineConfig.from_args(start.arguments)
    channel.send(
        Configured(
            model=str(config.load.path),
            tokenizer=config.tokenizer,
            dtype=config.device.dtype_name,
            sampling=dict(config.generation.sampling),
            files=folder_identity(config.load.path),
            media=config.multimodal,
            speech=config.speech,
        )
    )

    def on_phase(phase: Phase) -> None:
        channel.send(Loading(phase.name, phase.seconds, phase.detail))

    engine = load_engine(config, on_phase)
    freeze_objects()
    settings = _settings(config, engine.stats.num_pages)
    channel.send(Ready(engine.limits, dict(engine.facts), settings, config.scheduler.max_num_seqs))
    return engine


def _serve(channel: EngineChannel, engine: Engine) -> None:
    """Run the engine on the requests of the HTTP process until it is gone."""

    held, checks = HeldRequests(engine.executor, engine.scheduler.resources), AdapterChecks(engine)

    def receive(idle: bool) -> Inbox | None:
        checks.begin_prefetches()  # behind the commands that came before them
        records = channel.receive_all(wait=idle and not (held.wait() or checks.wait()))
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
            elif not isinstance(record, Start):
                if isinstance(record, Abort):
                    held.cancel(record.request_ids)
                inbox.append(record)
        for checked in checks.done():
            channel.send(checked)
        return inbox + held.ready()

    engine.on_start = lambda request_ids: channel.send(Started(request_ids))

    def deliver(output: StepOutput) -> None:
        held.finish(output.outputs)
        channel.send(Stepped(output))

    run(engine, receive, deliver)


def _settings(config: EngineConfig, num_pages: int) -> dict[str, str]:
    """The labels of the ``cache_config_info`` metric, in vLLM's spelling."""
    tokens = num_pages * config.cache.block_size
    return {
        "block_size": str(config.cache.block_size),
        "cache_dtype": str(config.cache.dtype).removeprefix("torch."),
        "num_gpu_blocks": str(num_pages),
        "kv_cache_size_tokens": str(tokens),
        "kv_cache_max_concurrency": f"{tokens / config.max_model_len:.2f}",
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
        "max_num_batched_tokens": str(config.scheduler.max_num_batched_tokens),
        "max_num_seqs": str(config.scheduler.max_num_seqs),
    }
