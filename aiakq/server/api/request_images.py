"""RequestImages: the files of the images and videos of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.multimodal.offline import check_counts
from aiakq.runtime.multimodal.urls import ImageUrls, is_fetched
from aiakq.runtime.protocol.media import MediaItem, MediaLimits
from aiakq.runtime.text.image_parts import ImagePart, ImageSource
from aiakq.server.http.body_budget import image_bytes
from aiakq.server.process.text_client import client_of_request
from aiakq.server.process.text_messages import ImageFile

#: Largest size of all image files of a request.
MAX_BYTES = 128 << 20
#: Images that are fetched for a client at a time, each for up to ``urls.MAX_SECONDS``.
MAX_FETCHES = 16


class RequestImages:
    """Reads images by their URLs, see ``ImageUrls``."""

    def __init__(self, media_path: str | None, domains: Sequence[str]) -> None:
        self._urls = ImageUrls(media_path, domains)
        self._fetches: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by client

    async def read(self, images: Sequence[ImagePart], limits: MediaLimits) -> list[ImageFile]:
        """Return the files of ``images``, one after the other.

        Raises ``unsupported_parameter`` for a model that reads text only, ``media_refused`` for too many images, too
        large ones, ``bodies_too_large``, and what ``ImagePart.source`` and ``ImageUrls.read`` refuse.
        """
        if limits.refusal:
            raise images[0].refused(limits.refusal)
        sources = [image.source() for image in images]
        check_counts(limits, sources)
        files: list[ImageFile] = []
        total = 0
        for source in sources:
            file = await self._file(source)
            total += file.num_bytes
            if total > MAX_BYTES:
                raise refused(
                    source.param, f"the images and videos of the request are larger than {MAX_BYTES >> 20} MiB together"
                )
            _hold(total, source.param)
            files.append(file)
        return files

    async def _file(self, source: ImageSource) -> ImageFile:
        if not is_fetched(source.url):
            if source.is_video:
                frames = await asyncio.to_thread(self._urls.read_video, source.url, source.param)
                return ImageFile(b"", source.param, frames)
            return ImageFile(await asyncio.to_thread(self._urls.read, source.url, source.param), source.param)
        fetches = self._fetches.setdefault(client_of_request.get(), asyncio.Semaphore(MAX_FETCHES))
        async with fetches:
            fetched = await self._urls.fetch(source.url, source.param)
        return ImageFile(b"", source.param, [fetched]) if source.is_video else ImageFile(fetched, source.param)


def hold_bytes(num_bytes: int, param: str) -> None:
    """Count bytes of media of the current request, in place of those that counted before. Raises as
    ``ImageBytes.hold``.
    """
    _hold(num_bytes, param)


def hold_pixels(media: Sequence[MediaItem]) -> None:
    """Count the pixels of the current request, whose files are not needed any more. Raises as ``ImageBytes.hold``."""
    _hold(sum(item.num_bytes for item in media), "messages")


def _hold(num_bytes: int, param: str) -> None:
    if (held := image_bytes.get()) is not None:
        held.hold(num_bytes, param)
