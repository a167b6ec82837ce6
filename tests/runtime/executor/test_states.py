"""States of recurrent layers: each token is computed from the state before it, whatever happens to the sequence."""

from __future__ import annotations

import random

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.kernels.ops import sampling
from aiakq.kernels.recurrent_types import HybridCache, States, paged_tensors
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.executor import kv_cache
from aiakq.runtime.executor.kv_cache import kv_bytes_per_page, state_bytes
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.executor.states import StateRows, states_per_sequence
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import Chunk, NewSequence

PAGE = 4
PAGES = 10


class Running:
    """A sequence in slot 2 whose chunks are allocated one after the other."""

    def __init__(self, caching: bool = True, num_drafts: int = 0) -> None:
        self.rows = StateRows(PAGES, PAGE, num_slots=3, caching=caching, num_drafts=num_drafts)
        spec = RequestSpec("one", list(range(20)), SamplingParams(), max_tokens=9, seed=0)
        self.state = SequenceState(NewSequence(2, spec))
        self.state.pages = [5, 6, 7, 8]
        self.first_row = (PAGES if caching else 1) + 2 * states_per_sequence(num_drafts)

    def chunk(self, first: int, count: int, samples: bool, drafts: int = 0) -> tuple[int, dict[int, int]]:
        """Return the row that a chunk reads, and the position of the state written to each row."""
        chunk = Chunk(2, first, count + drafts, [], samples, drafts=[0] * drafts)
        context = self.rows.context([chunk], [self.state])
        saves = {row: first + token + 1 for token, row in context.saves[0]}
        assert len(saves) == len(context.saves[0]) and context.sources[0] not in saves, "what is read stays"
        return context.sources[0], saves

    def own(self, saves: dict[int, int]) -> dict[int, int]:
        """Return position -> row of the writes, without those to rows of pages."""
        return {position: row for row, position in saves.items() if row >= self.first_row}


def test_chunks_read_the_states_that_earlier_chunks_wrote():
    running = Running()
    source, saves = running.chunk(0, 6, samples=False)
    assert source == 0 and saves == {5: 4, running.own(saves)[6]: 6}, "the page that was filled"
    at_6 = running.own(saves)[6]
    source, saves = running.chunk(6, 7, samples=True)
    own = running.own(saves)
    assert source == at_6 and saves == {6: 8, 7: 12, own[12]: 12, own[13]: 13}
    # The sampled token was rejected after the next step had been submitted.
    source, later = running.chunk(13, 1, samples=True)
    assert source == own[13] and own[12] not in later
    source, again = running.chunk(12, 1, samples=True)
    assert source == own[12] and running.own(again)[13] != source
    # A step that ran out of memory runs again.
    assert running.chunk(13, 1, samples=True)[0] == running.own(again)[13]
    assert running.chunk(13, 1, samples=True)[0] == running.own(again)[13]


def test_a_chunk_goes_on_after_whatever_draft_tokens_were_accepted():
    draw = random.Random(5)
    running = Running(caching=False, num_drafts=3)
    running.state.pages = list(range(100))
    _, own = running.chunk(0, 5, samples=True)
    first = 5
    for _ in range(100):
        drafts, again = draw.randrange(4), draw.randrange(3) == 0
        count = 1 + (again and first - 1 in own.values())  # of two, if a token is sampled again
        first -= count - 1
        for _ in range(1 + (draw.randrange(4) == 0)):  # a step that ran out of memory runs again
            source, saves = running.chunk(first, count, samples=True, drafts=drafts)
            assert own[source] == first
        own = {**own, **saves}
        first += count + draw.randrange(drafts + 1)
        assert first in own.values() and running.rows.last_position(running.state, first) == first


def test_sequences_start_after_pages_that_other_sequences_filled():
    assert Running().chunk(8, 3, samples=True)[0] == 6
    with pytest.raises(AssertionError, match="is not stored"):
        Running().chunk(9, 1, samples=True)
    with pytest.raises(AssertionError, match="is not stored"):
        Running(caching=False).chunk(8, 1, samples=True)
    source, saves = Running(caching=False).chunk(0, 8, samples=False)
    assert source == 0 and list(saves.values()) == [8], "no sequence may start after a page"


@pytest.mark.parametrize(
    ("architecture", "kinds", "ahead"),
    [("Lfm2", {States, tuple}, False), ("Lfm2", {States, tuple}, True), ("FalconH1", {HybridCache}, True)],
)
def test_answers_do_not_depend_on_what_happens_to_a_sequence(architecture, kinds, ahead, tiny_model, monkeypatch):
    """Preemption, cached prefixes, reused slots, steps that run out of memory, and resampled tokens."""
    monkeypatch.setenv("AIAKQ_KERNELS", "cpu,sampling=torch")
    folder = str(tiny_model(f"{architecture}ForCausalLM"))
    draw = random.Random(3)
    shared = [draw.randrange(3, 320) for _ in range(10)]
    prompts = [shared + [draw.randrange(3, 320) for _ in range(at % 5)] for at in range(9)]
    given = [{"prompt_token_ids": [*prompt, at]} for at, prompt in enumerate(prompts, 3)]
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=at, max_tokens=6 + at, logprobs=2) for at in range(9)]
    common = {"dtype": "float32", "max_model_len": 64}
    calm = LLM(folder, enable_prefix_caching=False, **common)
    expected = [answer.outputs for answer in calm.generate(given, params, use_tqdm=False)]

    monkeypatch.setattr(sampling, "CANDIDATES", 2)
    llm = LLM(
        folder,
        block_size=4,
        num_gpu_blocks_override=14,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        async_scheduling=ahead,
        enforce_eager=True,
        **common,
    )
    last = llm.engine.executor.runner.model.blocks[-1]
    compute, calls, again = last.mlp.__call__, [], []

    def sometimes(x):
        calls.append(len(x))
        if len(calls) % 7 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(x)

    sometimes.input_layout = last.mlp.input_layout
    last.mlp = sometimes
    inner = Sequence.resample
    monkeypatch.setattr(Sequence, "resample", lambda sequence: (again.append(sequence.id), inner(sequence))[1])
    for _ in range(2):
        assert [answer.outputs for answer in llm.generate(given, params, use_tqdm=False)] == expected
        llm.engine.check()
    stats = llm.engine.stats
    assert stats.preemptions and stats.prefix_hits and again and len(calls) > 14
    caches = llm.engine.executor.runner.caches
    taken = sum(tensor.numel() * tensor.element_size() for cache in caches for tensor in cache)
    model = llm.engine.executor.runner.model
    assert {type(cache) for cache in caches} == kinds
    # The row of page 0 is the zero state.
    counted = (
        14 * kv_bytes_per_page(model, llm.config.cache) + state_bytes(model, llm.config.scheduler) - model.state_bytes()
    )
    assert taken == counted


def test_clearing_pages_leaves_states_as_they_are():
    pages, states = torch.ones(4, 2), torch.ones(3, 5)
    cache = HybridCache.of([pages], [states])
    assert [each is pages for each in paged_tensors(cache)] == [True]
    assert isinstance(cache.states, States) and paged_tensors(cache.states) == ()
    assert paged_tensors((pages, states)) == (pages, states)


def test_states_that_do_not_fit_into_memory_are_reported(tiny_model, monkeypatch):
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 200 * 2**20)
    with pytest.raises(AiakqError, match=r"or --max-num-seqs, whose states take 0\.3 GiB"):
        LLM(str(tiny_model("Mamba2ForCausalLM")), dtype="float32", max_num_seqs=2000)
