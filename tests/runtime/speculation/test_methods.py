"""Methods of speculative decoding: names and models that go together, and methods that are refused."""

from __future__ import annotations

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.speculation.methods import PROPOSERS, check_supported, resolve


@pytest.mark.parametrize(
    ("method", "model", "found"),
    [
        ("ngram", None, ("ngram", None)),
        ("suffix", None, ("suffix", None)),
        (None, "[ngram]", ("ngram", None)),
        (None, "[suffix]", ("suffix", None)),
        ("ngram", "ngram", ("ngram", None)),
        (None, "org/model", ("draft_model", "org/model")),
        ("draft_model", "org/model", ("draft_model", "org/model")),
        ("eagle3", "org/head", ("eagle3", "org/head")),
        ("mtp", None, ("mtp", None)),
        (None, "[mtp]", ("mtp", None)),
        ("deepseek_mtp", None, ("mtp", None)),
        ("glm4_moe_mtp", "org/target", ("mtp", "org/target")),
    ],
)
def test_a_method_and_its_model(method, model, found):
    assert resolve(method, model, "--speculative-config") == found


@pytest.mark.parametrize(
    ("method", "model"),
    [("ngram", "org/model"), ("suffix", "[ngram]"), ("draft_model", None), ("eagle3", "[ngram]"), ("other", None),
     (None, None), (3, None), (["ngram"], None)],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(method, model):
    with pytest.raises(AiakqError) as caught:
        resolve(method, model, "--speculative-config")
    assert caught.value.id == "bad_option" and "suffix" in str(caught.value) and "eagle3" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("eagle", "EAGLE-1"),
        ("EagleLlamaForCausalLM", "EAGLE-1"),
        ("medusa", "typical acceptance"),
        ("MLPSpeculatorPreTrainedModel", "last hidden state"),
        ("mlp_speculator", "last hidden state"),
        ("deepseek_mtp", "target's checkpoint"),
        ("MTPDraftModel", "target's checkpoint"),
        ("peagle", "P-EAGLE"),
        ("dflash", "DFlash"),
        ("Qwen3DSparkModel", "DSpark"),
        ("lstm_speculator", "LSTM"),
    ],
)
def test_other_heads_are_refused_by_name_with_the_reason(name, reason):
    with pytest.raises(AiakqError, match=reason) as caught:
        check_supported(name)
    assert caught.value.id == "unsupported" and name in str(caught.value)


def test_what_is_registered_is_not_refused():
    for name in [*PROPOSERS, "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"]:
        check_supported(name)
