"""Bundled texts for calibration and evaluation without network access.

``calibration.txt`` and ``heldout.txt`` are disjoint blocks of public-domain English prose (Austen, Bryant, Burgess,
Carroll, Chesterton, Edgeworth, Melville, Doyle), one paragraph or chapter per line. ``dialogue.txt`` (conversations of
people and with assistants) and ``code.txt`` (Python, C++, SQL, JavaScript, JSON, shell, Rust) were written for aiakq
and have its license; they are for evaluation only.
"""

from importlib import resources


def text(name: str) -> str:
    """Return the bundled text ``calibration``, ``heldout``, ``dialogue`` or ``code``."""
    return (resources.files(__name__) / f"{name}.txt").read_text(encoding="utf-8")
