"""A tiny random Whisper."""

from __future__ import annotations

from pathlib import Path

import pytest
from speech_models import save_whisper


@pytest.fixture(scope="session")
def whisper(byte_tokenizer, tmp_path_factory) -> Path:
    """The folder of a tiny random Whisper."""
    import copy

    return save_whisper(tmp_path_factory.mktemp("whisper"), copy.deepcopy(byte_tokenizer))
