"""The process of a worker other than 0: runs the same blocks with its share of the batches and tasks.

Started with the number of an inherited socket as its first argument, as a child process of worker 0 or by Ray on a
node. Signals are ignored: the process ends when worker 0 closes the socket, or when it fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error, one_line
from aiakq.quantizers.workers.messages import Job, ToWorker, WorkerChannel
from aiakq.system.channel import Disconnected
from aiakq.system.child import begin_child, exit_child, parent_socket, run_for_parent

#: Seconds between two heartbeats.
_SIGN_SECONDS = 2.0


def main() -> None:
    """Run the worker; the entry point of the child process, which never returns."""
    begin_child()
    channel = WorkerChannel(parent_socket(), ToWorker)
    channel.send_heartbeats(_SIGN_SECONDS, lambda: os._exit(0))

    def work(job: Job) -> None:
        try:
            _quantize(channel, job)
        except Disconnected:
            raise
        except OSError as failure:  # its text says which file or device
            raise _failed(job, one_line(failure)) from None

    exit_child(run_for_parent(channel, Job, work, _failed))


def _failed(job: Job, reason: str) -> AiakqError:
    return error("worker_failed", worker=job.rank, reason=reason)


def _quantize(channel: WorkerChannel, job: Job) -> None:
    if job.quiet:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    if job.cpus:
        os.sched_setaffinity(0, job.cpus)
    import msgspec
    import torch

    from aiakq.formats.dequantized import open_dequantized
    from aiakq.quantizers.block_loop import BlockLoop, Calibration
    from aiakq.quantizers.model.source import SourceModel
    from aiakq.quantizers.prepared import block_plan
    from aiakq.quantizers.recipe import recipe_of
    from aiakq.quantizers.workers.values import receive_values
    from aiakq.quantizers.workers.worker import Worker
    from aiakq.spec import QuantSpec
    from aiakq.system.memory import gc_frozen

    torch.set_num_threads(job.threads)
    values = receive_values(channel)
    storage = getattr(torch, job.storage)
    _check(job)
    checkpoint = open_dequantized(job.checkpoint, storage)
    model = SourceModel(checkpoint, storage, torch.device("cpu"), job.trust_remote_code, job.widths)
    if job.adapter is not None:
        folder, digest = job.adapter
        model.merge(folder)
        if model.adapter is None or model.adapter.digest != digest:
            reason = f"the adapter {folder} on its node is not that of worker 0"
            raise _failed(job, reason)
    samples, others = values[: job.samples], [each for each in values[job.samples :] if isinstance(each, torch.Tensor)]
    if job.image_tensors:
        model.restore_images(job.image_kind, others[: job.image_tensors])
        others = others[job.image_tensors :]
    if job.rotation is not None:
        model.restore_rotation(job.rotation, others)
    plan = block_plan(msgspec.convert(job.spec, QuantSpec), storage, model)
    with _scratch(job) as scratch, gc_frozen():
        ids: Any = samples if job.calibrated else None
        calibration = Calibration(model, recipe_of(job.recipe), plan, ids, job.budget, scratch, job.seed)
        BlockLoop(calibration, Worker(channel, job.rank, job.size), lambda _: None, job.finished).run()


def _check(job: Job) -> None:
    """Raise ``worker_failed`` if this worker, on another machine, would quantize something else than worker 0."""
    import aiakq
    from aiakq.formats.model_folder import file_sizes

    if job.version != aiakq.__version__:
        reason = f"it is aiakq {aiakq.__version__}, and worker 0 is {job.version}"
        raise _failed(job, reason)
    if job.files != file_sizes(Path(job.checkpoint)):
        reason = f"the files of {job.checkpoint} on its node are not those of worker 0"
        raise _failed(job, reason)


@contextlib.contextmanager
def _scratch(job: Job) -> Iterator[Path]:
    """Provide a folder for hidden states."""
    if job.scratch:
        yield Path(job.scratch)
        return
    with tempfile.TemporaryDirectory(prefix="aiakq-") as folder:
        yield Path(folder)
