"""Sampling: distributions, cuts, penalties, seeds and log-probabilities."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from aiakq.errors import AiakqError
from aiakq.kernels.ops import Ops, sampling
from aiakq.kernels.ops.sampling import CANDIDATES, TorchSampler
from aiakq.runtime.executor import sampler
from aiakq.runtime.executor.sampler import SamplerRow, uniforms_at
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NOTHING_LEFT, NewSequence, SampledToken

VOCAB = 12
CPU_SAMPLER = Ops(torch.device("cpu"), torch.float32).sampler()


def row(prompt=(1, 2), outputs=(), vocab=VOCAB, seed=0, bad_words=(), logits_processors=(), **params) -> SamplerRow:
    limits = ModelLimits(vocab, 10**6, 10**6, max_logprobs=vocab)
    spec = admit("r", list(prompt), SamplingParams(seed=seed, **params), limits, bad_word_ids=bad_words)
    return SamplerRow(SequenceState(NewSequence(0, spec, list(outputs)), logits_processors), [])


def sample(logits: torch.Tensor, rows: list[SamplerRow]) -> list[SampledToken]:
    """Sample as an engine does, which resamples tokens that the candidates leave undecided."""
    output = sampler.sample(CPU_SAMPLER, logits, rows)
    results = output.collect()
    assert output.tokens.tolist() == [result.token for result in results]
    late = [at for at, result in enumerate(results) if result.resample]
    if late:
        again = [SamplerRow(rows[at].sequence, [], True) for at in late]
        for at, result in zip(late, sample(logits[late], again), strict=True):
            results[at] = result
    return results


def draws(logits: torch.Tensor, count: int, **params) -> torch.Tensor:
    """``count`` draws from one row of logits, each with its own seed."""
    vocab = len(logits)
    rows = [row(vocab=vocab, seed=seed, **params) for seed in range(count)]
    tokens = [s.token for s in sample(logits.repeat(count, 1), rows)]
    return torch.bincount(torch.tensor(tokens), minlength=vocab) / count


def test_greedy_takes_the_highest_logit():
    logits = torch.randn(3, VOCAB)
    results = sample(logits.clone(), [row(temperature=0)] * 3)
    assert [r.token for r in results] == logits.argmax(-1).tolist()
    assert results[0].logprob == pytest.approx(logits.log_softmax(-1)[0].max().item(), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    logits = torch.linspace(-2, 2, VOCAB)
    found = draws(logits, 20_000, temperature=temperature)
    wanted = (logits / temperature).softmax(-1)
    assert (found - wanted).abs().max() < 4 * math.sqrt(0.25 / 20_000)


@pytest.mark.parametrize(
    "params, kept",
    [
        ({"top_k": 3}, [9, 10, 11]),
        ({"top_k": 1}, [11]),
        ({"top_p": 0.6}, [10, 11]),
        ({"min_p": 0.4}, [10, 11]),
        ({"top_k": 4, "top_p": 0.6}, [10, 11]),
    ],
)
def test_cuts_keep_the_right_tokens_and_renormalize(params, kept):
    logits = torch.arange(VOCAB) * 0.7
    found = draws(logits, 8_000, **params)
    assert found.nonzero().flatten().tolist() == kept
    wanted = logits[kept].softmax(-1)
    assert (found[kept] - wanted).abs().max() < 0.03


@pytest.mark.parametrize("params", [{"top_p": 0.999}, {"top_k": CANDIDATES + 50}, {"min_p": 1e-9}])
def test_wide_cuts_over_a_large_vocabulary_use_the_full_sort(params):
    logits = torch.randn(CANDIDATES * 3) * 0.1
    rows = [row(vocab=len(logits), seed=seed, **params) for seed in range(200)]
    tokens = [s.token for s in sample(logits.repeat(200, 1), rows)]
    allowed = logits.topk(params.get("top_k", len(logits))).indices
    assert set(tokens) <= set(allowed.tolist())
    beyond = set(logits.topk(CANDIDATES).indices.tolist())
    assert set(tokens) - beyond, "tokens beyond the first candidates are drawn too"


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.randn(VOCAB)
    alone = sample(logits.repeat(1, 1), [row(seed=5)])[0].token
    crowd = sample(logits.repeat(6, 1), [row(seed=s) for s in (9, 5, 5, 1, 2, 3)])
    assert crowd[1].token == crowd[2].token == alone
    numbers = set(uniforms_at([5] * 1000, list(range(1000))))
    seeds = [5, 2**63 - 1, 5, 2**63, 5, 2**64 + 3] * 20
    some = uniforms_at(seeds, list(range(120)))
    assert set(some[::2]) <= numbers
    assert some == [uniforms_at([seed], [at])[0] for at, seed in enumerate(seeds)], "few rows as many"
    assert len(numbers) == 1000 and 0.45 < sum(numbers) / 1000 < 0.55


def test_penalties_match_their_formulas():
    logits = torch.linspace(-1, 1, VOCAB)
    penalized = row(
        prompt=(3,), outputs=(11, 11, 10), temperature=0, repetition_penalty=1.5, frequency_penalty=0.2,
        presence_penalty=0.1, logprobs=VOCAB,
    )  # fmt: skip
    wanted = logits.clone()
    for token in (3, 10, 11):
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    wanted[11] -= 0.2 * 2 + 0.1
    wanted[10] -= 0.2 + 0.1
    result = sample(logits.clone().unsqueeze(0), [penalized])[0]
    assert result.token == wanted.argmax().item()
    # Log-probabilities are the model's own, not the penalized ones.
    raw = logits.log_softmax(-1)
    assert result.logprob == pytest.approx(raw[result.token].item(), abs=1e-6)
    assert result.logprobs.chosen_rank == int((raw > raw[result.token]).sum()) + 1


def test_bias_allowed_ids_and_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    assert sample(logits.clone(), [row(temperature=0, logit_bias={"4": 100})])[0].token == 4
    assert sample(logits.clone(), [row(temperature=0, allowed_token_ids=[2])])[0].token == 2
    stops = {"temperature": 0, "stop_token_ids": [7], "min_tokens": 2}
    assert sample(logits.clone(), [row(**stops)])[0].token != 7
    assert sample(logits.clone(), [row(outputs=(1, 1), **stops)])[0].token == 7


def test_bad_words_are_forbidden_where_they_would_be_completed():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 5] = 5.0, 4.0
    forbidden = {"temperature": 0, "bad_words": [[7], [3, 4, 5]]}
    assert sample(logits.clone(), [row(**forbidden)])[0].token == 5
    assert sample(logits.clone(), [row(outputs=(3, 4), **forbidden)])[0].token not in (5, 7)
    assert sample(logits.clone(), [row(outputs=(4,), **forbidden)])[0].token == 5
    assert sample(logits.clone(), [row(prompt=(3, 4), **forbidden)])[0].token == 5, "only the output counts"


def test_logits_processors_see_the_tokens_and_change_the_logits():
    seen = []

    def two(outputs, logits):
        seen.append(list(outputs))
        logits[4] = 100.0
        return logits

    def three(prompt, outputs, logits):
        seen.append((list(prompt), list(outputs)))
        return torch.where(torch.arange(VOCAB) == 6, 200.0, logits)

    logits = torch.zeros(2, VOCAB)
    rows = [row(temperature=0, outputs=(8,), logits_processors=[two, three]), row(temperature=0)]
    results = sample(logits, rows)
    assert seen == [[8], ([1, 2], [8])]
    assert results[0].token == 6 and results[1].token == 0, "neighbours are not touched"
    assert results[0].logprob == pytest.approx(-math.log(VOCAB)), "log-probabilities are the model's own"


@pytest.mark.parametrize("returned", [torch.zeros(VOCAB + 1), torch.zeros(1), torch.zeros(1, VOCAB), None])
def test_a_logits_processor_that_returns_something_else_is_refused_by_name(returned):
    def shortened(outputs, logits):
        return returned

    with pytest.raises(AiakqError, match=r"shortened returns .*, a tensor of shape \[12\] is expected") as caught:
        sample(torch.zeros(1, VOCAB), [row(temperature=0, logits_processors=[shortened])])
    assert caught.value.id == "invalid_type" and "logits_processors" in str(caught.value)


def test_a_row_that_forbids_everything_fails_alone():
    logits = torch.randn(3, VOCAB)
    good = logits[0].argmax().item()
    rows = [
        row(temperature=0),
        row(allowed_token_ids=[7], bad_words=[[7]]),
        row(temperature=0, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1),
    ]
    results = sample(logits, rows)
    assert [result.error for result in results] == [None, NOTHING_LEFT, NOTHING_LEFT]
    assert results[0].token == good


class Allowing:
    """A row mask of given tokens."""

    num_words, failure = 1, None

    def __init__(self, *tokens: int) -> None:
        self._bits = sum(1 << token for token in tokens)

    def fill_mask(self, address: int) -> None:
        ctypes.c_uint32.from_address(address).value = self._bits


def test_only_tokens_that_every_mask_of_a_row_allows_are_sampled():
    logits = torch.arange(VOCAB).float().repeat(4, 1)
    rows = [row(temperature=0) for _ in range(4)]
    rows[1].masks = (Allowing(1, 4, 7),)
    rows[2].masks = (Allowing(1, 4, 7, 9), Allowing(1, 4, 8), Allowing(1, 4))
    rows[3].masks = (Allowing(1), Allowing(2))
    results = sample(logits, rows)
    assert [result.token for result in results[:3]] == [VOCAB - 1, 7, 4]
    assert results[3].error == NOTHING_LEFT


def test_a_gpu_is_waited_for_once_a_step(monkeypatch):
    """Of tensors without contents no number can be read: everything but the results is done without one."""
    waited = []

    def copies_on_host(values):
        def numbers():
            waited.append(values)
            return [torch.ones(len(values))]

        return numbers

    monkeypatch.setattr(sampling, "copies_on_host", copies_on_host)
    asked = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1, "top_k": 3, "min_p": 0.1},
        {"temperature": 0, "logprobs": 4},
        {"temperature": 0, "logit_bias": {"4": 1}, "allowed_token_ids": [2, 4]},
        {"temperature": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "stop_token_ids": [7], "min_tokens": 9},
    ]
    rows = [row(vocab=2000, outputs=(3, 3, 4), **params) for params in asked]
    with FakeTensorMode():
        logits = torch.empty(len(rows), 2000)
        for reading in (lambda x: x.sum().item(), lambda x: x[x > 0], torch.nonzero, torch.unique):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                reading(logits)
        output = sampler.sample(TorchSampler(CANDIDATES), logits, rows)
    assert not waited and output.tokens.shape == (7,), "and without the results, only on the device"
    results = output.collect()
    assert len(waited) == 1 and waited[0].shape == (7 * 6 + 2 * 4,)
    assert [len(r.logprobs.token_ids) if r.logprobs else 0 for r in results] == [0, 0, 0, 0, 5, 0, 0]


def test_row_that_is_not_finite_is_named_and_others_are_not_touched():
    logits = torch.randn(2, VOCAB)
    good = logits[1].argmax().item()
    logits[0, 3] = float("nan")
    results = sample(logits, [row(temperature=0), row(temperature=0)])
    assert results[0].error and results[1].error is None and results[1].token == good


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"n": 0},
        {"n": 2**31 + 1},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stop": ["x" * 257]},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {1: float("nan")}},
        {"min_tokens": 20},
        {"seed": 2**63},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1, True]},
        {"stop_token_ids": 5},
        {"stop_token_ids": list(range(129))},
        {"best_of": 0},
        {"best_of": 2, "n": 3},
        {"bad_words": [""]},
        {"bad_words": ["x" * 257]},
        {"bad_words": ["x"] * 129},
        {"bad_words": [1]},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"logits_processors": ["print"]},
        {"structured_outputs": 5},
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_name(wrong):
    from aiakq.errors import AiakqError

    with pytest.raises(AiakqError) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == next(iter(wrong)) and caught.value.http_status == 400
