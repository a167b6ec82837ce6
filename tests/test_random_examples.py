"""Examples of hypothesis are the same in every run of the suite, and more and random ones with ``--fuzz``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import USUAL, examples, load_profile

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def profile(request) -> Iterator[None]:
    yield
    load_profile(request.config.getoption("--fuzz"))


def drawn() -> list[int]:
    """The examples of a test that is made under the current profile and does not say how many."""
    numbers: list[int] = []

    @given(st.integers(0, 2**60))
    def test(number: int) -> None:
        numbers.append(number)

    test()
    return numbers


def test_the_suite_draws_the_same_examples_every_time():
    load_profile(None)
    assert examples(80) == 80 and settings.default.deadline is None
    first = drawn()
    assert first == drawn() and len(first) == USUAL


def test_fuzzing_draws_more_and_others():
    load_profile(3)
    assert examples(80) == 240 and settings.default.deadline is None
    first = drawn()
    assert first != drawn() and len(first) == 3 * USUAL


def test_tests_leave_seed_and_deadline_to_the_profile():
    own = re.compile(r"\bderandomize=|\bdeadline=(?!None)|max_examples=(?!examples\()")
    files = [
        path
        for path in HERE.glob("**/test_*.py")
        if "hypothesis" in path.read_text() and path.name != Path(__file__).name
    ]
    assert len(files) > 10
    assert [path.name for path in files if own.search(path.read_text())] == []
