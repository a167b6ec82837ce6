"""Which other programs can load the checkpoints that aiakq writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Readers:
    """How transformers and vLLM read a checkpoint in some format.

    packages           packages that transformers requires; None if it does not read the format.
    transformers_note  a sentence on how transformers reads it; "" for none.
    vllm               whether vLLM reads it.
    vllm_note          a sentence on how vLLM reads it, or why not; "" for none.
    """

    packages: str | None = None
    transformers_note: str = ""
    vllm: bool = False
    vllm_note: str = "vLLM does not read this format."


#: Limitation of transformers with experts in a format other than compressed-tensors.
EXPERTS_NOT_FOUND = "transformers 5.23 does not find the experts in such files; use aiakq or vLLM."


def experts_note(format: str) -> str:
    """Return what transformers does with fused experts in a format other than compressed-tensors."""
    return (
        f"aiakq reads this model, but transformers 5.23 does not know experts in {format} files and fills them with "
        "random numbers; it reads those of --format compressed-tensors."
    )
