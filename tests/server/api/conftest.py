"""A server of a model that reasons and calls tools as scripted in chat_scripts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_scripts import ARGUMENTS, SCRIPTS, SPECIAL, TEMPLATE
from reciting_model import write_model

from aiakq.server.background import RunningServer, start_in_background


@pytest.fixture(scope="session")
def reciting_model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "scripted"
    write_model(folder, SCRIPTS, TEMPLATE, SPECIAL)
    return str(folder)


@pytest.fixture(scope="session")
def scripted(reciting_model) -> Iterator[RunningServer]:
    """Shared by tests that do not change its state. Its parsers are found from its template: hermes and qwen3."""
    with start_in_background({"model": reciting_model, **ARGUMENTS}, timeout=240) as running:
        yield running
