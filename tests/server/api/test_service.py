"""Service: what the server says that prompts may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiakq.errors import error
from aiakq.runtime.protocol.media import MediaLimits
from aiakq.server.api.service import Service
from aiakq.server.process.text_messages import Failure, Loaded


@pytest.mark.parametrize(
    ("refusal", "failure", "count"), [("", None, 4), ("no encoder", None, 0), ("", Failure.of(error("no_pillow")), 0)]
)
def test_images_that_cannot_be_preprocessed_are_not_announced(
    refusal: str, failure: Failure | None, count: int
) -> None:
    limits: Any = SimpleNamespace(limits=SimpleNamespace(media=MediaLimits(refusal, 4, 100)))
    renderer: Any = SimpleNamespace(text=SimpleNamespace(loaded=Loaded(media_failure=failure)))
    nothing: Any = None
    assert Service(limits, renderer, nothing, nothing).max_media == count
