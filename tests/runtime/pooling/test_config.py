"""The pooling of a model by --task, config.json and --override-pooler-config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError
from aiakq.runtime.pooling.config import PoolingConfig
from aiakq.runtime.protocol.pooling_params import Pooling

EMBEDDING = Pooling("LAST", normalize=True)


def config_of(folder: Path, raw: dict[str, Any], **args: Any) -> PoolingConfig | None:
    return PoolingConfig.from_args(EngineArguments(**args), folder, raw)


def pooled(folder: Path, architecture: str, task: str = "auto", **raw: Any) -> PoolingConfig:
    found = config_of(folder, {"architectures": [architecture], **raw}, task=task)
    assert found is not None
    return found


def refusal(folder: Path, architecture: str, task: str = "auto", override: Any = None, **raw: Any) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        config_of(folder, {"architectures": [architecture], **raw}, task=task, override_pooler_config=override)
    return caught.value


@pytest.mark.parametrize(
    ("architecture", "task", "family"),
    [
        ("LlamaForCausalLM", "generate", ""),
        ("GPT2LMHeadModel", "generate", ""),
        ("ChatGLMModel", "generate", ""),
        ("MistralModel", "embed", "MistralForCausalLM"),
        ("GPT2Model", "embed", "GPT2LMHeadModel"),
        ("Gemma3TextModel", "embed", "Gemma3ForCausalLM"),
        ("LlamaForSequenceClassification", "classify", "LlamaForCausalLM"),
        ("GPT2ForSequenceClassification", "classify", "GPT2LMHeadModel"),
    ],
)
def test_the_class_says_what_a_model_is_for(architecture, task, family, tmp_path):
    found = config_of(tmp_path, {"architectures": [architecture]})
    assert ("generate" if found is None else found.limits.task) == task
    assert found is None or (found.architecture, found.stated) == (family, architecture)


def test_files_of_sentence_transformers_make_an_embedding_model(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    found = pooled(tmp_path, "Qwen3ForCausalLM")
    assert found.limits.task == "embed" and found.limits.pooling == Pooling("MEAN")
    assert config_of(tmp_path, {"architectures": ["Qwen3ForCausalLM"]}, task="generate") is None


def test_any_language_model_embeds_on_request(tmp_path):
    for task in ("embed", "embedding"):
        found = pooled(tmp_path, "LlamaForCausalLM", task)
        assert (
            found.limits.task == "embed"
            and found.limits.pooling == EMBEDDING
            and (found.num_labels, found.label_tokens) == (0, None)
        )
    assert pooled(tmp_path, "LlamaForCausalLM", "reward").limits.pooling == Pooling("ALL")


@pytest.mark.parametrize(
    ("raw", "labels", "activation"),
    [
        ({}, 2, "softmax"),
        ({"num_labels": 5}, 5, "softmax"),
        ({"id2label": {"0": "no"}}, 1, "sigmoid"),
        ({"id2label": {"0": "no", "1": "yes"}, "problem_type": "multi_label_classification"}, 2, "sigmoid"),
        ({"id2label": {"0": "no", "1": "yes"}, "problem_type": "single_label_classification"}, 2, "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, 1, ""),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, ""),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            1,
            "sigmoid",
        ),
    ],
)
def test_labels_and_their_activation(raw, labels, activation, tmp_path):
    found = pooled(tmp_path, "LlamaForSequenceClassification", **raw)
    assert (found.num_labels, found.label_tokens) == (labels, None) and found.limits.pooling == Pooling(
        "LAST", activation=activation
    )
    assert found.limits.labels == list(raw.get("id2label", {}).values()) or [f"LABEL_{i}" for i in range(labels)]
    assert found.limits.task == ("score" if labels == 1 else "classify")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({}, EMBEDDING),
        ({"pooling_type": "mean"}, Pooling("MEAN", normalize=True)),
        ({"pooling_type": "CLS", "normalize": False}, Pooling("CLS")),
        ({"softmax": True, "normalize": None}, Pooling("LAST", normalize=True, activation="softmax")),
        ({"pooling_type": "STEP", "step_tag_id": 7}, Pooling("STEP", normalize=True, step_tag_id=7)),
        ({"task": "token_embed"}, Pooling("ALL", normalize=True)),
        ({"task": "embed", "pooling_type": "MEAN"}, Pooling("MEAN", normalize=True)),
        ({"task": "token_embed", "tok_pooling_type": "STEP", "step_tag_id": 7}, Pooling("STEP", True, step_tag_id=7)),
        ({"enable_flash_late_interaction": False, "logit_mean": 0.0, "logit_sigma": None}, EMBEDDING),
    ],
)
def test_the_operator_overrides_the_pooler(override, expected, tmp_path):
    found = config_of(tmp_path, {"architectures": ["LlamaForCausalLM"]}, task="embed", override_pooler_config=override)
    assert found is not None and found.limits.pooling == expected


@pytest.mark.parametrize(
    "override",
    [
        {"pooling_type": "MEDIAN"},
        {"pooling_type": 3},
        {"normalize": 1},
        {"returned_token_ids": [1]},
        {"step_tag_id": 7},
        {"pooling_type": "STEP"},
        {"task": "classify"},
        {"task": "token_embed", "pooling_type": "MEAN"},
        {"task": "embed", "pooling_type": "ALL"},
        {"task": 1},
        {"enable_chunked_processing": True},
        {"max_embed_len": 100},
        {"dimensions": 8},
        {"logit_mean": 0.5},
        {"logit_sigma": True},
    ],
)
def test_wrong_overrides_are_refused(override, tmp_path):
    failure = refusal(tmp_path, "LlamaForCausalLM", "embed", override)
    assert failure.id == "bad_option" and "--override-pooler-config" in str(failure)


@pytest.mark.parametrize(
    ("architecture", "task", "raw", "id", "part"),
    [
        ("LlamaForSequenceClassification", "generate", {}, "option_conflict", "no language model"),
        ("LlamaForSequenceClassification", "embed", {}, "option_conflict", "scores instead of embeddings"),
        ("LlamaForSequenceClassification", "score", {}, "option_conflict", "2 labels"),
        ("LlamaForCausalLM", "classify", {}, "option_conflict", "without labels"),
        ("LlamaForCausalLM", "score", {}, "option_conflict", "/score compares"),
        ("Qwen2ForCausalLM", "embed", {"is_causal": False}, "unsupported", '"is_causal": true'),
        ("Gemma3TextModel", "auto", {"use_bidirectional_attention": True}, "unsupported", "bidirectional attention"),
        ("LlamaForSequenceClassification", "auto", {"num_labels": 0}, "model_malformed", "num_labels"),
        ("LlamaForSequenceClassification", "auto", {"id2label": {"1": "x"}}, "model_malformed", "id2label"),
        ("LlamaForSequenceClassification", "auto", {"id2label": {}, "num_labels": 3}, "model_malformed", "id2label"),
        ("LlamaForCausalLM", "embed", {"matryoshka_dimensions": "all"}, "model_malformed", "matryoshka_dimensions"),
        (
            "LlamaForSequenceClassification",
            "auto",
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "my.own.Function"}},
            "unsupported",
            "my.own.Function",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(architecture, task, raw, id, part, tmp_path):
    failure = refusal(tmp_path, architecture, task, **raw)
    assert failure.id == id and part in str(failure), str(failure)


def test_pooling_is_refused_where_nothing_is_pooled(tmp_path):
    failure = refusal(tmp_path, "LlamaForCausalLM", "auto", {"pooling_type": "MEAN"})
    assert failure.id == "option_conflict" and "--override-pooler-config" in str(failure)
    with pytest.raises(AiakqError, match="only native models"):
        config_of(tmp_path, {"architectures": ["LlamaModel"]}, model_impl="transformers")


def test_dimensions_that_a_model_was_trained_for(tmp_path):
    assert pooled(tmp_path, "LlamaModel").limits.dimensions is None
    assert pooled(tmp_path, "LlamaModel", is_matryoshka=True).limits.dimensions == []
    assert pooled(tmp_path, "LlamaModel", matryoshka_dimensions=[64, 32]).limits.dimensions == [32, 64]


def test_a_cross_encoder_of_sentence_transformers(tmp_path):
    """As it saves them: one module, and the activation beside it, which comes before that of config.json."""
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.base.modules.Transformer", "path": ""}]')
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    modality = {"text": {"method": "forward", "method_output_name": "logits"}}
    config = {"transformer_task": "sequence-classification", "modality_config": modality, "max_seq_length": 99}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    inside = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    name = "LlamaForSequenceClassification"
    found = pooled(tmp_path, name, num_labels=1, sentence_transformers=inside)
    assert found.limits.pooling == Pooling("LAST") and found.max_length == 99
    assert pooled(tmp_path, name, num_labels=3).limits.pooling.activation == "softmax", "several are transformers'"
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    assert "feature-extraction" in str(refusal(tmp_path, name, num_labels=1))
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.LogitScore", "path": "1_LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for architecture in (name, "Qwen3ForCausalLM"):
        failure = refusal(tmp_path, architecture, num_labels=1)
        assert failure.id == "unsupported" and "Transformer, LogitScore" in str(failure)


def test_a_reranker_made_of_a_language_model(tmp_path):
    words = {"is_original_qwen3_reranker": True, "classifier_from_token": ["no", "yes"]}
    tokenizer = {"model": {"vocab": {"no": 3, "maybe": 4}}, "added_tokens": [{"content": "yes", "id": 9}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = pooled(tmp_path, "Qwen3ForSequenceClassification", **words)
    assert (
        found.limits.task == "score"
        and (found.num_labels, found.label_tokens) == (1, (3, 9))
        and found.limits.concatenates
    )
    for wrong in (
        {**words, "is_original_qwen3_reranker": False},
        {**words, "classifier_from_token": ["no"]},
        {**words, "classifier_from_token": ["no", "never seen"]},
    ):
        failure = refusal(tmp_path, "Qwen3ForSequenceClassification", **wrong)
        assert failure.id == "unsupported" and "A score of the tokens" in str(failure)
