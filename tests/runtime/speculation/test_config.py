"""The arguments of speculative decoding, as flags and as JSON."""

from __future__ import annotations

import pytest

from aiakq.arguments import unsupported
from aiakq.arguments.commands import COMMANDS, given_values
from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.server import checked
from aiakq.arguments.spelling import rewrite
from aiakq.errors import AiakqError
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.speculation.config import SpeculationConfig


def test_arguments_mean_the_keys_of_the_same_meaning(example_model):
    flags = {
        "speculative_model": "[ngram]",
        "num_speculative_tokens": 6,
        "ngram_prompt_lookup_max": 5,
        "ngram_prompt_lookup_min": 2,
        "speculative_disable_by_batch_size": 9,
        "speculative_max_model_len": 300,
    }
    keys = {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
        "disable_by_batch_size": 9,
        "max_model_len": 300,
    }
    found = [
        EngineConfig.from_args({"model": str(example_model), **given}).scheduler.speculation
        for given in (flags, {"speculative_config": keys})
    ]
    assert found[0] == found[1]
    assert found[0] == SpeculationConfig(
        num_speculative_tokens=6,
        prompt_lookup_max=5,
        prompt_lookup_min=2,
        disable_by_batch_size=9,
        max_model_len=300,
    )


def test_speculation_is_off_by_default(example_model):
    assert EngineConfig.from_args({"model": str(example_model)}).scheduler.speculation is None


EXACT = "a draft token is accepted only if it equals the sampled token"
#: Every flag of vLLM 0.7.3 about speculative decoding, behind --speculative-model [ngram]: the keys of the
#: configuration that it sets, or what is said about it ("": nothing).
FLAGS: list[tuple[str, dict[str, object] | str]] = [
    ("--speculative-model [ngram]", {"method": "ngram", "model": None}),
    ("--speculative-model org/draft", {"method": "draft_model", "model": "org/draft"}),
    ("--num-speculative-tokens 6", {"num_speculative_tokens": 6}),
    ("--ngram-prompt-lookup-max 5", {"prompt_lookup_max": 5}),
    ("--ngram-prompt-lookup-min 2", {"prompt_lookup_min": 2}),
    ("--speculative-disable-by-batch-size 2", {"disable_by_batch_size": 2}),
    ("--speculative-max-model-len 300", {"max_model_len": 300}),
    ("--speculative-model org/draft --speculative-model-quantization awq", {"quantization": "awq"}),
    ("--speculative-draft-tensor-parallel-size 1", ""),
    ("-spec-draft-tp 1", ""),
    ("--speculative-draft-tensor-parallel-size 2", "the draft model runs on the first rank"),
    ("--spec-decoding-acceptance-method rejection_sampler", ""),
    ("--typical-acceptance-sampler-posterior-threshold 0.09", EXACT),
    ("--typical-acceptance-sampler-posterior-alpha 0.3", EXACT),
    ("--disable-logprobs-during-spec-decoding", "log-probabilities are the same"),
    ("--disable-logprobs-during-spec-decoding true", "log-probabilities are the same"),
    ("--disable-logprobs-during-spec-decoding False", ""),
    ("--disable-logprobs-during-spec-decoding=false", ""),
    ("--speculative-disable-mqa-scorer", "verified in the same step"),
    ("--num-lookahead-slots 0", ""),
    ("--num-lookahead-slots 5", "pages for draft tokens are allocated in every step"),
]


@pytest.mark.parametrize(("flag", "meaning"), FLAGS, ids=[flag for flag, _ in FLAGS])
def test_flags_of_vllm_are_taken_or_remarked_upon(flag, meaning):
    done = rewrite(flag.split(), COMMANDS["serve"].options)
    words, without_effect = done.words, done.unsupported
    values = {
        name.removeprefix("--").replace("-", "_"): text for name, text in zip(words[::2], words[1::2], strict=True)
    }
    given = given_values(ENGINE_ARGUMENTS, {"speculative_model": "[ngram]", **values}, {}, {})
    unsupported.refuse(without_effect)
    config = SpeculationConfig.from_args(checked({"model": "m", **given}, server=True), is_recurrent=False)
    if isinstance(meaning, dict):
        assert {key: getattr(config, key) for key in meaning} == meaning and not without_effect
        return
    assert config == SpeculationConfig() and not words
    notices = unsupported.notices(without_effect)
    assert len(notices) == bool(meaning)
    assert all(line.startswith(flag.split()[0] + " does nothing here: ") and meaning in line for line in notices)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"spec_decoding_acceptance_method": "typical_acceptance_sampler"}, f"typical_acceptance_sampler.*{EXACT}"),
        ({"speculative_disable_by_batch_size": 1}, "--speculative-disable-by-batch-size is 1.*2"),
        ({"num_speculative_tokens": 0}, "--num-speculative-tokens is 0"),
        ({"ngram_prompt_lookup_max": 129}, "--ngram-prompt-lookup-max is 129"),
        ({"ngram_prompt_lookup_min": 0}, "--ngram-prompt-lookup-min is 0"),
        ({"speculative_max_model_len": 0}, "--speculative-max-model-len is 0"),
    ],
    ids=str,
)
def test_flags_of_vllm_are_refused_by_name(given, named):
    with pytest.raises(AiakqError, match=named):
        checked({"model": "m", **given}, server=True)
