"""Loads what preprocesses images in the tokenizer's process."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal.processor import ImagePreprocessor
from aiakq.runtime.text.chat_template import ChatTemplate
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.process.text_messages import Loaded, Setup
from aiakq.system.channel import Failure


def load_images(
    setup: Setup, tokenizer: Tokenizer, templates: Sequence[ChatTemplate], loaded: Loaded
) -> ImagePreprocessor | None:
    """Return the preprocessor of images, and give ``templates`` the placeholder.

    Returns None for a model that reads text only, and if it cannot be loaded: requests with images then fail with
    ``loaded.image_failure``, and others do not.
    """
    if setup.images is None or setup.images.refusal:
        return None
    try:
        images = ImagePreprocessor.load(setup.images, tokenizer)
    except AiakqError as failure:
        loaded.image_failure = Failure.of(failure)
        return None
    for template in templates:
        template.image_token = images.image_token
    return images
