"""What is read of a sentence-transformers folder, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.pooling.sentence_transformers import DenseModule, SentenceTransformer, read_modules

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."
DENSE = {"in_features": 4, "out_features": 2, "bias": True, "activation_function": "torch.nn.modules.linear.Identity"}


def folder_with(path: Path, modules: list[tuple[str, str]], **files: Any) -> Path:
    """A folder of modules (type, path); ``files`` by name, "__" for a slash and without .json."""
    entries = [
        {"idx": number, "name": str(number), "path": at, "type": kind} for number, (kind, at) in enumerate(modules)
    ]
    for name, content in {"modules": entries, **files}.items():
        file = path / (name.replace("__", "/") + ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def usual(path: Path, pooling: Any, *more: tuple[str, str], **files: Any) -> Path:
    modules = [(OLD + "Transformer", ""), (OLD + "Pooling", "1_Pooling"), *more]
    return folder_with(path, modules, **{"1_Pooling__config": pooling, **files})


def test_a_folder_without_modules_is_none_of_theirs(tmp_path):
    assert read_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "LAST"),
        ({"pooling_mode_cls_token": True}, "CLS"),
        ({"pooling_mode_mean_tokens": True}, "MEAN"),
        ({"word_embedding_dimension": 8}, "MEAN"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "LAST"),
        ({"pooling_mode": ["cls"]}, "CLS"),
        ({"pooling_mode_max_tokens": True}, "MAX"),
        ({"pooling_mode_weightedmean_tokens": True}, "WEIGHTEDMEAN"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "MEAN_SQRT_LEN"),
    ],
)
def test_kinds_of_pooling(config, expected, tmp_path):
    assert read_modules(usual(tmp_path, config)) == SentenceTransformer(expected, normalize=False)


def test_normalize_dense_and_the_longest_text(tmp_path):
    more = ((NEW + "Dense", "2_Dense"), (NEW + "Normalize", "3_Normalize"))
    files = {"2_Dense__config": DENSE | {"use_residual": False}, "sentence_bert_config": {"max_seq_length": 77}}
    found = read_modules(usual(tmp_path, {"pooling_mode": "mean"}, *more, **files))
    assert found == SentenceTransformer("MEAN", True, (DenseModule("2_Dense", 4, 2, True, "Identity"),), 77)


@pytest.mark.parametrize(("stated", "expected"), [(55, 55), (10**30, None), (1e30, None), (None, None)])
def test_the_tokenizer_may_say_how_long_texts_are(stated, expected, tmp_path):
    found = read_modules(usual(tmp_path, {"pooling_mode": "mean"}, tokenizer_config={"model_max_length": stated}))
    assert found is not None and found.max_length == expected


@pytest.mark.parametrize(
    ("pooling", "more", "files", "named"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), {}, "mean_tokens and cls_token"),
        ({"pooling_mode": "median"}, (), {}, "median"),
        ({"pooling_mode": ["cls", "mean"]}, (), {}, "pooling_mode"),
        ({"pooling_mode": "mean", "include_prompt": False}, (), {}, "include_prompt"),
        ({"pooling_mode": "mean"}, ((OLD + "LayerNorm", "2_LayerNorm"),), {}, "LayerNorm"),
        ({"pooling_mode": "mean"}, ((OLD + "Normalize", ""), (OLD + "Dense", "3_Dense")), {}, "Dense behind Normalize"),
        ({"pooling_mode": "mean"}, (), {"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case"),
        ({"pooling_mode": "mean"}, (), {"sentence_bert_config": {"transformer_task": "fill-mask"}}, "fill-mask"),
        (
            {"pooling_mode": "mean"},
            (),
            {"sentence_bert_config": {"modality_config": {"text": {"method_output_name": "pooler_output"}}}},
            "pooler_output",
        ),
        (
            {"pooling_mode": "mean"},
            ((OLD + "Dense", "2_Dense"),),
            {"2_Dense__config": DENSE | {"activation_function": "torch.nn.modules.activation.Softplus"}},
            "Softplus",
        ),
        (
            {"pooling_mode": "mean"},
            ((OLD + "Dense", "2_Dense"),),
            {"2_Dense__config": DENSE | {"use_residual": True}},
            "use_residual",
        ),
        (
            {"pooling_mode": "mean"},
            ((OLD + "Dense", "2_Dense"),),
            {"2_Dense__config": DENSE | {"module_input_name": "token_embeddings"}},
            "token_embeddings",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(pooling, more, files, named, tmp_path):
    with pytest.raises(AiakqError) as caught:
        read_modules(usual(tmp_path, pooling, *more, **files))
    assert caught.value.id == "unsupported" and named in str(caught.value)


@pytest.mark.parametrize(
    "modules", [[], [(OLD + "Transformer", "0_Transformer"), (OLD + "Pooling", "1_Pooling")], [(OLD + "CLIPModel", "")]]
)
def test_other_models_are_refused(modules, tmp_path):
    with pytest.raises(AiakqError) as caught:
        read_modules(folder_with(tmp_path, modules))
    assert caught.value.id == "unsupported"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules", "{"),
        ("modules", {}),
        ("modules", [1]),
        ("modules", [{"type": "a.Transformer", "path": "../x"}]),
        ("modules", [{"type": "a.Transformer", "path": "/etc"}]),
        ("1_Pooling__config", []),
        ("sentence_bert_config", {"max_seq_length": -1}),
        ("sentence_bert_config", {"max_seq_length": "many"}),
        ("2_Dense__config", {"in_features": 4, "out_features": "2"}),
    ],
)
def test_damaged_files_are_named(name, content, tmp_path):
    folder = usual(tmp_path, {"pooling_mode": "mean"}, (OLD + "Dense", "2_Dense"), **{"2_Dense__config": DENSE})
    (folder / (name.replace("__", "/") + ".json")).write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    with pytest.raises(AiakqError) as caught:
        read_modules(folder)
    assert caught.value.id == "model_malformed"
