"""``aiakq translate``: the command first, then what became of each option; the exit code says whether all is kept."""

from __future__ import annotations

import json

from aiakq.errors import GATE


def test_the_command_is_the_first_line(process):
    done = process("translate", "vllm serve org/model -tp 2 --swap-space 8 --port 9000 --host localhost")
    assert done.code == 0 and done.err == ""
    assert done.out.splitlines()[0] == "aiakq serve org/model --tensor-parallel-size 2 --port 9000 --host localhost"
    assert "--swap-space 8" in done.out and "nothing is swapped" in done.out


def test_what_changes_answers_sets_the_exit_code(process):
    done = process("translate", "--json", "llama-server -m x.gguf --mirostat 2 -fa on")
    document = json.loads(done.out)
    assert done.code == GATE and not document["complete"] and document["tool"] == "llama-server"
    assert document["words"][:3] == ["aiakq", "serve", "x.gguf"]
    statuses = {row["option"]: row["status"] for row in document["options"]}
    assert statuses["-m x.gguf"] == "kept" and statuses["--mirostat 2"] == "lost" and statuses["-fa on"] == "ignored"


def test_other_commands_are_refused(process):
    done = process("translate", "ls -l")
    assert done.code == 2 and done.err.count("\n") == 1 and "'ls -l' starts no server that is known" in done.err
    assert process("translate", "").code == 2 and process("translate").code == 2
