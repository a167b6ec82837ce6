"""How many examples hypothesis draws, and from which seed.

A run of the suite draws the same examples every time: whether a commit passes is not left to luck. ``pytest --fuzz N``,
which ``make fuzz`` uses, draws N times as many from a random seed, and prints how to reproduce what fails.
"""

from __future__ import annotations

from hypothesis import settings

#: Examples of a test that does not say how many.
USUAL = 200


def load_profile(factor: int | None) -> None:
    """Draw the same examples in every run, or, with a ``factor``, that many times as many random ones.

    To be called before tests are imported: their own settings complete the profile's.
    """
    # No deadline: the time of an example on a busy machine says nothing. Nor does what failed in another run.
    common = {"parent": settings.get_profile("default"), "deadline": None, "database": None}
    settings.register_profile("suite", **common, derandomize=True, max_examples=USUAL)
    settings.register_profile("fuzz", **common, derandomize=False, max_examples=USUAL * (factor or 1), print_blob=True)
    settings.load_profile("suite" if factor is None else "fuzz")


def examples(count: int) -> int:
    """Return how many examples a test draws that draws ``count`` in a run of the suite."""
    return count * settings.default.max_examples // USUAL
