"""Every option of vLLM's ``serve`` and ``bench`` is known: it works, has no effect, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiakq.arguments.commands import COMMANDS
from aiakq.arguments.server import checked, keywords
from aiakq.arguments.unsupported import UNSUPPORTED
from aiakq.errors import AiakqError
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.pooling.config import PoolingConfig, _override
from aiakq.runtime.protocol.pooling_params import Pooling
from aiakq.runtime.speculation.config import SpeculationConfig

#: The names of all options, by command and version of vLLM.
NAMES = json.loads((Path(__file__).parent / "vllm_options.json").read_text())


@pytest.mark.parametrize("command", NAMES)
def test_no_option_is_unknown(command):
    options = COMMANDS[command.rpartition(" ")[0]].options
    assert [name for name in NAMES[command] if options.find(name) is None] == []


@pytest.mark.parametrize("row", UNSUPPORTED, ids=lambda row: row.name)
def test_every_reason_is_one_short_line(row):
    assert 10 < len(row.reason) < 120 and not row.reason.endswith(".") and "\n" not in row.reason


def args(**given):
    return checked({"model": "m", **keywords(given)}, server=True)


@pytest.mark.parametrize(
    ("given", "task"),
    [
        ({}, None),
        ({"runner": "generate"}, None),
        ({"runner": "pooling"}, "embed"),
        ({"convert": "embed"}, "embed"),
        ({"runner": "pooling", "convert": "embed"}, "embed"),
        ({"runner": "pooling", "task": "reward"}, "reward"),
        ({"runner": "auto", "convert": "none", "task": "embed"}, "embed"),
    ],
)
def test_runner_and_convert_select_the_task(given, task, tmp_path):
    config = PoolingConfig.from_args(args(**given), tmp_path, {"architectures": ["LlamaForCausalLM"]})
    assert task == (config and config.limits.task)


@pytest.mark.parametrize(
    "given",
    [
        {"runner": "generate", "task": "embed"},
        {"runner": "pooling", "task": "generate"},
        {"runner": "generate", "convert": "embed"},
        {"convert": "embed", "task": "reward"},
        {"convert": "classify", "task": "embed"},
    ],
)
def test_contradicting_tasks_are_refused(given, tmp_path):
    with pytest.raises(AiakqError) as caught:
        PoolingConfig.from_args(args(**given), tmp_path, {"architectures": ["LlamaForCausalLM"]})
    assert caught.value.id == "option_conflict"


def test_a_classifier_is_found_with_runner_and_convert(tmp_path):
    raw = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    for given in ({"runner": "pooling"}, {"convert": "classify"}):
        assert PoolingConfig.from_args(args(**given), tmp_path, raw).limits.task == "classify"


def test_the_pooler_config_of_newer_versions():
    own = Pooling("LAST", normalize=True)
    assert _override(own, {"seq_pooling_type": "MEAN", "use_activation": False}, False) == Pooling("MEAN")
    scores = Pooling("LAST", activation="sigmoid")
    assert _override(scores, {"use_activation": True}, True) == scores
    assert _override(scores, {"use_activation": False}, True) == Pooling("LAST")
    for refused in ({"max_embed_len": 4}, {"dimensions": 4}, {"pooling_type": "CLS", "seq_pooling_type": "LAST"}):
        with pytest.raises(AiakqError, match=list(refused)[-1]):
            _override(own, refused, False)


def test_options_of_graphs_reach_the_compilation_config():
    assert CompilationConfig.from_args(args(optimization_level=0)).enforce_eager
    assert not CompilationConfig.from_args(args(optimization_level=3)).enforce_eager
    assert not CompilationConfig.from_args(args(optimization_level=0, compilation_config={"mode": 3})).enforce_eager
    numbers = checked({"model": "m", "cudagraph_capture_sizes": [4, 1]}, server=False).cudagraph_capture_sizes
    assert numbers == ["4", "1"], "vLLM's scripts have numbers"
    config = CompilationConfig.from_args(args(cudagraph_capture_sizes=["4", "1"], max_cudagraph_capture_size=4))
    assert config.cudagraph_capture_sizes == (1, 4) and config.max_cudagraph_capture_size == 4


def test_short_names_of_speculation_are_those_of_the_config():
    config = SpeculationConfig.from_args(args(spec_method="ngram", spec_tokens=3), is_recurrent=False)
    assert config.method == "ngram" and config.num_speculative_tokens == 3


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_other_log_probabilities_are_refused_by_name(mode):
    assert args(logprobs_mode="raw_logprobs")
    with pytest.raises(AiakqError, match=mode):
        args(logprobs_mode=mode)
