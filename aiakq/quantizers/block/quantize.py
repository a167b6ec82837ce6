"""Applies a recipe to one block: transforms first, then the rounder."""

from __future__ import annotations

from aiakq.quantizers.block.decoder_block import DecoderBlock
from aiakq.quantizers.recipe import Recipe


def quantize_block(recipe: Recipe, block: DecoderBlock) -> None:
    """Transform and round every linear of ``block``, which is modified.

    If a transform needs large statistics, experts are transformed a few at a time, after the rest of the block. If a
    transform reports that it made the block worse, the block is restored and only rounded.
    """
    guarded = [(transform, transform.guard(block)) for transform in recipe.transforms if recipe.rounder.restartable]
    before = {}
    if any(guard is not None for _, guard in guarded):
        storage = block.plan.storage
        before = {name: value.data.to(storage, copy=True) for name, value in block.module.named_parameters()}
    if recipe.rounder.by_parts and any(transform.by_parts for transform in recipe.transforms):
        for part in block.parts():
            for transform in recipe.transforms:
                transform.apply(block, part)
            recipe.rounder.round(block, part)
    else:
        for transform in recipe.transforms:
            for part in block.parts() if transform.by_parts else [block.whole]:
                transform.apply(block, part)
        recipe.rounder.round(block, block.whole)
    for transform, guard in guarded:
        reason = guard() if guard is not None else None
        if reason is not None:
            block.restore(before)
            recipe.rounder.round(block, block.whole)
            for name in block.linears:
                block.result.remarks[name] = {transform.name: "not applied"}
            block.result.warnings.append(
                f"{block.prefix} was quantized without {transform.name}: {reason} on a sample."
            )
            return
