"""Rotary parameters of config.json files that leave them out: those of transformers' classes."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import TINY
from transformers import CONFIG_MAPPING

from aiakq.errors import AiakqError
from aiakq.runtime.config.rope import rope_parameters

#: Their positions are not rotary, or have no base in their config.
OTHERS = {"opt", "gptj", "bloom", "mpt", "gpt2", "gpt_bigcode", "mamba2"}


def bases(rope: dict[str, Any]) -> set[tuple[str, float]]:
    """The base of each kind of layers."""
    if "rope_theta" in rope:
        rope = dict.fromkeys(("full_attention", "sliding_attention"), rope)
    return {(kind, part["rope_theta"]) for kind, part in rope.items()}


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in TINY.values()} - OTHERS))
def test_what_a_file_leaves_out_is_what_its_class_has(kind: str) -> None:
    assert bases(rope_parameters({"model_type": kind})) == bases(CONFIG_MAPPING[kind]().rope_parameters)


@pytest.mark.parametrize("base", [float("nan"), float("inf"), -1.0])
def test_bases_that_are_no_numbers_are_refused(base: float) -> None:
    with pytest.raises(AiakqError) as caught:
        rope_parameters({"model_type": "llama", "rope_theta": base})
    assert caught.value.id == "model_malformed" and "rope_theta" in str(caught.value)
