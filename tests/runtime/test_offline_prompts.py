"""Prompts of ``LLM``: what has another meaning than it seems is refused by name, before anything is tokenized."""

from __future__ import annotations

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.runtime.offline_prompts import listed_prompts


def test_prompts_are_listed_in_every_form():
    for prompt in ("text", {"prompt": "text"}, {"prompt_token_ids": [1, 2]}, [1, 2]):
        assert listed_prompts(prompt) == [prompt] == listed_prompts([prompt]) == listed_prompts((prompt,))
    assert listed_prompts(["text", [1], {"prompt": "text"}]) == ["text", [1], {"prompt": "text"}]
    assert listed_prompts([]) == []


@pytest.mark.parametrize("value", [None, {}, []])
def test_empty_keys_of_prompts_are_accepted(value):
    prompt = {"prompt": "text", "multi_modal_data": value, "mm_processor_kwargs": {"a": 1}, "cache_salt": None}
    assert listed_prompts(prompt) == [prompt]


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (b"text", "prompts has the wrong type.* not bytes"),
        ([b"text"], r"prompts\[0\] has the wrong type.* not bytes"),
        (5, "not int"),
        (["text", None], r"prompts\[1\] .* not NoneType"),
        ((text for text in ["text"]), "not generator"),
        (torch.tensor([1, 2]), "not Tensor .*tolist"),
        ({"prompt_token_ids": torch.tensor([1, 2])}, r"prompts\[0\].prompt_token_ids .*tolist"),
        ({"prompt": None}, "prompt or prompt_token_ids"),
        ({}, "prompt or prompt_token_ids"),
        ({"prompt": ["text"]}, r"prompts\[0\].prompt .* not list"),
        ({"prompt": 5}, r"prompts\[0\].prompt .* not int"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids .* not str"),
        ({"prompt": "text", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "text", "prompt_embeds": torch.zeros(2, 3)}, "prompt_embeds is not supported"),
        ({"prompt": "text", "promt_token_ids": [1]}, "promt_token_ids is not supported"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "encoder_prompt is not supported"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompts, named):
    with pytest.raises(AiakqError, match=named):
        listed_prompts(prompts)


def test_arguments_for_the_images_of_one_prompt_are_a_dict():
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": object()}, "mm_processor_kwargs": [1]}
    with pytest.raises(AiakqError, match=r"prompts\[0\].mm_processor_kwargs"):
        listed_prompts([prompt])
