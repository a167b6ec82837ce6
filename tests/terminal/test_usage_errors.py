"""Misspelled commands and options: one line with the correction, exit code 2, no effect."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiakq import cli
from aiakq.arguments.commands import COMMANDS
from aiakq.terminal.usage_errors import flags_of, options_of_others

GOOD = ["quantize", "-i", "in", "-o", "out", "-quant_type", "awq"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["quantize", "–i", "in"], "Write: -i"),
        (["quantize", "—i", "in"], "Write: -i"),
        (["quantize", "−quant_type", "awq"], "Write: -quant_type"),
        (["quantize", "–quant_type=awq"], "Write: -quant_type awq"),
        (["quantize", "–multi‑query‑mode"], "Write: --multi-query-mode"),
        (["serve", "model", "–host", "0.0.0.0"], "Write: --host"),
        (["serve", "model", "—port", "80"], "Write: --port"),
        ([*GOOD, "-TP", "4"], "Write: -tp"),
        ([*GOOD, "-tpfour"], "Write: -tp four"),
        (["quantize", "-i", "-quant_type", "awq"], "-i has no value: the next word is the option -quant_type"),
        (["serve", "model", "--max-model-length", "9"], "Did you mean --max-model-len"),
        (["serve", "model", "--prot", "80"], "Did you mean --port"),
        ([*GOOD, "--nonsense"], "aiakq quantize --help"),
        (["quantize", "-quanttype", "awq"], "There is no option -quanttype. Did you mean --quant-type?"),
        (["serve", "model", "-quantizaton", "awq"], "There is no option -quantizaton. Did you mean --quantization?"),
        (["quantize", "-i", "in", "-o", "out", "-quant_type", "awk"], "Did you mean awq?"),
        (["bench", "serve", "--base-url", "localhost:80"], "Write it like http://127.0.0.1:8000."),
        (["quantise"], "There is no command 'quantise'. Did you mean quantize?"),
        (["bench", "latncy"], "There is no command 'bench latncy'. Did you mean latency?"),
        (
            ["frobnicate"],
            "There are quantize, convert, serve, chat, eval, compare, inspect, translate, collect-env, completion, "
            "bench.",
        ),
        (["quantize"], "-i or --input is missing. Example: aiakq quantize -i MODEL -o DIR -quant_type awq."),
        (["quantize", "-i", "in"], "-o or --output is missing."),
        (["quantize", "-i", "in", "-o", "out"], "-quant_type or --quant-type is missing."),
        ([*GOOD, "-tp"], "-tp"),
        ([*GOOD, "-tp", "four"], "-tp"),
        ([*GOOD, "extra"], "extra"),
        (["inspect"], "MODEL is missing. Example: aiakq inspect MODEL."),
        (["serve"], "No model is given. Example: aiakq serve MODEL"),
        (["bench", "latency"], "No model is given. Example: aiakq bench latency MODEL"),
        (["serve", "one", "--model", "two"], "both name a model"),
        (["serve", "model", "--device", "tpu"], "--device is 'tpu', which is not one of auto, cpu, cuda."),
        (["serve", "model", "--port", "70000"], "at most 65535"),
        (["bench", "serve", "--request-rate", "0"], "--request-rate is 0.0, which is not above 0."),
        (["bench", "serve", "--dtype", "float32"], "aiakq bench serve MODEL"),
        (["bench", "latency", "model", "--fail-if", "tpot_ms.p50>"], "The gate 'tpot_ms.p50>' cannot be read"),
        ([*GOOD[:-1], "int9"], "one of weight_only_int8, smooth_quant, awq, gptq"),
        ([*GOOD, "-sq", "-1"], "-sq is -1.0, which is not between 0 and 1, or auto."),
        ([*GOOD, "-t", "fp12"], "fp16, bf16 or fp32"),
        ([*GOOD, "--act-order", "static"], "only gptq has an order"),
        ([*GOOD[:-1], "gtpq"], "Did you mean gptq?"),
        ([*GOOD, "-t", "fp61"], "Did you mean fp16?"),
        (["serve", "model", "--dtype", "flaot16"], "Did you mean float16 or bfloat16?"),
        (["serve", "model", "--log-format=jsn"], "Did you mean json?"),
        (["bench", "serve", "--workload", "rondom"], "Did you mean random?"),
        (["completion", "bsh"], "Did you mean bash"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_slip_gets_one_line_and_exit_code_2(aiakq, words, hint):
    ended = aiakq(*words)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.count("\n") == 1 and ended.err.startswith("aiakq: error[")
    assert hint in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ["-tp", "1", "-t", "bf16"],
        ["-tp=1"],
        ["--tensor-parallel=1", "--dtype=bf16"],
        ["--token-ids", "ids.json"],
        ["--tokenids_path", "ids.json"],
        ["-token=ids.json"],
        ["--multi-query-mode"],
        ["--symmetric"],
        ["--asymmetric", "--no-eval"],
        ["-t=bf16", "-tp1", "-sq0.5"],
        ["--quant_type=awq", "--group_size=64"],
        ["-tokenids_path", "ids.json"],
        ["--multi-query-mode", "False"],
    ],
    ids=" ".join,
)
def test_every_right_spelling_reaches_the_model(aiakq, tmp_path, words):
    """The model that is missing is the first thing that goes wrong."""
    ended = aiakq("quantize", "-i", tmp_path / "none", "-o", tmp_path / "out", "-quant_type", "awq", *words)
    assert ended.code == 3 and "error[model_missing]" in ended.err


def test_long_names_work_in_place_of_the_literal_ones(aiakq, tmp_path):
    ended = aiakq("quantize", "--input", tmp_path / "none", "--output", tmp_path / "out", "--quant-type", "gpt")
    assert ended.code == 3 and "error[model_missing]" in ended.err


# --- options of other commands

ROOT = Path(__file__).resolve().parents[2]
#: Files with options of other programs (git, nvidia-smi, curl, processes of aiakq).
OTHER_PROGRAMS = {
    *("aiakq/records.py", "aiakq/collect_env.py", "aiakq/bench/comparison/sides.py", "aiakq/server/launch.py"),
    *("aiakq/server/process/text_messages.py", "aiakq/server/process/text_process.py"),
}


def test_every_option_that_a_text_names_is_one_of_a_command() -> None:
    known = flags_of(row for command in COMMANDS.values() for row in command.rows)
    known |= {"--config", "--debug", "--help", "--version"}
    known |= {name for command in COMMANDS.values() for name in command.unsupported}
    unknown = []
    for path in sorted(ROOT.glob("aiakq/**/*.py")):
        file = str(path.relative_to(ROOT))
        if file in OTHER_PROGRAMS or {"arguments", "translation"} & set(
            path.parts
        ):  # whose names are checked where they are read
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", node.value)
                named = [option for option in named if not option.endswith("-")]  # the beginning of one
                unknown += [f"{file}:{node.lineno} {option}" for option in named if option not in known]
    assert not unknown, "\n".join(unknown)


def test_a_remedy_of_another_command_says_which(tmp_path, capsys) -> None:
    for variant in ("fp16", "bf16"):
        save_file({"w": torch.zeros(1)}, tmp_path / f"model.{variant}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["quantize", "-i", str(tmp_path), "-o", str(tmp_path / "out"), "-quant_type", "awq"]) == 3
    printed = capsys.readouterr().err
    assert "have to be removed, or left out with --ignore-patterns" in printed
    assert "(--ignore-patterns is an option of aiakq serve and chat.)" in printed


def test_a_remedy_of_the_same_command_or_of_a_named_one_stays_as_it_is() -> None:
    text = "Leave it out with --ignore-patterns, not --group-size."
    assert options_of_others(text, "serve") == "(--group-size is an option of aiakq quantize and convert.)"
    assert options_of_others("Start the server with --chat-template FILE.", "quantize") == ""
    assert options_of_others("Repeat it with aiakq quantize -i MODEL --calibration DATA.", "eval") == ""
    assert options_of_others("Repeat it with --debug, and a path/--revision.", "quantize") == ""
    assert options_of_others("Give --scheme NAME.", "inspect") == "(--scheme is an option of aiakq bench kernels.)"
