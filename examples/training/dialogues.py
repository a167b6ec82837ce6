"""Dialogues cut from books: consecutive speeches become the turns of a user and an assistant."""

from __future__ import annotations

import re

#: A speech in the quotation marks of the books: typographic ones, or two backquotes and two apostrophes.
SPEECH = re.compile(r"(?:``|“)\s*(.+?)\s*(?:''|”)", re.DOTALL)
#: Characters of a speech; others are fragments or monologues.
SHORTEST, LONGEST = 12, 500
#: Turns of a dialogue.
TURNS = 6
ROLES = ("user", "assistant")


def dialogues(text: str) -> list[list[dict[str, str]]]:
    """The speeches of ``text`` in order, as conversations of six turns of alternating roles."""
    speeches = [" ".join(speech.split()) for speech in SPEECH.findall(text)]
    speeches = [speech for speech in speeches if SHORTEST <= len(speech) <= LONGEST]
    return [
        [{"role": ROLES[at % 2], "content": speech} for at, speech in enumerate(speeches[start : start + TURNS])]
        for start in range(0, len(speeches) - TURNS + 1, TURNS)
    ]
