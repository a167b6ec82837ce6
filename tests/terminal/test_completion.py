"""Completion scripts, in the shells they are for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aiakq.arguments.commands import COMMANDS


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    """The script of each shell, as a file."""
    folder = tmp_path_factory.mktemp("completion")
    found = {}
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "aiakq", "completion", shell]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[shell] = folder / f"aiakq.{shell}"
        found[shell].write_text(text)
    return found


def run(shell: str, *words: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, *words], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


#: What is typed, and what is offered for it: all, or at least.
CASES = [
    ("aiakq qu", {"quantize"}),
    ("aiakq bench la", {"latency"}),
    ("aiakq bench serve --request-r", {"--request-rate"}),
    ("aiakq serve --dtype flo", {"float", "float16", "float32"}),
    ("aiakq serve --log-format ", {"text", "json"}),
    ("aiakq inspect --no-such", set()),
    ("aiakq collect-env --js", {"--json"}),
]


@pytest.mark.parametrize(("typed", "offered"), CASES, ids=[typed for typed, _ in CASES])
def test_bash_completes_commands_options_and_values(scripts, typed, offered):
    words = typed.split(" ")
    names = " ".join(f"'{word}'" for word in words)
    code = f"source {scripts['bash']}; COMP_WORDS=({names}); COMP_CWORD={len(words) - 1}; _aiakq; "
    found = run("bash", "--norc", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"')
    assert set(found.split()) == offered


@pytest.mark.parametrize(("typed", "offered"), CASES, ids=[typed for typed, _ in CASES])
def test_fish_completes_commands_options_and_values(scripts, typed, offered):
    found = run("fish", "--no-config", "-c", f"source {scripts['fish']}; complete -C '{typed}'")
    assert {line.split("\t")[0] for line in found.splitlines()} == offered


def test_bash_offers_files_where_files_are_expected(scripts, tmp_path):
    (tmp_path / "options.yaml").touch()
    for words in ("aiakq serve --config opt", "aiakq inspect opt"):
        names = words.split()
        code = f"cd {tmp_path}; source {scripts['bash']}; COMP_WORDS=({words}); COMP_CWORD={len(names) - 1}; _aiakq; "
        assert run("bash", "--norc", "-c", code + 'echo "${COMPREPLY[@]}"').split() == ["options.yaml"]


def test_zsh_takes_the_script(scripts, tmp_path):
    run("zsh", "-n", str(scripts["zsh"]))
    (tmp_path / "_aiakq").write_text(scripts["zsh"].read_text())
    code = (
        f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -D -u; autoload +X _aiakq; "
        "whence -w _aiakq; print $_comps[aiakq]"
    )
    assert run("zsh", "-f", "-c", code).split() == ["_aiakq:", "function", "_aiakq"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_option_of_every_command_is_in_the_script(scripts, shell):
    text = scripts[shell].read_text()
    for command in COMMANDS.values():
        for row in command.rows:
            if not row.positional:
                flag = row.long_flag
                assert (f"-l {flag.removeprefix('--')} " if shell == "fish" else flag) in text, flag


def test_an_unknown_shell_is_refused():
    command = [sys.executable, "-m", "aiakq", "completion", "tcsh"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "bash, zsh and fish" in done.stderr and not done.stdout
