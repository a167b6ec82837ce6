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
    ("refusal", "failure", "count"),
    [("", None, {"image": 4}), ("no encoder", None, {}), ("", Failure.of(error("no_pillow")), {})],
)
def test_images_that_cannot_be_preprocessed_are_not_announced(
    refusal: str, failure: Failure | None, count: dict[str, int]
) -> None:
    limits: Any = SimpleNamespace(limits=SimpleNamespace(media=MediaLimits(refusal, {"image": 4}, 100)))
    renderer: Any = SimpleNamespace(
        text=SimpleNamespace(loaded=Loaded(media_failures={} if failure is None else {"image": failure}))
    )
    nothing: Any = None
    assert Service(limits, renderer, nothing, nothing).max_media == count


def test_videos_that_cannot_be_preprocessed_leave_images() -> None:
    media = MediaLimits("", {"image": 4, "video": 2}, 100)
    failures: Any = {"video": Failure.of(error("no_pillow"))}
    for loaded, kinds in ((Loaded(), ["image", "video"]), (Loaded(media_failures=failures), ["image"])):
        model: Any = SimpleNamespace(limits=SimpleNamespace(media=media))
        renderer: Any = SimpleNamespace(text=SimpleNamespace(loaded=loaded))
        nothing: Any = None
        assert list(Service(model, renderer, nothing, nothing).max_media) == kinds
