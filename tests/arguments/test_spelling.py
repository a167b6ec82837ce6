"""Spellings of options: those of vLLM's command line, AIAK's documentation and shell scripts are the same option."""

from __future__ import annotations

import json

import pytest

from aiakq.arguments.commands import COMMANDS
from aiakq.arguments.server import keywords
from aiakq.arguments.spelling import rewrite
from aiakq.errors import AiakqError


def words(command: str, *given: str, **settings) -> list[str]:
    return rewrite(given, COMMANDS[command].options, **settings).words


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("serve", "--max_model_len 64", "--max-model-len 64"),
        ("serve", "--max_model-len=64", "--max-model-len 64"),
        ("serve", "-tp2 -pp=2 -dp 2", "-tp 2 -pp 2 -dp 2"),
        ("serve", "--tp 2 -max-model-len 4", "-tp 2 --max-model-len 4"),
        ("serve", "-O3", "-O 3"),
        ("serve", "-O=3", "-O 3"),
        ("serve", "-q=awq", "-q awq"),
        ("quantize", "-quant-type awq", "-quant_type awq"),
        ("quantize", "--quant_type=awq -sq0.5 -t=fp16", "-quant_type awq -sq 0.5 -t fp16"),
        ("quantize", "-tfp16 -sqauto", "-t fp16 -sq auto"),
        ("quantize", "-sq.5", "-sq .5"),
        ("quantize", "-tokenids_path f", "--tokenids_path f"),
        ("quantize", "--token_ids f --skip a b", "--token-ids f --skip a --skip b"),
        ("quantize", "-sq -1 -i -x", "-sq -1 -i -x"),
        ("eval", "m --fail_if a>1", "m --fail-if a>1"),
        ("bench latency", "m --batch_size 8 --num_iters=3", "m --batch-size 8 --num-iters 3"),
        ("bench compare", "a b --allow_undecided", "a b --allow-undecided"),
        ("serve", "m -- --max_model_len", "m -- --max_model_len"),
    ],
)
def test_every_spelling_becomes_that_of_the_parser(command, given, expected):
    assert words(command, *given.split()) == expected.split()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--multi-query-mode False", "--no-multi-query-mode"),
        ("--multi-query-mode true", "--multi-query-mode"),
        ("--multi_query_mode=0", "--no-multi-query-mode"),
        ("--no-multi-query-mode", "--no-multi-query-mode"),
        ("--no_multi_query_mode", "--no-multi-query-mode"),
        ("--no-eval False", "--eval"),
        ("--asymmetric=True", "--asymmetric"),
        ("--symmetric off --overwrite yes", "--asymmetric --overwrite"),
    ],
)
def test_a_switch_takes_a_value(given, expected):
    assert words("quantize", *given.split()) == expected.split()


def test_a_switch_refuses_other_values():
    with pytest.raises(AiakqError, match="--multi-query-mode is 'maybe', which is not true or false"):
        words("quantize", "--multi-query-mode=maybe")


@pytest.mark.parametrize(
    ("given", "flag", "value"),
    [
        ("--hf-overrides.max_position_embeddings 8192", "--hf-overrides", {"max_position_embeddings": 8192}),
        ("--hf_overrides.rope_scaling.factor=2.5", "--hf-overrides", {"rope_scaling": {"factor": 2.5}}),
        ("--structured-outputs-config.backend xgrammar", "--structured-outputs-config", {"backend": "xgrammar"}),
        ("--hf-overrides.a True --hf-overrides.b 4k", "--hf-overrides", {"a": True, "b": 4000}),
        ("--hf-overrides.a+ x,y --hf-overrides.a+ z", "--hf-overrides", {"a": ["x", "y", "z"]}),
        ('--hf-overrides {"a":1,"b":{"c":2}} --hf-overrides.b.d 3', "--hf-overrides", {"a": 1, "b": {"c": 2, "d": 3}}),
        ("-O.level 2", "--compilation-config", {"level": 2}),
    ],
)
def test_a_dotted_key_sets_a_key_of_a_json_option(given, flag, value):
    last = words("serve", *given.split())[-2:]
    assert last[0] == flag and json.loads(last[1]) == value


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--port.x 1", "--port has no keys, it is an integer"),
        ("--hf-overrides. 1", "a key without a name"),
        ("--hf-overrides 3 --hf-overrides.x 1", "no JSON object that --hf-overrides.KEY could add to"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", "a has a value already"),
        ("--port --host x", "--port has no value: the next word is the option --host"),
        ("--port", "--port requires an argument"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(given, reason):
    with pytest.raises(AiakqError, match=reason):
        words("serve", *given.split())


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("--seed 1 --seed 2", 1),
        ("--seed 1 --seed=1", 0),
        ("--max-model-len 8 --max_model_len 9", 1),
        ("--enforce-eager --no-enforce-eager", 1),
        ("--hf-overrides.a 1 --hf-overrides.a 2", 1),
        ("--served-model-name a --served-model-name b", 0),
    ],
)
def test_an_option_given_twice_with_different_values_gets_a_warning(given, count):
    done = rewrite(given.split(), COMMANDS["serve"].options)
    assert len(done.warnings) == count and all("the last value is used" in line for line in done.warnings)


@pytest.mark.parametrize(
    ("given", "has_model", "expected"),
    [
        ("m --served-model-name a b --port 1", True, "m {}=a {}=b --port 1"),
        ("--served_model_name a b --model m", True, "{}=a {}=b --model m"),
        ("--served-model-name a m", False, "{}=a m"),
        ("--served-model-name m", False, "{}=m"),
        ("m --served-model-name=a -- b", True, "m {}=a -- b"),
    ],
)
def test_several_words_after_a_list_option_are_its_entries(given, has_model, expected):
    wanted = [part for word in expected.split() for part in word.replace("{}=", "--served-model-name ").split()]
    assert words("serve", *given.split(), has_model=has_model) == wanted


def test_hf_token_without_a_value_stands_for_the_stored_one():
    assert words("serve", "m", "--hf-token", "--port", "1") == ["m", "--hf-token", "", "--port", "1"]
    assert words("serve", "m", "--hf-token") == ["m", "--hf-token", ""]
    assert words("quantize", "--tune", "-i", "m") == ["--tune", "96steps", "-i", "m"]
    assert words("quantize", "--tune", "600") == ["--tune", "600"]
    assert words("serve", "m", "--hf-token", "secret") == ["m", "--hf-token", "secret"]


def test_unsupported_options_are_taken_from_the_words():
    done = rewrite(
        "m --swap_space 8 --port=1 --enable-lora-bias --no-use-v2-block-manager --lora-extra-vocab-size=2 "
        "--enable-expert-parallel false -- --swap-space x".split(),
        COMMANDS["serve"].options,
    )
    assert done.words == "m --port 1 -- --swap-space x".split()
    assert done.unsupported == {
        "swap_space": "8",
        "enable_lora_bias": True,
        "use_v2_block_manager": False,
        "lora_extra_vocab_size": "2",
        "enable_expert_parallel": False,
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_no_spelling_of_a_command_is_ambiguous(command):
    options = COMMANDS[command].options
    for flag in options.takes_value:
        for spelling in (flag, flag.replace("-", "_").replace("__", "--", 1), "--" + flag.lstrip("-")):
            if spelling.startswith("-") and len(flag) > 2:
                assert options.find(spelling).row is options.find(flag).row
    keys = [key for row in COMMANDS[command].rows for key in row.keys]
    assert len(keys) == len(set(keys))


def test_keywords_are_found_by_the_same_spellings():
    given = {"max-model-len": 8, "hf_overrides.a.b": 1, "hf_overrides": {"c": 2}, "attention-config.backend": "X"}
    assert keywords(given) == {
        "max_model_len": 8,
        "hf_overrides": {"c": 2, "a": {"b": 1}},
        "attention_config": {"backend": "X"},
    }
    with pytest.raises(AiakqError, match="'max_model_len' is given twice"):
        keywords({"max-model-len": 8, "max_model_len": 8})
