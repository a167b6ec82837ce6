"""Native sampling gives the same tokens as torch with a full sort, on every instruction set."""

from __future__ import annotations

import math
import random

import pytest
import torch

from aiakq.kernels.cpu.sampling import NativeSampler
from aiakq.kernels.ops.penalizing import PenalizingSampler
from aiakq.kernels.ops.sampling import (
    ModifiedLogits,
    SampleOutcome,
    SampleRow,
    TokenMasks,
    TorchSampler,
)
from aiakq.runtime.executor import sampler
from aiakq.runtime.executor.output_reader import prompt_logprobs
from aiakq.runtime.executor.penalties import Penalties, penalize
from aiakq.runtime.executor.row_transforms import Outputs
from aiakq.runtime.executor.sampler import SamplerColumns, SamplerRow
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NewSequence, SampledToken


def sampler_row(vocab: int, seed: int = 0, outputs=(), **params) -> SamplerRow:
    limits = ModelLimits(vocab, 10**6, 10**6, max_logprobs=vocab)
    spec = admit("r", [0], SamplingParams(seed=seed, **params), limits)
    return SamplerRow(SequenceState(NewSequence(0, spec, list(outputs))), [])


def sample(logits: torch.Tensor, sequences: list[SamplerRow]) -> list[SampledToken]:
    return sampler.sample(NativeSampler(), logits, sequences).collect()


def both(logits: torch.Tensor, sequences: list[SamplerRow]) -> tuple[list, list]:
    """Native samples, and the reference's with the whole vocabulary sorted."""
    reference = TorchSampler(candidates=10**9)
    return sample(logits, sequences), sampler.sample(reference, logits, sequences).collect()


def some_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab) * {"flat": 0.1, "peaked": 4, "ties": 2, "far": 3, "lower": 1}[kind]
    if kind == "ties":
        logits = logits.round()
    if kind == "far":
        logits += 1e4
    if kind == "lower":
        logits = logits.bfloat16().float() - 50
    return logits


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "far", "lower"])
@pytest.mark.parametrize("vocab", [1, 5, 16, 300, 5003])
def test_tokens_equal_those_of_a_full_sort(isa, kind, vocab):
    torch.manual_seed(vocab)
    draw = random.Random(vocab)
    rows = 120
    logits = some_logits(kind, rows, vocab)
    sequences = [
        sampler_row(
            vocab,
            seed=row,
            temperature=draw.choice([0, 0.3, 0.7, 1.0, 1.9]),
            top_p=draw.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.999]),
            top_k=draw.choice([0, 0, 1, 3, 50, vocab, vocab + 7, 1500]),
            min_p=draw.choice([0.0, 0.0, 1e-9, 0.02, 0.3, 1.0]),
        )
        for row in range(rows)
    ]
    ours, oracle = both(logits, sequences)
    for row, (mine, theirs) in enumerate(zip(ours, oracle, strict=True)):
        assert mine.token == theirs.token, sequences[row].sampling
        assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-6 + 1e-7 * abs(logits[row]).max().item())


@pytest.mark.parametrize("params", [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {}, {"top_k": 3000}])
@pytest.mark.parametrize("order", ["rising", "falling", "equal"])
def test_vocabulary_orders_that_are_hard_for_a_rising_threshold(isa, params, order):
    vocab = 9000
    row = torch.linspace(-3, 3, vocab)
    row = {"rising": row, "falling": row.flip(0), "equal": torch.full((vocab,), 1.5)}[order]
    sequences = [sampler_row(vocab, seed=seed, **params) for seed in range(40)]
    ours, oracle = both(row.repeat(40, 1), sequences)
    different = [(a.token, b.token) for a, b in zip(ours, oracle, strict=True) if a.token != b.token]
    # Where all weights are equal, the last bit of a sum decides which of two neighbours it is.
    assert not different or (order == "equal" and all(abs(a - b) <= 1 for a, b in different)), different


def test_greedy_takes_the_first_of_equal_logits(isa):
    logits = torch.zeros(3, 777)
    logits[0, [5, 300, 776]] = 2.0
    logits[1, 776] = 1.0
    tokens = [s.token for s in sample(logits, [sampler_row(777, temperature=0)] * 3)]
    assert tokens == [5, 776, 0]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_masked_tokens_are_never_sampled(isa, params):
    vocab, allowed = 700, [3, 450, 699]
    sequences = [sampler_row(vocab, seed=seed, allowed_token_ids=allowed, **params) for seed in range(60)]
    tokens = {s.token for s in sample(torch.randn(60, vocab), sequences)}
    assert tokens <= set(allowed) and len(tokens) > 1


def test_uniform_numbers_at_the_ends_of_their_range(isa):
    logits = torch.full((4, 100), float("-inf"))
    logits[:, [20, 60]] = 1.0
    rows = [SampleRow(temperature=1.0, top_k=top_k) for top_k in (0, 0, 90, 90)]
    assert NativeSampler()(logits, rows, [0.0, 1 - 2**-53] * 2).tokens.tolist() == [20, 60, 20, 60]


@pytest.mark.parametrize("vocab", [9, 64, 3001])
def test_log_probabilities_ranks_and_top_tokens_match_torch(isa, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab) * 3
    logits[1] = logits[1].round()
    counts = [0, 1, 5, 8, -1, 3]
    sequences = [sampler_row(vocab, seed=i, logprobs=count, top_p=0.9) for i, count in enumerate(counts)]
    ours, oracle = both(logits, sequences)
    exact = logits.double().log_softmax(-1)
    for row, (mine, theirs) in enumerate(zip(ours, oracle, strict=True)):
        assert mine.token == theirs.token
        assert mine.logprobs.chosen_rank == theirs.logprobs.chosen_rank
        ids = mine.logprobs.token_ids
        count = vocab if counts[row] == -1 else counts[row]
        assert ids == [mine.token, *logits[row].sort(descending=True, stable=True).indices[:count].tolist()]
        assert torch.allclose(torch.tensor(mine.logprobs.logprobs).double(), exact[row, ids], atol=3e-6)
    prompt = prompt_logprobs(NativeSampler(), logits, [0, 1, 2, 3, 4, 5], 4)()
    for row, found in enumerate(prompt):
        assert found.token_ids[0] == row and found.logprobs[0] == pytest.approx(exact[row, row].item(), abs=3e-6)
        assert found.chosen_rank == int((logits[row] > logits[row, row]).sum()) + 1
        assert found.token_ids[1:] == logits[row].sort(descending=True, stable=True).indices[:4].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, 99])
def test_a_non_finite_row_is_reported_and_others_are_unaffected(isa, bad, place):
    logits = torch.randn(3, 100)
    sequences = [sampler_row(100, seed=i, top_k=10, logprobs=4) for i in range(3)]
    expected = sample(logits.clone(), sequences)
    logits[1, place] = bad
    found = sample(logits, sequences)
    assert found[1].error
    assert [found[0], found[2]] == [expected[0], expected[2]]
    values = prompt_logprobs(NativeSampler(), logits, [1, 2, 3], 4)()[1].logprobs
    assert not any(math.isfinite(value) for value in values)
    logits[1] = float("-inf")
    assert sample(logits, sequences)[1].error


def test_a_row_samples_the_same_token_in_any_batch_and_on_any_number_of_threads(isa, threads):
    logits = torch.randn(33, 4099)
    sequences = [sampler_row(4099, seed=i, temperature=0.8, top_p=0.95) for i in range(33)]
    crowd = sample(logits, sequences)
    alone = [sample(logits[i : i + 1], [sequences[i]])[0] for i in range(33)]
    threads(3)
    assert sample(logits, sequences) == crowd == alone


def test_sampling_does_not_modify_the_logits(isa):
    logits = torch.randn(2, 500)
    kept = logits.clone()
    sample(logits, [sampler_row(500, outputs=(4, 4), repetition_penalty=1.3, logit_bias={"7": 9}), sampler_row(500)])
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("vocab", [1003, 4096])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.2}, {"temperature": 0.0}], ids=str)
def test_masks_allow_the_same_tokens_as_in_torch(isa, cut, vocab):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, vocab, generator=generator)
    bits = torch.randint(-(2**31), 2**31, (4, vocab // 32 + 1), generator=generator).int()
    bits[1] &= torch.randint(-(2**31), 2**31, bits[1].shape, generator=generator).int()
    bits[2] = 0
    bits[3] = 0
    bits[3, 7] = 1 << 30
    masks = TokenMasks([0, 2, 4, 5], bits)
    modified = ModifiedLogits([1, 2], logits[[1, 2]].flip(1))
    rows = [SampleRow(**{"temperature": 1.0, "num_logprobs": 2} | cut) for _ in range(6)]
    native = NativeSampler()(logits, rows, [0.3] * 6, modified, masks).collect()
    reference = TorchSampler(vocab)(logits, rows, [0.3] * 6, modified, masks).collect()
    assert native.failed == reference.failed == {4: SampleOutcome.NOTHING_LEFT}
    for row in (0, 1, 2, 3, 5):
        assert native.tokens[row] == reference.tokens[row]
        assert native.ranks[row] == reference.ranks[row] and native.top[row].ids == reference.top[row].ids
        assert native.logprobs[row] == pytest.approx(reference.logprobs[row], abs=1e-5)
    assert native.tokens[5] == 7 * 32 + 30
    for line, row in enumerate(masks.rows[:2]):
        assert bits[line, native.tokens[row] // 32] >> (native.tokens[row] % 32) & 1


def test_the_parameters_of_the_last_call_are_not_those_of_the_next():
    logits = torch.randn(2, 300)
    sampler = NativeSampler()
    greedy, drawn = [SampleRow(), SampleRow(num_logprobs=3)], [SampleRow(temperature=1.0, top_p=0.5), SampleRow()]
    alone = [NativeSampler()(logits, rows, [0.7, 0.7]).collect() for rows in (greedy, drawn)]
    assert [sampler(logits, rows, [0.7, 0.7]).collect() for rows in (greedy, drawn, greedy, greedy, drawn)] == [
        alone[index] for index in (0, 1, 0, 0, 1)
    ]
    masked = sampler(logits, drawn, [0.7, 0.7], None, TokenMasks([1], torch.tensor([[8] + [0] * 9]).int())).collect()
    assert masked.tokens[1] == 3 and sampler(logits, drawn, [0.7, 0.7]).collect() == alone[1]


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.4, "presence_penalty": 1.1},
    {},
]


class Refusing(NativeSampler):
    """A sampler that counts nothing itself: penalties are applied to its logits beforehand, by torch."""

    new_penalties = None  # type: ignore[assignment]


def penalized_sequences(vocab: int, prompts: list[list[int]]) -> list[SequenceState]:
    limits = ModelLimits(vocab, 10**6, 10**6, max_logprobs=vocab)
    params = [SamplingParams(seed=row, logprobs=0, **PENALTIES[row % 4]) for row in range(len(prompts))]
    specs = [admit("r", *pair, limits) for pair in zip(prompts, params, strict=True)]
    return [SequenceState(NewSequence(0, spec, [])) for spec in specs]


@pytest.mark.parametrize("kept", [False, True])
def test_penalties_give_the_tokens_of_torch(isa, kept):
    """Over more steps than there is room for tokens, of which some are repeated, and with one in other rows."""
    vocab, draw = 200, random.Random(5)
    prompts = [[draw.randrange(vocab) for _ in range(size)] for size in (1, 30, 90, 5, 2, 60, 7, 8)]
    ours, theirs = penalized_sequences(vocab, prompts), penalized_sequences(vocab, prompts)
    native, torch_first = NativeSampler(), Refusing()
    assert isinstance(native, PenalizingSampler)
    columns = SamplerColumns([SamplerRow(one, []) for one in ours], kept)
    for step in range(90):
        logits = torch.randn(len(prompts), vocab, generator=torch.Generator().manual_seed(step)).round(decimals=1)
        if not kept or step % 20 == 7:
            rows = SamplerColumns([SamplerRow(one, []) for one in ours])
        else:
            rows = columns
            rows.advance([len(one.token_ids) for one in ours])
        found = sampler.sample(native, logits, rows)
        if step % 10 == 3:  # the same step again, as after a lack of memory
            found = sampler.sample(native, logits, rows)
        tokens = found.results.tokens
        expected = sampler.sample(torch_first, logits, [SamplerRow(one, []) for one in theirs])
        assert tokens == expected.results.tokens, step
        assert found.results.ranks == expected.results.ranks
        for mine, their, token in zip(ours, theirs, tokens, strict=True):
            mine.token_ids.append(token)
            their.token_ids.append(token)


@pytest.mark.parametrize("params", PENALTIES[:3])
@pytest.mark.parametrize("vocab", [20, 333])
def test_penalized_logits_are_those_of_torch_bit_for_bit(isa, params, vocab):
    """The library leaves them in its scratch memory, behind two lists of candidates."""
    prompt = [1, 2, 3, 3, 19, vocab + 4]  # a prompt may have tokens without logits
    spec = admit("r", prompt, SamplingParams(**params), ModelLimits(vocab + 9, 10**6, 10**6))
    row = SamplerRow(SequenceState(NewSequence(0, spec, [4, 4, 3, 7, 4])), [])
    logits = torch.randn(1, vocab)
    native = NativeSampler()
    sampler.sample(native, logits, [row])
    start = 2 * 8 * (-(-vocab // 8) * 8 + 64)
    found = native._scratch[start : start + 4 * vocab].view(torch.float32)
    expected = torch.cat([logits, torch.zeros(1, 9)], 1)
    penalize(expected, {0: Penalties.of(spec).occurred(Outputs([4, 4, 3, 7, 4], 0))})
    assert torch.equal(found, expected[0, :vocab])
    assert not torch.equal(found, logits[0])
