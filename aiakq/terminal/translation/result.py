"""Translation: a command of ``aiakq serve``, and what became of every option of the command that it replaces."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from aiakq.terminal.translation.rules import INCOMPLETE
from aiakq.terminal.translation.shell import quoted, shown

#: Stands for a model that is not available.
PLACEHOLDER = "MODEL"


@dataclass(frozen=True)
class Note:
    """What became of one option.

    option  as it was written, with its value.
    status  kept, ignored, differs or lost.
    here    the words here; empty if there are none.
    reason  why; empty for options that are kept as they are.
    """

    option: str
    status: str
    here: str = ""
    reason: str = ""


@dataclass
class Translation:
    """A command of aiakq, and notes about all options of the one that it replaces.

    tool, version  the other program, and the version whose options are known.
    model          folder or hub name; PLACEHOLDER if it is not available.
    options        option -> its values; an empty list for a switch.
    objects        option -> its JSON object.
    variables      variables in front of the command.
    """

    tool: str
    version: str
    model: str = ""
    options: dict[str, list[str]] = field(default_factory=dict)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether nothing that changes answers, or what the service offers, is missing."""
        return not any(note.status in INCOMPLETE for note in self.notes)

    @property
    def words(self) -> list[str]:
        """The command's words after the variables."""
        words = ["aiakq", "serve", self.model]
        for option, values in self.options.items():
            words += [word for value in values for word in (option, value)] or [option]
        for option, value in self.objects.items():
            words += [option, json.dumps(value, separators=(",", ":"), ensure_ascii=False)]
        return words

    @property
    def command(self) -> str:
        variables = [f"{name}={quoted(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, *map(quoted, self.words)])

    def document(self) -> dict[str, object]:
        """Return the result as JSON."""
        return {
            "schema_version": 1,
            "kind": "translation",
            "tool": self.tool,
            "tool_version": self.version,
            "complete": self.is_complete,
            "command": self.command,
            "words": list(map(shown, self.words)),
            "environment": {name: shown(value) for name, value in self.variables.items()},
            "options": [vars(note) for note in self.notes],
        }
