"""Old names of arguments are replaced with a notice, on the command line, in Python and in configuration files."""

from __future__ import annotations

import pytest

from aiakq.arguments import renamed
from aiakq.arguments.commands import COMMANDS
from aiakq.arguments.renamed import RENAMED, VALUES
from aiakq.arguments.server import checked, keywords, notices
from aiakq.arguments.spelling import rewrite
from aiakq.errors import AiakqError

ROWS = {row.name: row for row in RENAMED}


def replaced_line(*words):
    rewritten = rewrite(words, COMMANDS["serve"].options)
    return renamed.replaced_words(rewritten.words, rewritten.unsupported)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_an_argument_that_works(name):
    row = ROWS[name]
    known = {argument.name: argument for argument in COMMANDS["serve"].rows}
    assert known[row.new].flag == row.new_flag
    words = [row.flag] if row.switch else [row.flag, "8"]
    found, lines = replaced_line("model", *words)
    assert found[:2] == [row.new_flag, str(row.value or 8)] and found[2:] == ["model"]
    assert lines == [f"{row.flag} is called {row.replacement} now."]
    given = {"model": "m", name: True if row.switch else ["8"] if row.many else 8}
    assert getattr(checked(given, server=True), row.new) is not None
    assert notices(keywords(given)) == lines
    assert notices({name: None}) == [] and checked({"model": "m", name: None}, server=True)


def test_a_switch_that_is_off_changes_nothing():
    assert replaced_line("model", "--worker-use-ray", "false") == (["model"], [])
    assert checked({"model": "m", "worker_use_ray": False}, server=True).distributed_executor_backend is None


def test_an_old_and_a_new_name_are_not_given_together():
    with pytest.raises(AiakqError, match="--worker-use-ray and --distributed-executor-backend are the same"):
        replaced_line("--worker-use-ray", "--distributed-executor-backend", "mp")
    with pytest.raises(AiakqError, match="--forced-num-gpu-blocks and --num-gpu-blocks-override are the same"):
        checked({"model": "m", "forced_num_gpu_blocks": 8, "num_gpu_blocks_override": 9}, server=True)


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_values_with_another_name(name, value):
    flag, new = "--" + name.replace("_", "-"), VALUES[name, value]
    found, lines = replaced_line("model", f"{flag}={value}", "--port", "1")
    assert found == ["model", flag, new, "--port", "1"]
    assert lines == [f"{flag} {value} is called {flag} {new} here."] == notices({name: value})
    assert getattr(checked({"model": "m", name: value}, server=True), name) == new
    assert replaced_line("model", flag, new) == (["model", flag, new], [])


def test_words_after_two_dashes_are_left_alone():
    assert replaced_line("--worker-use-ray", "--", "--load-format", "npcache")[0] == [
        *("--distributed-executor-backend", "ray", "--", "--load-format", "npcache"),
    ]


def test_the_command_line_and_the_file_show_one_line(process, tmp_path):
    done = process("serve", "./no-such-model", "--worker-use-ray", "--forced-num-gpu-blocks", "40")
    assert "error[model_missing]" in done.err
    assert done.err.count("--worker-use-ray is called --distributed-executor-backend ray now.") == 1
    assert done.err.count("--forced-num-gpu-blocks is called --num-gpu-blocks-override now.") == 1
    file = tmp_path / "options.yaml"
    file.write_text("max-context-len-to-capture: 512\nmodel-impl: vllm\n")
    done = process("serve", "./no-such-model", "--config", str(file))
    assert "error[model_missing]" in done.err
    assert "--max-context-len-to-capture is called --max-seq-len-to-capture now." in done.err
    assert "--model-impl vllm is called --model-impl aiakq here." in done.err
