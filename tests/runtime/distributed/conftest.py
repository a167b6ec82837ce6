"""Skips tests of rank processes without the native kernels, and runs ranks as threads where that suffices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aiakq import SamplingParams
from aiakq.kernels.cpu import library
from aiakq.kernels.torch_collective import TorchCollective
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.model_share import ModelShare
from aiakq.runtime.executor.kv_cache import fit_positions, state_rows
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import Chunk, NewSequence, StepBatch


@pytest.fixture(autouse=True)
def ranks_are_available() -> None:
    reason = library.unavailable()
    if reason is not None:
        pytest.skip(reason)


class Steps(NamedTuple):
    """Results of one rank: logits [rows, V] and number of collectives of every step, and its start-up table."""

    logits: list[Tensor]
    num_operations: list[int]
    facts: dict[str, str]


PROMPTS = [[5 + 11 * at % 250 for at in range(9)], [7 + 5 * at % 250 for at in range(14)]]
NEXT = [41, 77]


def compute(config: EngineConfig, collective: TorchCollective | None) -> Steps:
    """Two prefills, then a decode step of both."""
    model, facts = load_model(config, ModelShare(collective))
    pages, slots = 12, 3
    runner = Runner(model, pages, 8, torch.device("cpu"), state_rows(config, model, pages, slots))
    running = RunningSequences(slots, 4)
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    new = [NewSequence(at, RequestSpec(str(at), tokens, params, 4, 0)) for at, tokens in enumerate(PROMPTS)]
    chunks = [Chunk(at, 0, len(tokens), list(range(1 + 4 * at, 4 + 4 * at)), True) for at, tokens in enumerate(PROMPTS)]
    batches = [
        StepBatch([], [], new, chunks),
        StepBatch([], [], [], [Chunk(at, len(tokens), 1, [], True) for at, tokens in enumerate(PROMPTS)]),
    ]
    found = Steps([], [], facts)
    for batch in batches:
        sequences = running.update(batch, {})
        step = runner.prepare(batch.chunks, sequences, running)
        before = collective.num_operations if collective is not None else 0
        logits = runner.forward(step.model_input)[: step.logit_rows[-1].stop]
        found.logits.append(logits.clone())
        found.num_operations.append(0 if collective is None else collective.num_operations - before)
        for sequence, token in zip(sequences, NEXT, strict=True):
            sequence.token_ids.append(token)
    return found


def as_ranks(size: int, function: Callable[[TorchCollective], Any], time_limit: float = 20.0) -> list[Any]:
    """Return the results of ``function`` on ``size`` ranks, which are threads that communicate through gloo."""
    descriptor = os.memfd_create("ranks")
    collectives = [TorchCollective(descriptor, rank, size, time_limit, torch.device("cpu")) for rank in range(size)]
    os.close(descriptor)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                collectives[rank].connect(time_limit)
                found[rank] = function(collectives[rank])
        except BaseException as failure:
            found[rank] = failure
            for collective in collectives:
                collective.give_up()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.fixture
def ranks_as_threads() -> Callable[..., list[Any]]:
    return as_ranks


@pytest.fixture
def steps() -> Callable[..., list[Steps]]:
    """``steps(folder, size, **arguments)`` -> the results of each rank; with one rank, those of a single process."""

    def run(folder: Any, size: int, **arguments: Any) -> list[Steps]:
        given = {"max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 12, "dtype": "float32", **arguments}
        config = fit_positions(EngineConfig.from_args({"model": str(folder), "device": "cpu", **given}))
        if size == 1:
            with torch.inference_mode():
                return [compute(config, None)]
        return as_ranks(size, lambda collective: compute(config, collective))

    return run
