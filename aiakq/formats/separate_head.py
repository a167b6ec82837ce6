"""An output layer that is stored although config.json ties it to the embedding.

Merged and fine-tuned models are saved so. As in transformers 5, the stored layer counts if it differs from the
embedding; vLLM and transformers 4 use the embedding.
"""

from __future__ import annotations

import torch

from aiakq.formats.checkpoint import Checkpoint

#: Names of output layers, and last parts of the names of embeddings.
_HEADS = ("lm_head", "embed_out", "output")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings", "tok_embeddings")


def separate_head(checkpoint: Checkpoint) -> str:
    """Return the name of a stored output layer that differs from the embedding; "" if there is none.

    Reads both weights if both are stored. Raises what ``Checkpoint.tensor`` raises.
    """
    embeddings = [name for name in checkpoint.inventory if _is_embedding(name) and name not in checkpoint.beside_text]
    if not embeddings:
        return ""
    for head in _HEADS:
        if checkpoint.locate_linear(head) is not None:  # quantized, which embeddings are not
            return head
        stored = checkpoint.locate(f"{head}.weight")
        if stored is not None:
            return "" if any(_equal(checkpoint, name, stored) for name in embeddings) else head
    return ""


def remark(head: str) -> str:
    """Return the warning about a stored output layer ``head``."""
    return (
        f"the output layer {head} is stored and differs from the embedding, although config.json says "
        "tie_word_embeddings: the stored layer is used, as transformers 5 does (vLLM uses the embedding); "
        "set tie_word_embeddings to false"
    )


def _is_embedding(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return last == "weight" and module.rpartition(".")[2] in _EMBEDDINGS


def _equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    ours, theirs = checkpoint.inventory[name], checkpoint.inventory[other]
    if ours.shape != theirs.shape:
        return False
    if (ours.file, ours.offset) == (theirs.file, theirs.offset) and ours.dtype == theirs.dtype:
        return True
    a, b = checkpoint.tensor(name), checkpoint.tensor(other)
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.float(), b.float())
