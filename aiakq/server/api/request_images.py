"""RequestImages: the files of the images of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.multimodal.urls import ImageUrls
from aiakq.runtime.protocol.media import MediaLimits
from aiakq.runtime.text.image_parts import ImagePart
from aiakq.server.process.text_messages import ImageFile

#: Largest size of all image files of a request.
MAX_BYTES = 128 << 20


class RequestImages:
    """Reads images by their URLs, see ``ImageUrls``."""

    def __init__(self, media_path: str | None, domains: Sequence[str]) -> None:
        self._urls = ImageUrls(media_path, domains)

    async def read(self, images: Sequence[ImagePart], limits: MediaLimits) -> list[ImageFile]:
        """Return the files of ``images``, one after the other.

        Raises ``unsupported_parameter`` for a model that reads text only, ``media_refused`` for too many images, too
        large ones, and what ``ImagePart.source`` and ``ImageUrls.read`` refuse.
        """
        if limits.refusal:
            raise images[0].refused(limits.refusal)
        sources = [image.source() for image in images]
        limits.check_count(len(sources), sources[-1].param)
        files: list[ImageFile] = []
        total = 0
        for source in sources:
            data = await asyncio.to_thread(self._urls.read, source.url, source.param)
            total += len(data)
            if total > MAX_BYTES:
                raise refused(source.param, f"the images of the request are larger than {MAX_BYTES >> 20} MiB together")
            files.append(ImageFile(data, source.param))
        return files
