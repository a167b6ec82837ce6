"""Options of other servers on the command line: not in the help, and said to do nothing or refused."""

from __future__ import annotations


def test_they_are_taken_and_not_shown(process):
    assert "--swap-space" not in process("serve", "--help").out
    done = process("serve", "./no-such-model", "--swap-space", "8", "--enable-lora-bias", "--task", "generate")
    assert "--swap-space does nothing here: nothing is swapped" in done.err
    assert "--enable-lora-bias does nothing here" in done.err
    assert "--task" not in done.err and "error[model_missing]" in done.err


def test_what_there_is_not_is_refused_in_one_line(process):
    done = process("serve", "./no-such-model", "--enable-lora")
    assert done.code == 2
    assert done.err.strip() == (
        "aiakq: error[option_refused]: --enable-lora is not available: LoRA adapters are not built yet. Leave it out."
    )
