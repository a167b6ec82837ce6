"""Row transforms: which a request has, and in which order they change its logits."""

from __future__ import annotations

import pytest
import torch

from aiakq.runtime.executor import logits_modifier, row_transforms
from aiakq.runtime.executor.logits_modifier import LogitsModifier, transforms_of
from aiakq.runtime.executor.penalties import penalize
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams


def spec(bad_words: list[list[int]] | None = None, **sampling) -> RequestSpec:
    params = SamplingParams(max_tokens=4, **sampling)
    return RequestSpec("r", [1, 2], params, 4, 0, eos_token_ids=[0], bad_word_ids=bad_words or [])


def test_a_request_has_the_transforms_whose_parameters_it_sets_in_their_order():
    every = spec(
        [[3]], min_tokens=2, repetition_penalty=2.0, logit_bias={1: 5.0}, allowed_token_ids=[1, 3], temperature=0.0
    )
    names = [type(each).__name__ for each in transforms_of(every, [lambda outputs, logits: logits])]
    assert names == ["Processors", "AllowedTokens", "LogitBias", "BadWords", "MinTokens", "Penalties"]
    assert transforms_of(spec(temperature=0.7, top_p=0.5, seed=1), ()) == ()


def test_a_request_without_transforms_is_not_modified():
    assert not LogitsModifier(spec(), ()).modifies(2, [])


@pytest.mark.parametrize("position", [2, 3, 4])
def test_min_tokens_modifies_the_first_tokens_only(position: int):
    modifier = LogitsModifier(spec(min_tokens=2), ())
    assert modifier.modifies(position, []) == (position < 4)


def test_a_bias_is_penalized_and_a_ban_is_not_lifted_by_it():
    modifier = LogitsModifier(spec([[1]], logit_bias={1: 100.0, 2: 4.0}, repetition_penalty=2.0), ())
    logits = torch.tensor([1.0, 1.0, 1.0, 1.0])
    occurred = modifier.apply(logits, [1, 2], [])
    assert occurred is not None
    penalize(logits.unsqueeze(0), {0: occurred})
    assert logits.tolist() == [1.0, float("-inf"), 2.5, 1.0]


def test_transforms_of_plug_ins_come_last(monkeypatch, request):
    class Doubled(row_transforms.RowTransform):
        def apply(self, logits, outputs):
            logits *= 2

    class Plugins:
        def __iter__(self):
            return iter(["double"])

        def load(self, name):
            return lambda request: Doubled() if request.sampling.logit_bias else None

    monkeypatch.setattr(logits_modifier, "ROW_TRANSFORMS", Plugins())
    logits_modifier._plugins.cache_clear()
    request.addfinalizer(logits_modifier._plugins.cache_clear)
    logits = torch.tensor([1.0, 1.0])
    LogitsModifier(spec(logit_bias={1: 1.0}), ()).apply(logits, [1, 2], [])
    assert logits.tolist() == [2.0, 4.0] and transforms_of(spec(), ()) == ()
