"""Arguments of models that read images, videos or audio. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.argument import argument


@dataclass(frozen=True, kw_only=True)
class MultimodalArguments:
    """Images, videos and audios in prompts."""

    limit_mm_per_prompt: dict[str, object] | None = argument(
        None,
        'Maximum number of images, videos and audios in a prompt, as a JSON object: {"image": 4, "video": 1}. 999 if '
        "not given; 0 refuses them.",
    )
    mm_processor_kwargs: dict[str, object] | None = argument(
        None,
        "Arguments of the model's image and video processors in transformers, such as size or fps, as a JSON object.",
    )
    media_io_kwargs: dict[str, object] | None = argument(
        None,
        'How files of videos are read, as a JSON object: {"video": {"num_frames": 32, "fps": 1}}. Of an animated file, '
        "num_frames are read at even distances, at most fps in a second, and all with -1; frames that come as files "
        "are fps in a second, 1 if not given.",
    )
    language_model_only: bool = argument(
        False,
        "Do not load the encoder of images or audio: prompts are text only, and its memory is free for other use.",
    )
    allowed_local_media_path: str | None = argument(
        None, "Folder of images and audios that requests may name as file:// URLs; such URLs are refused if not given."
    )
    allowed_media_domains: list[str] | None = argument(
        None,
        "Hosts from which images and audios are fetched, as names or addresses; every public host if not given. Other "
        "addresses of this network can only be used if their host is listed.",
    )
