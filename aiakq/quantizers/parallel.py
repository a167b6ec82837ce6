"""Quantizes the blocks with the workers of a run (``--workers``)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import msgspec

import aiakq
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.model_folder import file_sizes
from aiakq.quantizers.block.decoder_block import BlockPlan
from aiakq.quantizers.block_loop import BlockLoop, Calibration
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress
from aiakq.quantizers.workers.child_workers import start_child_workers
from aiakq.quantizers.workers.messages import Job
from aiakq.quantizers.workers.protocol import Workers
from aiakq.quantizers.workers.worker_group import FirstWorker
from aiakq.system.memory import gc_frozen


def quantize_blocks(prepared: Prepared, plan: BlockPlan, writer: CheckpointWriter, progress: OnProgress) -> BlockLoop:
    """Quantize and write the blocks with the workers of this run, and return the loop. Raises ``worker_failed`` and
    what Ray raises.
    """
    with gc_frozen(), _start_workers(prepared, plan, writer) as workers:
        loop = _block_loop(prepared, plan, writer, workers, progress)
        loop.run()
    return loop


def _start_workers(prepared: Prepared, plan: BlockPlan, writer: CheckpointWriter) -> AbstractContextManager[Workers]:
    """Start the workers of this run, which end with the context; only one if no block is left."""
    options, size = prepared.options, prepared.options.workers
    if size == 1 or len(writer.steps) >= len(prepared.model.blocks):
        return FirstWorker()
    samples, features = [] if prepared.samples is None else prepared.samples.samples, prepared.model.features
    job = Job(
        version=aiakq.__version__,
        checkpoint=str(prepared.source.resolve()),
        files=file_sizes(prepared.source),
        recipe=prepared.recipe.document(),
        spec=msgspec.to_builtins(plan.spec),
        storage=str(prepared.storage).removeprefix("torch."),
        widths=dict(prepared.cut.widths),
        adapter=None if (adapter := prepared.model.adapter) is None else (str(adapter.folder.path), adapter.digest),
        rotation=None if (rotation := prepared.model.rotation) is None else rotation.document(),
        trust_remote_code=options.trust_remote_code,
        calibrated=prepared.samples is not None,
        samples=len(samples),
        image_kind="" if features is None else features.kind,
        image_tensors=0 if features is None else len(features.tensors),
        budget=prepared.activation_budget / size,
        scratch=str(writer.scratch.resolve()),
        seed=options.seed,
        finished=len(writer.steps),
        quiet=logging.root.manager.disable >= logging.WARNING,
        size=size,
    )
    images = [] if features is None else features.tensors
    tensors = [*samples, *images, *(() if rotation is None else rotation.tensors())]
    if options.distributed_executor_backend == "ray":
        from aiakq.quantizers.workers.ray_workers import start_ray_workers  # only where Ray is used

        return start_ray_workers(job, tensors)
    return start_child_workers(job, tensors)


def _block_loop(
    prepared: Prepared, plan: BlockPlan, writer: CheckpointWriter, workers: Workers, progress: OnProgress
) -> BlockLoop:
    """Return the block loop of worker 0."""
    samples = None if prepared.samples is None else prepared.samples.samples
    budget = prepared.activation_budget / workers.size
    calibration = Calibration(
        prepared.model, prepared.recipe, plan, samples, budget, writer.scratch, prepared.options.seed
    )
    return BlockLoop(calibration, workers, progress, len(writer.steps), writer)
