"""SampledStep: rows of draft tokens are sampled as single rows are, and planted bugs show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.runtime.executor import sampled_step
from aiakq.runtime.executor.logits_modifier import LogitsModifier
from aiakq.runtime.executor.sampled_step import SampledStep
from aiakq.runtime.executor.sampler import SamplerRow
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import Chunk, NewSequence
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.matcher import GrammarMatcher

#: One per letter; the last one ends the text.
TOKENS = [*(bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz "), b"<end>"]
END = len(TOKENS) - 1
CPU_SAMPLER = Ops(torch.device("cpu"), torch.float32).sampler()
NUM_DRAFTS = 5
#: What the rows of the requests differ by: random numbers; penalties; words; masks.
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
    {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {7: 4.0}},
    {"temperature": 1.0, "seed": 3, "allowed_token_ids": [0, 1, 2], "stop_token_ids": [0], "min_tokens": 3},
    {"temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "([a-c][x-z]){9}"}},
    {"temperature": 0, "structured_outputs": {"regex": "[ab][cd][ef][gh][ij][kl][mn]"}},
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(TOKENS, [END]).resized(len(TOKENS), [END]))


def state(compiler: GrammarCompiler, asked: dict[str, Any], outputs: list[int]) -> SequenceState:
    limits = ModelLimits(len(TOKENS), 10**6, 10**6, max_logprobs=len(TOKENS))
    spec = admit("r", [4, 5, 4], SamplingParams(**asked), limits)
    made = SequenceState(NewSequence(0, spec, outputs))
    if spec.grammar is not None:
        made.masks = (compiler.matcher_or_failed(spec.grammar, outputs),)
    return made


def sampled(sequences: list[SequenceState], drafts: list[list[int]], logits: list[Tensor]) -> list[list[Any]]:
    """What a step samples for ``sequences``: for each, the tokens with their log-probabilities."""
    chunks, rows, first = [], [], 0
    for slot, (sequence, own) in enumerate(zip(sequences, drafts, strict=True)):
        chunks.append(Chunk(slot, len(sequence.token_ids) - 1, 1 + len(own), [], True, drafts=own))
        rows.append(range(first, first + 1 + len(own)))
        first += 1 + len(own)
    step = SampledStep(chunks, sequences)
    step.take_logits(torch.cat(logits), rows)
    step.launch_sampler(CPU_SAMPLER)
    return [
        [(one.token, one.logprob, one.logprobs, one.ends, one.error) for one in result.sampled]
        for result in step.results().chunks
    ]


def differences(compiler: GrammarCompiler) -> list[tuple[int, int]]:
    """The requests and numbers of right draft tokens with which a step does not sample what single rows give."""
    draw = torch.Generator().manual_seed(0)
    logits = [torch.randn(NUM_DRAFTS + 1, len(TOKENS), generator=draw) for _ in REQUESTS]
    single: list[list[Any]] = [[] for _ in REQUESTS]
    for at in range(NUM_DRAFTS + 1):
        sequences = [
            state(compiler, asked, [one[0] for one in known]) for asked, known in zip(REQUESTS, single, strict=True)
        ]
        found = sampled(sequences, [[] for _ in REQUESTS], [own[at : at + 1] for own in logits])
        for known, new in zip(single, found, strict=True):
            known += new
    assert not any(error for known in single for *_, error in known)
    wrong = []
    for num_right in range(NUM_DRAFTS + 1):
        drafts = [[one[0] for one in known[:NUM_DRAFTS]] for known in single]
        for own in drafts:
            own[num_right:] = [(token + 1) % END for token in own[num_right:]]
        found = sampled([state(compiler, asked, []) for asked in REQUESTS], drafts, logits)
        for index, (known, new) in enumerate(zip(single, found, strict=True)):
            if new != known[: num_right + 1]:
                wrong.append((index, num_right))
    return wrong


def test_rows_of_draft_tokens_are_sampled_as_single_rows_are(compiler):
    assert differences(compiler) == []


Patch = Callable[[object, str, Any], None]


def uniform_number_of_the_wrong_row(patch: Patch) -> None:
    """Every row of a sequence gets the random number of its first row."""

    def init(self: SamplerRow, *arguments: Any) -> None:
        real(self, *arguments)
        self.position = len(self.sequence.token_ids)

    real = SamplerRow.__init__
    patch(SamplerRow, "__init__", init)


def mask_of_the_first_row(patch: Patch) -> None:
    """The grammar is not advanced by draft tokens."""
    patch(GrammarMatcher, "after", lambda self, draft: self)


def mask_of_the_row_before(patch: Patch) -> None:
    """The grammar is advanced by one draft token less than there are."""

    def init(self: SamplerRow, sequence: SequenceState, drafts: list[int], resamples: bool, masks: Any) -> None:
        real(self, sequence, drafts, resamples, masks)
        own = rows.setdefault(id(sequence), [])
        self.masks = own[-1] if drafts and own else masks
        own.append(masks)

    rows: dict[int, list[Any]] = {}
    real = SamplerRow.__init__
    patch(SamplerRow, "__init__", init)


def penalties_of_the_first_row(patch: Patch) -> None:
    """Draft tokens do not count as output."""
    real = LogitsModifier.apply
    patch(LogitsModifier, "apply", lambda self, values, tokens, drafts: real(self, values, tokens, []))


def logits_of_the_wrong_row(patch: Patch) -> None:
    """The logits of the rows of a step are one row too early."""
    real = sampled_step.sample
    patch(sampled_step, "sample", lambda sampler, logits, rows: real(sampler, logits.roll(1, 0), rows))


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (uniform_number_of_the_wrong_row, {1, 2, 4, 5}),
        (mask_of_the_first_row, {5, 6}),
        (mask_of_the_row_before, {5, 6}),
        (penalties_of_the_first_row, {3}),
        (logits_of_the_wrong_row, {0}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_bug_is_found(bug, found, compiler, monkeypatch):
    with monkeypatch.context() as patch:
        bug(patch.setattr)
        assert {request for request, _ in differences(compiler)} >= found
