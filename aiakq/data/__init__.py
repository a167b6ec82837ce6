"""Bundled texts for calibration and evaluation without network access.

``calibration.txt`` and ``heldout.txt`` are disjoint blocks of public-domain English prose (Austen, Bryant, Burgess,
Carroll, Chesterton, Edgeworth, Melville, Doyle), one paragraph or chapter per line.
"""

from importlib import resources


def text(name: str) -> str:
    """Return the bundled text ``calibration`` or ``heldout``."""
    return (resources.files(__name__) / f"{name}.txt").read_text(encoding="utf-8")
