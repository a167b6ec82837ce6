"""Hostile JSON: values of config.json, tokenizers, chat templates, generation and quantization configs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base import CONFIG, DROP, Change, base_tokenizer, change, changing, family, put, shown

HUGE = 10**400


@family("config values", "inspect", "load", "quantize")
def configs() -> Iterator[tuple[str, Change]]:
    numbers = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")
    for key in numbers:
        for value in (DROP, 0, -1, 2**31 - 1, HUGE, "4", 1.5, [4]):
            yield f"{key} {shown(value)}", changing("config.json", {key: value})
    values: dict[str, list[Any]] = {
        "num_key_value_heads": [3, 2**31 - 1, "1"],
        "intermediate_size": [2**30, "128", {}],
        "sliding_window": ["4", 1.5, [1], -1, HUGE, True, 1],
        "layer_types": ["sliding_attention", [1], ["sliding_attention"], [["x"]] * 2],
        "max_position_embeddings": [0, 2**31 - 1, "x", 1.5],
        "rope_theta": ["x", [1], 0, -1.0, math.nan, 1e308, 10**300],
        "rope_scaling": [
            "linear",
            [1],
            {"rope_type": 7},
            {"rope_type": "linear", "factor": "x"},
            {"type": "yarn", "factor": "9" * 9000},
        ],
        "rope_parameters": ["x", {"rope_theta": None}, {"rope_type": "yarn"}, {"full_attention": 1}],
        "partial_rotary_factor": ["x" * 3000, math.nan, -1, [1]],
        "original_max_position_embeddings": ["64", 2**70],
        "rms_norm_eps": [math.nan, math.inf, -1.0, "x", 1e300],
        "hidden_act": ["os.system", 7, [], "x" * 100_000],
        "tie_word_embeddings": ["no", [], 7],
        "architectures": [DROP, [], [7], "x", ["../../etc/passwd"], ["os.system"], ["x" * 100_000], [None]],
        "model_type": [DROP, 7, "../x", "x" * 100_000, "mamba", "gpt2", ["llama"]],
        "auto_map": [{"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "evil.py", [1]],
        "text_config": [7, [], {"hidden_size": "x"}],
        "dtype": ["float31", 7, "../x", ["float32"]],
        "eos_token_id": ["x", -1, 2**70, [[1]], 1.5, {}],
        "quantization_config": [7, "x", [1], {}, {"quant_method": "evil"}],
        "_attn_implementation": ["evil", 7],
        "attention_bias": ["x", True, None, 1],
        "a_key_of_its_own": [2.0, "x" * 3000, {"a": [1]}],
        "k" * 100_000: [1],
        "logit_scale": [math.nan, 0.5],
        "num_hidden_layer": [2],
        "num_local_experts": [2**40, "x"],
        "transformers_version": [7, "../x"],
        "aiakq": [7, {"method": "../x\n"}],
        "pretraining_tp": [7, "x"],
    }
    for key, found in values.items():
        for value in found:
            yield f"{key} {shown(value)}", changing("config.json", {key: value})
    yield "evil.py", _own_code
    texts = ("", "[]", "nul", "7", '{"a":' * 100_000, "\ufeff{}", '{"hidden_size": NaN}', "{" + " " * (65 << 20) + "}")
    for text in texts:
        yield f"text {text[:12]!r}", lambda folder, text=text: put(folder, "config.json", text)
    yield "invalid UTF-8", lambda folder: put(folder, "config.json", b'{"a": "\xff"}')
    yield "a million keys", lambda folder: put(folder, "config.json", CONFIG | {f"k{n}": n for n in range(1_000_000)})


def _own_code(folder: Path) -> None:
    """Python code in the folder that config and tokenizer name."""
    put(folder, "evil.py", "open('CANARY', 'w')\n")
    change(folder, "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})


def tokenizer(edit: Any) -> Change:
    """The base tokenizer.json, edited in place."""

    def make(folder: Path) -> None:
        found = copy.deepcopy(base_tokenizer())
        edit(found)
        put(folder, "tokenizer.json", found)

    return make


TOKENIZER_PARTS: dict[str, list[Any]] = {
    "normalizer": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000_000},
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": "(("}, "content": ""},
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 1_000_000}] * 20},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Evil"},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(?:a|a){18}b"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "x{1000}{1000}{1000}"}, "behavior": "Isolated", "invert": False},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 100_000},
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []},
    ],
    "decoder": [
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {"type": "Replace", "pattern": {"String": "h"}, "content": "h" * 1_000_000},
        {"type": "Evil"},
    ],
    "padding": [
        {
            "strategy": {"Fixed": 2**30},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 2,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    ],
    "truncation": [{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10}],
}


TOKENIZER_CONFIGS: dict[str, Any] = {
    "tokenizer_class": ["Evil", "../x", 7, "LlamaTokenizer", "BertTokenizer"],
    "chat_template": [7, [1], {"a": 1}, [{"name": "../../x", "template": "x"}]],
    "auto_map": [{"AutoTokenizer": ["evil.Tokenizer", None]}],
    "added_tokens_decoder": [7, {"x": {}}, {"0": 7}, {"99999999999": {"content": "x"}}],
    "extra_special_tokens": [7, {"../x": "y"}, ["a"]],
    "eos_token": [7, {}, ["x"]],
    "model_max_length": [-1, "x", 1e308],
    "fast_tokenizer_files": [["../../secret.bin"], "x", 7],
    "tokenizer_file": ["../secret.bin", "/dev/zero", "/etc/passwd"],
    "vocab_file": ["../secret.bin", "/dev/zero"],
}


@family("tokenizers", "text")
def tokenizers() -> Iterator[tuple[str, Change]]:
    for text in ("", "[]", "null", "{", "{}", '{"a":' * 100_000, "[" * 1_000_000, '{"model": {}}'):
        yield f"text {text[:12]!r}", lambda folder, text=text: put(folder, "tokenizer.json", text)
    for key in base_tokenizer():
        for value in (7, "x", [[]]):
            yield f"{key} {value!r}", tokenizer(lambda found, k=key, v=value: found.update({k: v}))
    for key, found in TOKENIZER_PARTS.items():
        for number, value in enumerate(found):
            yield f"{key} {number}", tokenizer(lambda tokens, k=key, v=value: tokens.update({k: v}))
    yield "an id of 4e9", tokenizer(lambda found: found["model"]["vocab"].update(x=4_000_000_000))
    yield "a negative id", tokenizer(lambda found: found["model"]["vocab"].update(x=-1))
    yield "no vocabulary", tokenizer(lambda found: found["model"].update(vocab={}))
    yield "merges of nothing", tokenizer(lambda found: found["model"].update(merges=["x y", "y z"]))
    yield "an added id of 2^31", tokenizer(lambda found: found["added_tokens"][0].update(id=2**31))
    yield "an empty added token", tokenizer(lambda found: found["added_tokens"][0].update(content=""))
    yield (
        "100,000 added tokens",
        tokenizer(
            lambda found: found["added_tokens"].extend(
                {**found["added_tokens"][0], "id": 1000 + n, "content": f"<{n}>"} for n in range(100_000)
            )
        ),
    )
    for key, values in TOKENIZER_CONFIGS.items():
        for value in values:
            yield f"{key} {shown(value)}", changing("tokenizer_config.json", {key: value})


@family("chat templates", "chat")
def templates() -> Iterator[tuple[str, Change]]:
    texts = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a'|center(10**10) }}",
        "{{ lipsum(n=1000000) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
        "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends '../secret.bin' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ (" * 5000,
        "{% if",
        "{{ 1/0 }}",
        "{{ raise_exception('no') }}",
        "{{ undefined.thing.more }}",
        "",
        "\0\x1b[2J",
        "{% set x = namespace(a=[1]) %}{% for i in range(99999) %}{% set x.a = x.a + x.a %}{% endfor %}",
    )
    for number, text in enumerate(texts):
        yield f"{number} {text[:30]!r}", changing("tokenizer_config.json", {"chat_template": text})
    yield "a template of 20 MiB", lambda folder: put(folder, "chat_template.jinja", "x" * (20 << 20))


@family("generation configs", "load")
def generations() -> Iterator[tuple[str, Change]]:
    values: dict[str, list[Any]] = {
        "temperature": ["x", math.nan, -1, HUGE, [1], 1e-40],
        "top_p": [0, 2, "x", math.nan],
        "top_k": [-5, 1.5, 2**70, "x"],
        "repetition_penalty": [0, -1, math.inf, "x"],
        "eos_token_id": ["x", -1, 2**70, [[1]], 1.5, list(range(100_000)), True],
        "max_new_tokens": [0, -1, "x", 1.5, 2**70],
        "min_p": [2, "x"],
    }
    for key, found in values.items():
        for value in found:
            yield f"{key} {shown(value)}", changing("generation_config.json", {key: value})
    for text in ("", "[]", "{", "7", "[" * 100_000):
        yield f"text {text[:12]!r}", lambda folder, text=text: put(folder, "generation_config.json", text)


@family("quantization configs", "inspect", "load")
def quantizations() -> Iterator[tuple[str, Change]]:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    values: dict[str, list[Any]] = {
        "bits": [0, -1, 5, 2**40, "4", 4.5, True, None, [4]],
        "group_size": [0, -2, 7, 2**40, "32", 1.5, [32]],
        "sym": ["yes", 7, []],
        "desc_act": ["x", []],
        "checkpoint_format": ["marlin", 7, "../x", "x" * 100_000],
        "modules_to_not_convert": [7, "x", [7], ["(a+)+$"], ["re:(a+)+$"] * 1000],
        "dynamic": [7, {"re:(": {}}, {"+:(a+)+$": {"bits": 99}}, {"+:.*": {"bits": "x"}}, {"-:((a+)+)+$": {}}],
    }
    for key, found in values.items():
        for value in found:
            config = gptq | {key: value}
            yield f"gptq {key} {shown(value)}", changing("config.json", {"quantization_config": config})
    for method in ("awq", "auto-round", "bitsandbytes", "exl3", "", 7, None, "os.system", "x" * 100_000):
        config = gptq | {"quant_method": method}
        yield f"method {shown(method)}", changing("config.json", {"quantization_config": config})
    for key, value in (
        ("num_bits", 0),
        ("num_bits", "4"),
        ("type", "float"),
        ("group_size", 0),
        ("strategy", "evil"),
        ("symmetric", "x"),
    ):
        broken = {"group_0": {"targets": ["Linear"], "weights": weights | {key: value}}}
        config = packed | {"config_groups": broken}
        yield f"group {key} {value!r}", changing("config.json", {"quantization_config": config})
    for wanted in (["re:(a+)+$"], ["re:("], 7, [7], []):
        broken = {"group_0": {"targets": wanted, "weights": weights}}
        config = packed | {"config_groups": broken}
        yield f"targets {wanted!r}", changing("config.json", {"quantization_config": config})
    for groups_value in (7, [], {}, {"g": 7}, {f"g{n}": groups["group_0"] for n in range(20_000)}):
        config = packed | {"config_groups": groups_value}
        yield f"groups {shown(groups_value)}", changing("config.json", {"quantization_config": config})
