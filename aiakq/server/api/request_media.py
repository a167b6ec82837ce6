"""RequestMedia: the files of the images, videos and audios of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.multimodal.urls import MediaUrls, is_fetched
from aiakq.runtime.protocol.media import MediaItem, MediaLimits, named_kinds
from aiakq.runtime.text.media_parts import MediaPart, MediaSource, check_read
from aiakq.server.http.body_budget import image_bytes
from aiakq.server.process.text_client import client_of_request
from aiakq.server.process.text_messages import MediaFile

#: Largest size of all media files of a request.
MAX_BYTES = 128 << 20
#: Files that are fetched for a client at a time, each for up to ``urls.MAX_SECONDS``.
MAX_FETCHES = 16


class RequestMedia:
    """Reads images, videos and audios by their URLs, see ``MediaUrls``."""

    def __init__(self, media_path: str | None, domains: Sequence[str]) -> None:
        self._urls = MediaUrls(media_path, domains)
        self._fetches: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by client

    async def read(self, media: Sequence[MediaPart], limits: MediaLimits) -> list[MediaFile]:
        """Return the files of ``media``, one after the other.

        Raises ``unsupported_parameter`` for a model that does not read them, ``media_refused`` for too many, too
        large ones, ``bodies_too_large``, and what ``MediaPart.source`` and ``MediaUrls.read`` refuse.
        """
        check_read(media, limits)
        sources = [each.source() for each in media]
        limits.check_counts((each.kind, each.param) for each in sources)
        files: list[MediaFile] = []
        total = 0
        for source in sources:
            file = MediaFile(source.kind, await self._files(source), source.param)
            total += file.num_bytes
            if total > MAX_BYTES:
                named = named_kinds(each.kind for each in sources)
                raise refused(
                    source.param, f"the {named} of the request are larger than {MAX_BYTES >> 20} MiB together"
                )
            _hold(total, source.param)
            files.append(file)
        return files

    async def _files(self, source: MediaSource) -> list[bytes]:
        if not is_fetched(source.url):
            if source.kind == "video":
                return await asyncio.to_thread(self._urls.read_video, source.url, source.param)
            return [await asyncio.to_thread(self._urls.read, source.url, source.param)]
        fetches = self._fetches.setdefault(client_of_request.get(), asyncio.Semaphore(MAX_FETCHES))
        async with fetches:
            return [await self._urls.fetch(source.url, source.param)]


def hold_bytes(num_bytes: int, param: str) -> None:
    """Count bytes of media of the current request, in place of those that counted before. Raises as
    ``ImageBytes.hold``.
    """
    _hold(num_bytes, param)


def hold_media(media: Sequence[MediaItem]) -> None:
    """Count the preprocessed media of the current request, whose files are not needed any more. Raises as
    ``ImageBytes.hold``.
    """
    _hold(sum(item.num_bytes for item in media), "messages")


def _hold(num_bytes: int, param: str) -> None:
    if (held := image_bytes.get()) is not None:
        held.hold(num_bytes, param)
