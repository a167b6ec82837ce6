"""What other programs make of files that aiakq writes, where several formats share it."""

from __future__ import annotations


def experts_note(format: str) -> str:
    """What transformers makes of fused experts in files of a format other than compressed-tensors."""
    return (
        f"aiakq reads this model, but transformers 5.23 does not know experts in {format} files and fills them with "
        "random numbers; it reads those of --format compressed-tensors."
    )
