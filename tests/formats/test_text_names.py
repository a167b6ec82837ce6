"""Names of the language model inside multimodal files, and what is beside it."""

from __future__ import annotations

import re

import pytest

from aiakq.formats.text_names import Renaming, beside_text, key_mapping, other_names, renaming, spellings

LAYER = "layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model.text_model.", "model.", ""]
)
def test_a_tensor_is_found_under_every_prefix(prefix: str) -> None:
    assert prefix + LAYER in spellings(f"model.{LAYER}")


def test_what_is_beside_the_language_model() -> None:
    inside = ["model.text_model.norm.weight", "lm_head.weight"]
    tower = ["model.vision_model.norm.weight", "model.connector.weight"]
    assert beside_text([*inside, *tower], {}) == set(tower)
    flat = ["model.norm.weight", "visual.merger.weight"]
    assert beside_text(flat, {"vision_config": {}}) == {"visual.merger.weight"}
    assert beside_text(flat, {}) == set()


@pytest.mark.parametrize(
    ("base", "name", "stored"),
    [
        ("model", "model.norm.weight", "language_model.model.norm.weight"),
        ("model", "model.norm.weight", "model.language_model.norm.weight"),
        ("transformer", "transformer.norm.weight", "model.text_model.norm.weight"),
        ("model", "lm_head.weight", "language_model.lm_head.weight"),
        ("model", "lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_name_inside_a_multimodal_file_becomes_that_of_the_model_alone(base: str, name: str, stored: str) -> None:
    mapping = key_mapping([stored, "visual.a"], base)
    found = {re.sub(pattern, own, stored) for pattern, own in mapping.items()} or {stored}
    assert found == {name} and all(not re.search(pattern, "visual.a") for pattern in mapping)


def test_names_of_transformers_and_of_files_lead_to_each_other() -> None:
    old, new = f"language_model.model.{LAYER}", f"model.language_model.{LAYER}"
    assert new in other_names(old) and old in other_names(new)
    assert new in other_names(f"model.{LAYER}") and "lm_head" in other_names("language_model.lm_head")


def test_a_renaming_goes_both_ways_and_leaves_other_names() -> None:
    names = {"model.language_model.norm.weight": "model.norm.weight", "model.visual.a": "visual.a"}
    found = renaming("model.language_model.", names)
    assert found == Renaming("model.language_model.", "model.")
    assert found.to_file(f"model.language_model.{LAYER}") == f"model.{LAYER}"
    assert found.to_model(f"model.{LAYER}") == f"model.language_model.{LAYER}"
    assert found.to_file("lm_head.weight") == "lm_head.weight" == found.to_model("lm_head.weight")


def test_names_that_disagree_are_not_renamed() -> None:
    names = {"model.language_model.a": "model.a", "model.language_model.b": "model.language_model.b"}
    assert renaming("model.language_model.", names) == Renaming()
