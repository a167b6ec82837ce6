"""Models whose blocks cannot run one by one are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.model.skeleton import skeleton


def test_blocks_that_share_weights_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(AiakqError, match="Zamba2ForCausalLM block by block, of which some share their weights"):
        skeleton(Checkpoint.open(tiny_model("Zamba2ForCausalLM")), False, {}, tied=True)


def test_blocks_that_share_an_index_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(
        AiakqError, match="GlmMoeDsaForCausalLM block by block, of which some share the index"
    ) as caught:
        skeleton(Checkpoint.open(tiny_model("GlmMoeDsaForCausalLM")), False, {}, tied=False)
    assert caught.value.id == "unsupported"
    own = tiny_model("GlmMoeDsaForCausalLM", indexer_types=["full"] * 3)
    skeleton(Checkpoint.open(own), False, {}, tied=False)
