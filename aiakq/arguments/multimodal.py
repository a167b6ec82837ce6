"""Arguments of models that read images or audio. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.argument import argument


@dataclass(frozen=True, kw_only=True)
class MultimodalArguments:
    """Images and audios in prompts."""

    limit_mm_per_prompt: dict[str, object] | None = argument(
        None,
        'Maximum number of images and audios in a prompt, as a JSON object: {"image": 4, "audio": 2}. 999 if not '
        "given; 0 refuses them.",
    )
    mm_processor_kwargs: dict[str, object] | None = argument(
        None, "Arguments of the model's image processor in transformers, such as size, as a JSON object."
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
