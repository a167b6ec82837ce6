"""Arguments of models that pool prompts, with vLLM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aiakq.arguments.argument import argument


@dataclass(frozen=True, kw_only=True)
class PoolingArguments:
    """The task of the model, and how it pools prompts if it does not generate text."""

    task: Literal["auto", "generate", "embed", "embedding", "classify", "score", "reward", "transcription"] = argument(
        "auto",
        "Task of the model. generate: text generation; embed (or embedding): an embedding per text; classify: "
        "probabilities of labels; score: one score per pair of texts; reward: a reward per token; transcription: the "
        "text of audio. auto: according to the model's files.",
    )
    runner: Literal["auto", "generate", "pooling"] = argument(
        "auto",
        "vLLM's newer name for --task. generate: --task generate; pooling: the task of the model's files, or embed; "
        "auto: --task decides.",
    )
    convert: Literal["auto", "none", "embed", "classify"] = argument(
        "auto",
        "vLLM's newer name for --task of a model that pools. embed: --task embed; classify: --task classify, or score "
        "for a model with one label; auto and none: --task or --runner decides.",
    )
    override_pooler_config: dict[str, object] | None = argument(
        None,
        "Overrides of the model's pooling settings for embeddings or scores, as a JSON object with pooling_type (LAST, "
        "CLS, MEAN, MAX, WEIGHTEDMEAN, MEAN_SQRT_LEN, ALL, STEP), task (embed, classify, token_embed, token_classify), "
        "normalize, softmax, use_activation and step_tag_id.",
        flags=("--override-pooler-config", "--pooler-config"),
    )
