"""The arguments of speculative decoding, as flags and as JSON."""

from __future__ import annotations

from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.speculation import SpeculationConfig


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
