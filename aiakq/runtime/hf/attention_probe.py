"""Checks that a model that runs through transformers gives the same results with paged attention.

Paged attention supports causal attention, sliding windows, chunks, softcaps and sinks. Anything else that a model
relies on (other arguments, masks, states of other layers) would silently be ignored. Every such model is therefore
compared with transformers' own attention when it is loaded, on two sequences in a batch, one of them in two chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences
from aiakq.runtime.models.interface import Model, whole_logits
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import Chunk, NewSequence, StepBatch

#: Lengths of both sequences, and the number of tokens of the first one in the first step.
LENGTHS, FIRST_CHUNK = (40, 23), 17
PAGE_SIZE = 16
#: Maximum difference of any log-probability in float32, in nats: only the order of summation differs.
FLOAT32_MAX = 0.02
#: Maximum mean difference of log-probabilities of 16-bit models, in nats: a constant plus a multiple of the difference
#: between two attention implementations of transformers (the effect of rounding in this model), and an upper limit of
#: the sum (docs/log.md).
NOISE_OFFSET, NOISE_FACTOR, NOISE_CAP = 0.03, 4.0, 0.5
#: The same for models that have only one attention implementation in transformers.
WITHOUT_NOISE = 0.1
#: Whether query q attends to key k, in transformers' mask interface.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionComparison:
    """Difference of log-probabilities from transformers' own attention, and its allowed maximum, in nats."""

    measured: float
    allowed: float

    @property
    def is_same(self) -> bool:
        return self.measured <= self.allowed  # false for NaN


def compare(model: Model, hf: Any, device: torch.device, rounds: bool) -> AttentionComparison:
    """Compare ``model``, which is ``hf`` with paged attention, to ``hf`` with transformers' attention.

    In float32 the maximum difference counts. With 16-bit dtypes, or if the model ``rounds`` activations to 8 bits, the
    maximum is dominated by chance, for example if a token is routed to another expert, so the mean over positions and
    tokens counts.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    with torch.inference_mode():
        paged = torch.cat([each.log_softmax(-1) for each in _paged_logits(model, prompts, device)])
        eager = _own_logprobs(hf, "eager", prompts, device)
        differences = (paged - eager).abs()
        if hf.dtype == torch.float32 and not rounds:
            return AttentionComparison(differences.max().item(), FLOAT32_MAX)
        allowed = WITHOUT_NOISE
        with suppress(ValueError):  # the model does not support this implementation
            noise = (_own_logprobs(hf, "sdpa", prompts, device) - eager).abs().mean().item()
            allowed = min(NOISE_OFFSET + NOISE_FACTOR * noise, NOISE_CAP)
        return AttentionComparison(differences.mean().item(), allowed)


def _own_logprobs(hf: Any, name: str, prompts: list[list[int]], device: torch.device) -> Tensor:
    """Return log-probabilities [T, V] float32 of all prompts with transformers' attention ``name``.

    Raises ValueError if ``hf`` does not support it.
    """
    with own_attention(hf, name):
        logits = [hf(input_ids=torch.tensor([each], device=device), use_cache=False).logits[0] for each in prompts]
    return torch.cat(logits).float().log_softmax(-1)


@contextmanager
def own_attention(hf: Any, name: str) -> Iterator[None]:
    """Switch ``hf`` to transformers' attention ``name`` temporarily."""
    before = hf.config._attn_implementation
    hf.set_attn_implementation(name)
    try:
        yield
    finally:
        hf.set_attn_implementation(before)


def _paged_logits(model: Model, prompts: list[list[int]], device: torch.device) -> list[Tensor]:
    """Return the logits [T, V] float32 of every position of each prompt."""
    pages = [-(-length // PAGE_SIZE) for length in LENGTHS]
    runner = Runner(model, sum(pages) + 1, PAGE_SIZE, device)
    running = RunningSequences(len(prompts), max(pages))
    # With prompt_logprobs, logits are computed at every position.
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    new = [
        NewSequence(slot, RequestSpec(f"probe {slot}", prompt, params, max_tokens=1, seed=0))
        for slot, prompt in enumerate(prompts)
    ]
    first_pages, second_pages = list(range(1, pages[0] + 1)), list(range(pages[0] + 1, sum(pages) + 1))
    steps = [
        StepBatch(
            [], [], new, [Chunk(0, 0, FIRST_CHUNK, first_pages, False), Chunk(1, 0, LENGTHS[1], second_pages, True)]
        ),
        StepBatch([], [], [], [Chunk(0, FIRST_CHUNK, LENGTHS[0] - FIRST_CHUNK, [], True)]),
    ]
    logits_of: list[list[Tensor]] = [[], []]
    for step in steps:
        sequences = running.update(step, {})
        prepared = runner.prepare(step.chunks, sequences, running)
        logits = whole_logits(runner.forward(prepared.model_input)).clone()
        for chunk, rows in zip(step.chunks, prepared.logit_rows, strict=True):
            logits_of[chunk.slot].append(logits[rows.start : rows.stop])
    return [torch.cat(each) for each in logits_of]


def is_mask_of(mask: MaskFunction, specs: Iterable[AttentionSpec], chunk: int) -> bool:
    """Whether ``mask`` is a causal mask, or the sliding window or chunks of one of ``specs``, at the positions tested.

    chunk  a number of positions at whose multiples the mask may change; 0 for none.
    """
    limits = {(None, None), *((spec.sliding_window, spec.chunk_size) for spec in specs)}
    windows = {window for window, _ in limits}
    queries, keys = _positions(max([chunk, *(window or 0 for window in windows)]), windows, chunk)
    zero = torch.zeros((), dtype=torch.long)
    # transformers' functions are written for vmap: scalars, or tensors that broadcast.
    allowed = torch.as_tensor(mask(zero, zero, queries, keys)).expand(len(queries))
    for window, size in limits:
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        if size is not None:
            seen &= keys // size == queries // size
        if torch.equal(allowed, seen):
            return True
    return False


def _positions(longest: int, windows: set[int | None], chunk: int) -> tuple[Tensor, Tensor]:
    """Return query and key positions to test: spread over several times ``longest``, and at the boundaries."""
    end = 4 * max(longest, 64)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(0, end, (4096,), generator=generator)
    keys = (torch.rand(4096, generator=generator) * (queries + 1)).long()
    distances = [0, -1, 1, *(window + step for window in windows if window for step in (-2, -1, 0, 1))]
    pairs = [(queries, keys), *((queries, queries - distance) for distance in distances)]
    if chunk:
        pairs += [(queries, queries // chunk * chunk + step) for step in (-1, 0)]
    q, k = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    inside = (k >= 0) & (k < end)
    return q[inside], k[inside]
