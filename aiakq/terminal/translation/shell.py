"""The words of a shell command: quoting, continued lines, comments, assignments, and variables.

Nothing is executed. A variable that the text itself sets is replaced; any other stays, marked with EXPANSION in place
of its dollar sign, and is written back with double quotes, so that a shell replaces it later.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiakq.errors import error

#: Stands for a dollar sign that a shell expands, a character of Unicode's private area.
EXPANSION = "\ue024"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?::?-([^}]*))?\})")
#: Ends of lines that continue: of POSIX shells, of cmd.exe and of PowerShell.
_CONTINUED = re.compile(r"[\\^`][ \t]*\r?\n")
_PROMPT = re.compile(r"^\s*[$#%>]\s+(?=\S)", re.MULTILINE)
_OPERATORS = "&|;()\n"


#: Separates the entries of an array that replaces a variable.
_ENTRY = "\ue001"
#: Text of a shell of Windows, where a backslash is a part of paths.
_WINDOWS = re.compile(r"\.exe\b|[ \t][`^][ \t]*\r?\n|\s\.\\\s|\s[A-Za-z]:\\", re.IGNORECASE)


@dataclass
class Statement:
    """One command. ``variables`` are those of its environment that the text sets."""

    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def statements(text: str) -> list[Statement]:
    """Return the commands of a text. Raises ``usage`` for a quotation mark without a second one."""
    known: dict[str, str] = {}
    exported: dict[str, str] = {}
    found = []
    reader = _Reader(_CONTINUED.sub(" ", _PROMPT.sub("", text)), known, bool(_WINDOWS.search(text)))
    for words in reader.commands():
        exports = words[0] in ("export", "set", "declare")
        rest = words[1:] if exports or words[0] == "env" else list(words)
        assigned = {}
        while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
            assigned[match[1]] = match[2]
            rest.pop(0)
        if exports or not rest:
            known.update(assigned)
            exported.update(assigned if exports else {})
        else:
            found.append(Statement(rest, {**exported, **assigned}))
    return found


class _Reader:
    """Reads a text from left to right; assignments of finished commands are in ``known``."""

    def __init__(self, text: str, known: dict[str, str], windows: bool = False) -> None:
        self._text, self._known, self._position, self._windows = text, known, 0, windows
        self._words: list[str] = []
        self._word: str | None = None

    def commands(self) -> Iterator[list[str]]:
        """Return the words of each command."""
        while self._position < len(self._text):
            letter = self._text[self._position]
            self._position += 1
            if letter == "(" and self._word is not None and self._word.endswith("="):
                self._word += self._array()
            elif letter in _OPERATORS:
                self._end_word()
                yield from self._end_command()
            elif letter.isspace():
                self._end_word()
            elif letter == "#" and self._word is None:
                self._skip_to("\n")
            elif letter == "\\" and not self._text[self._position :].strip():
                break
            elif letter in "<>":
                self._redirect()
            else:
                self._word = (self._word or "") + self._part(letter)
        self._end_word()
        yield from self._end_command()

    def _array(self) -> str:
        """Return the entries of an array, up to its closing parenthesis."""
        inner = _Reader(self._until(")"), self._known, self._windows)
        return _ENTRY.join(word for words in inner.commands() for word in words)

    def _end_word(self) -> None:
        if self._word is not None:
            is_array = bool(_ASSIGNMENT.fullmatch(self._word))
            self._words += [self._word] if is_array else self._word.split(_ENTRY)
            self._word = None

    def _end_command(self) -> Iterator[list[str]]:
        words, self._words = self._words, []
        if words:
            yield words

    def _part(self, letter: str) -> str:
        """Return what a letter outside quotation marks, and what follows it, stands for."""
        if letter == "'":
            return self._until("'")
        if letter == '"':
            return self._quoted()
        if letter == "\\" and not self._windows:
            return self._next()
        return self._dollar() if letter == "$" else letter

    def _next(self) -> str:
        letter = self._text[self._position : self._position + 1]
        self._position += 1
        return letter

    def _until(self, mark: str) -> str:
        end = self._text.find(mark, self._position)
        if end < 0:
            raise error("usage", reason=f"A quotation mark {mark} has no second one.", hint="Quote the whole command.")
        found = self._text[self._position : end]
        self._position = end + 1
        return found

    def _quoted(self) -> str:
        parts = []
        while (letter := self._next()) != '"':
            if not letter:
                raise error("usage", reason='A quotation mark " has no second one.', hint="Quote the whole command.")
            if (
                letter == "\\"
                and not self._windows
                and self._text[self._position : self._position + 1] in ("\\", '"', "$", "`")
            ):
                parts.append(self._next())
            else:
                parts.append(self._dollar() if letter == "$" else letter)
        return "".join(parts)

    def _dollar(self) -> str:
        """Return the value of the variable, or the expression, after a dollar sign."""
        start = self._position - 1
        if match := _VARIABLE.match(self._text, start):
            self._position = match.end()
            name = match[1] or match[2]
            value = self._known.get(name, match[3])
            return EXPANSION + match[0][1:] if value is None else value.replace("$", EXPANSION)
        if self._text.startswith("(", self._position):
            depth, end = 0, self._position
            while end < len(self._text):
                depth += {"(": 1, ")": -1}.get(self._text[end], 0)
                end += 1
                if depth == 0:
                    break
            found, self._position = self._text[self._position : end], end
            return EXPANSION + found
        if self._text.startswith("{", self._position):
            end = self._text.find("}", self._position) + 1 or len(self._text)
            found, self._position = self._text[self._position : end], end
            name = re.fullmatch(r"\{(\w+)\[[@*]\]\}", found)
            return self._known[name[1]] if name and name[1] in self._known else EXPANSION + found
        return "$"

    def _redirect(self) -> None:
        """Leave out a redirection and the file that it names."""
        if self._word is not None and self._word.isdecimal():
            self._word = None
        self._end_word()
        while self._text[self._position : self._position + 1] in ("<", ">", "&", "|", " "):
            self._position += 1
        while self._position < len(self._text) and not self._text[self._position].isspace():
            if self._text[self._position] in _OPERATORS:
                break
            self._position += 1

    def _skip_to(self, mark: str) -> None:
        end = self._text.find(mark, self._position)
        self._position = len(self._text) if end < 0 else end


def quoted(word: str) -> str:
    """Return a word as a shell reads it, with its variables expanded by the shell."""
    if EXPANSION not in word:
        return "~/" + shlex.quote(word[2:]) if re.match("~/.", word) else shlex.quote(word)
    escaped = re.sub(r'([\\"`$])', r"\\\1", word)
    return '"' + escaped.replace(EXPANSION, "$") + '"'


def shown(word: str) -> str:
    """Return a word for messages."""
    return word.replace(EXPANSION, "$")
