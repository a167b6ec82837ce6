"""Whether a model that runs through transformers computes with paged attention what its authors meant.

Paged attention knows causal attention, windows, chunks, soft caps and sinks. What else a model asks of it would be left
out without a word: arguments, masks, states of other layers. So every such model is compared with transformers' own
attention when it is loaded: two sequences side by side, one of them in two chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.engine.messages import RequestSpec
from aiakq.runtime.engine.records import Chunk, NewSequence, StepBatch
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences
from aiakq.runtime.models.decoder import Model, whole_logits
from aiakq.runtime.sampling_params import SamplingParams

#: Tokens of both sequences, and how many of the first come in the first step.
LENGTHS, FIRST_CHUNK = (40, 23), 17
PAGE_SIZE = 16
#: Nats that any log-probability may differ by in float32: sums are taken in another order.
FLOAT32_MAX = 0.02
#: Nats that log-probabilities of 16-bit models may differ by on average: so many, and so many times what transformers'
#: own two attentions differ by, which is how far rounding carries in this model; but at most so many (docs/log.md).
NOISE_OFFSET, NOISE_FACTOR, NOISE_CAP = 0.03, 4.0, 0.5
#: The same for models that have only one attention in transformers.
WITHOUT_NOISE = 0.1
#: True if query q may look at key k; transformers' interface of masks.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionComparison:
    """How far log-probabilities are from those of transformers' own attention, and how far they may be, in nats."""

    found: float
    allowed: float

    @property
    def is_same(self) -> bool:
        return self.found <= self.allowed  # not if NaN


def compare(model: Model, hf: Any, device: torch.device, rounds: bool) -> AttentionComparison:
    """Compare ``model``, which is ``hf`` with paged attention, with ``hf`` and its own.

    In float32 the largest difference counts. In 16 bits, or if the model ``rounds`` activations to 8 bits, that is a
    matter of chance, most of all where a token goes to another expert, so the mean over positions and words counts.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    with torch.inference_mode():
        ours = torch.cat([each.log_softmax(-1) for each in _paged_logits(model, prompts, device)])
        eager = _own_logprobs(hf, "eager", prompts, device)
        differences = (ours - eager).abs()
        if hf.dtype == torch.float32 and not rounds:
            return AttentionComparison(differences.max().item(), FLOAT32_MAX)
        allowed = WITHOUT_NOISE
        with suppress(ValueError):  # transformers: the model has no such attention
            noise = (_own_logprobs(hf, "sdpa", prompts, device) - eager).abs().mean().item()
            allowed = min(NOISE_OFFSET + NOISE_FACTOR * noise, NOISE_CAP)
        return AttentionComparison(differences.mean().item(), allowed)


def _own_logprobs(hf: Any, name: str, prompts: list[list[int]], device: torch.device) -> Tensor:
    """[T, V] float32 over all prompts with transformers' attention ``name``. Raises ValueError if ``hf`` lacks it."""
    with own_attention(hf, name):
        logits = [hf(input_ids=torch.tensor([each], device=device), use_cache=False).logits[0] for each in prompts]
    return torch.cat(logits).float().log_softmax(-1)


@contextmanager
def own_attention(hf: Any, name: str) -> Iterator[None]:
    """Let ``hf`` use transformers' attention ``name``."""
    before = hf.config._attn_implementation
    hf.set_attn_implementation(name)
    try:
        yield
    finally:
        hf.set_attn_implementation(before)


def _paged_logits(model: Model, prompts: list[list[int]], device: torch.device) -> list[Tensor]:
    """Logits [T, V] float32 of every position of each prompt."""
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
    found: list[list[Tensor]] = [[], []]
    for step in steps:
        sequences = running.update(step, {})
        prepared = runner.prepare(step.chunks, sequences, running)
        logits = whole_logits(runner.forward(prepared.model_input)).clone()
        for chunk, rows in zip(step.chunks, prepared.logit_rows, strict=True):
            found[chunk.slot].append(logits[rows.start : rows.stop])
    return [torch.cat(each) for each in found]


def is_mask_of(mask: MaskFunction, specs: Iterable[AttentionSpec], chunk: int) -> bool:
    """Whether ``mask`` is causal attention, or the window or the chunks of one of ``specs``, as far as positions can
    be tried.

    chunk  a number of positions at whose multiples something else could happen; 0: none.
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
    """Pairs of a query and a key: everywhere up to several times ``longest``, and at the borders."""
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
