"""The keys of new files: those of llama.cpp's converter, and a config that the reader finds again."""

from __future__ import annotations

import pytest
import torch
from gguf_files import FAMILIES, originals, unpacked

from aiakq.convert.gguf.metadata import check_keys, family_for, model_keys, rotated_width, stored
from aiakq.convert.gguf.rotary import rope_tensors
from aiakq.errors import AiakqError
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model import FAMILIES as TABLES
from aiakq.formats.gguf_model.written import file_tensors
from aiakq.runtime.config.model import ModelConfig

#: Families whose original has what such files do not hold, and the setting that is named.
REFUSED = {
    "deepseek2": "mscale",
    "gemma3": "layer_kinds",
    "llama4": "attention_chunk_size",
    "starcoder2": "sliding_windows",
}
#: Keys that the converter writes otherwise: it has no length of BLOOM, and counts layers that are not read.
OTHERWISE = {"bloom.context_length", "glm4moe.block_count", "glm4moe.nextn_predict_layers"}


def written(config, shapes):
    model = ModelConfig.from_hf(config)
    name = family_for(model)
    keys = model_keys(model)
    factors = rope_tensors(model, rotated_width(TABLES[name], model)) if TABLES[name].rotary else {}
    sizes = {
        "head_dim": model.head_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
    }
    tensors = file_tensors(TABLES[name], {**model.raw, **sizes}, shapes)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    found |= {name: tuple(tensor.shape) for name, tensor in factors.items()}
    return model, keys, found, factors


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_are_those_of_the_converter_and_are_read_as_the_same_model(family, tmp_path):
    shapes = {name: tuple(shape) for name, shape in originals()[family]["shapes"].items()}
    model, keys, found, factors = written(originals()[family]["config"], shapes)
    file = GGUFFile.open(unpacked(family, tmp_path))
    theirs = {
        key: value
        for key, value in file.metadata.items()
        if key.startswith(f"{file.metadata['general.architecture']}.") and key not in OTHERWISE
    }
    ours = stored(keys)
    assert {key: ours.get(key, "none" if key.endswith("rope.scaling.type") else None) for key in theirs} == theirs
    if family in REFUSED:
        with pytest.raises(AiakqError, match=REFUSED[family]):
            check_keys(keys, model, found, lambda name: factors[name])
    else:
        config = check_keys(keys, model, found, lambda name: factors[name])
        assert ModelConfig.from_hf(config).num_layers == model.num_layers


LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "max_position_embeddings": 512},
}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
    {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
    {
        **{"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0 + 0.3 * i for i in range(16)]},
        "original_max_position_embeddings": 128,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rotary_scaling_is_read_as_it_was(scaling):
    model, keys, found, factors = written({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}, {"a.weight": (1, 1)})
    found["token_embd.weight"] = (64, 128)
    check_keys(keys, model, found, lambda name: factors[name])
    # llama3 is said by its factors alone; llama.cpp reads those of longrope with this type only.
    assert keys.get("llama.rope.scaling.type", "llama3") == scaling["rope_type"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "'truncate': False"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 4}, "OPTForCausalLM"),
    ],
)
def test_what_files_do_not_hold_is_refused_by_name(change, said):
    config = {**LLAMA, **change}
    if "ffn_dim" in change:
        del config["intermediate_size"]
    with pytest.raises(AiakqError, match=said) as refused:
        model, keys, found, factors = written(config, {})
        check_keys(keys, model, found | {"token_embd.weight": (64, 128)}, lambda name: factors[name])
    assert refused.value.id == "gguf_not_written"


def test_a_window_of_mistral_is_kept():
    config = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 4}
    for window in (64, None):
        model, keys, found, factors = written({**config, "sliding_window": window}, {})
        check_keys(keys, model, found | {"token_embd.weight": (64, 128)}, torch.zeros)
