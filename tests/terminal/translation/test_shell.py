"""Words of shell commands: quotation marks, continued lines, comments, variables; nothing is run."""

from __future__ import annotations

import shlex

import pytest

from aiakq.errors import AiakqError
from aiakq.terminal.translation.shell import EXPANSION, quoted, shown, statements


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"]),
        ("a \\\n  b \\  \n c", ["a", "b", "c"]),
        ("a # comment\n", ["a"]),
        ("$ a --json '{\"x\": [1, 2]}'", ["a", "--json", '{"x": [1, 2]}']),
        ("a > log 2>&1 &", ["a"]),
        ("a ^\n b", ["a", "b"]),
        ("a `\n b", ["a", "b"]),
        (".\\a.exe c:\\x\\y", [".\\a.exe", "c:\\x\\y"]),
        ('a "\\"b\\"" ""', ["a", '"b"', ""]),
        ("X=1; a $X ${X} ${Y:-2} '$X'", ["a", "1", "1", "2", "$X"]),
        ('ARGS=(--b "c d"); a "${ARGS[@]}" e', ["a", "--b", "c d", "e"]),
        ("a b \\\n", ["a", "b"]),
    ],
)
def test_words(text, words):
    assert statements(text)[-1].words == words


def test_environments():
    first, second = statements("A=1\nexport B=2\nC=3 a\nb")
    assert (first.words, first.variables) == (["a"], {"B": "2", "C": "3"})
    assert (second.words, second.variables) == (["b"], {"B": "2"})


def test_unknown_variables_are_left_to_the_shell():
    (command,) = statements('a "$HOME/m" ${P}x $(nproc)')
    assert [shown(word) for word in command.words[1:]] == ["$HOME/m", "${P}x", "$(nproc)"]
    assert [quoted(word) for word in command.words[1:]] == ['"$HOME/m"', '"${P}x"', '"$(nproc)"']
    assert command.words[1].startswith(EXPANSION)


@pytest.mark.parametrize("word", ["a b", "$x", "a'b", '"', "{}", "", "a;b", "~x"])
def test_quoted_words_are_read_back(word):
    assert shlex.split(quoted(word)) == [word]
    assert statements(f"a {quoted(word)}")[0].words == ["a", word]


def test_a_home_folder_is_left_to_the_shell():
    assert quoted("~/a b") == "~/'a b'"


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "a $(b"])
def test_unfinished_text_does_not_hang(text):
    try:
        assert statements(text)
    except AiakqError as problem:
        assert problem.id == "usage" and "quotation mark" in problem.message
