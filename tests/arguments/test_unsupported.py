"""Unsupported arguments: default values are accepted; others cause a warning or an error."""

from __future__ import annotations

import warnings

import pytest

from aiakq import LLM
from aiakq.arguments import unsupported
from aiakq.arguments.renamed import RENAMED
from aiakq.arguments.server import ARGUMENTS, checked
from aiakq.errors import AiakqError

ROWS = {row.name: row for row in unsupported.UNSUPPORTED}


def test_names_are_unique():
    names = [row.name for row in unsupported.UNSUPPORTED] + [row.name for row in (*ARGUMENTS, *RENAMED)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_accepted_with_a_line_or_refused(name):
    row = ROWS[name]
    for default in (None, False, "", *row.defaults, *map(str, row.defaults)):
        assert unsupported.notices({name: default}) == []
        assert not hasattr(checked({"model": "m", name: default}, server=True), name)
    given = {name: True if row.switch and True not in row.defaults else "something"}
    if row.refused:
        with pytest.raises(AiakqError, match=f"{row.flag}.* is not available: {row.reason}"):
            checked(given, server=True)
    else:
        assert not hasattr(checked(given, server=True), name)
        assert unsupported.notices(given) == [f"{row.flag} does nothing here: {row.reason}."]


def test_an_unknown_name_is_still_refused():
    with pytest.raises(AiakqError, match="swap_spaces.*Did you mean swap_space?"):
        checked({"swap_spaces": 3}, server=True)
    with pytest.raises(AiakqError, match="max_modellen.*Did you mean max_model_len?"):
        checked({"max_modellen": 3}, server=True)


def test_the_python_api_warns_once_each(tiny_model):
    folder = str(tiny_model("LlamaForCausalLM"))
    with pytest.warns(UserWarning, match="--swap-space does nothing here"):
        LLM(folder, swap_space=8, num_scheduler_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        LLM(folder, swap_space=4, use_v2_block_manager=False, runner="generate")
    with pytest.raises(AiakqError, match="LongLoRA"):
        LLM(folder, long_lora_scaling_factors="4.0")
