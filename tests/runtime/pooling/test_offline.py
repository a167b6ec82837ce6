"""Embeddings and scores of ``LLM``: equal to transformers and to sentence-transformers' formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq import LLM, PoolingParams
from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint

TEXTS = ["The first text", "another text, which is a bit longer than others", "x"]


def _loaded(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 20, **arguments})


def _states(folder: Path, texts: list[str]) -> list[torch.Tensor]:
    """transformers' last hidden states [T, D] of each text."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]


def _embeddings(llm: LLM, texts: list[str], **params: Any) -> torch.Tensor:
    found = llm.embed(texts, use_tqdm=False, pooling_params=PoolingParams(**params))
    return torch.tensor([result.outputs.embedding for result in found])


def _normal(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, p=2, dim=1)


@pytest.fixture
def sentence_model(tiny_model, tmp_path) -> Path:
    """A folder as sentence-transformers writes it: mean, a linear layer with tanh, length 1."""
    for path in tiny_model("LlamaForCausalLM").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": n, "path": at, "type": f"sentence_transformers.models.{kind}"}
        for n, (at, kind) in enumerate(kinds.items())
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for name in list(kinds)[1:]:
        (tmp_path / name).mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    dense = {
        "in_features": 128,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    torch.manual_seed(3)
    tensors = {"linear.weight": torch.randn(24, 128) / 9, "linear.bias": torch.randn(24) / 9}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 60, "do_lower_case": false}')
    return tmp_path


def _sentence_formula(folder: Path, texts: list[str]) -> torch.Tensor:
    from safetensors.torch import load_file

    dense = load_file(folder / "2_Dense" / "model.safetensors")
    means = torch.stack([states.mean(0) for states in _states(folder, texts)])
    return _normal(torch.tanh(means @ dense["linear.weight"].T + dense["linear.bias"]))


def test_embeddings_are_those_of_sentence_transformers(sentence_model):
    llm = _loaded(sentence_model, max_model_len=None)
    assert llm.config.max_model_len == 60 and llm.engine.limits.task == "embed"
    assert llm.engine.facts["task"] == "embed, MEAN, normalized: 24 numbers"
    torch.testing.assert_close(_embeddings(llm, TEXTS), _sentence_formula(sentence_model, TEXTS), rtol=1e-4, atol=1e-5)
    with pytest.raises(AiakqError) as caught:
        llm.embed("y" * 61, use_tqdm=False)
    assert caught.value.id == "context_length_exceeded"


def test_a_quantized_model_keeps_its_modules(sentence_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "out"
    quantize_checkpoint(QuantizeOptions(str(sentence_model), str(out), "weight_only_int8", evaluate=False))
    expected = _sentence_formula(sentence_model, TEXTS)
    found = _embeddings(_loaded(out), TEXTS)
    assert found.shape == (3, 24) and bool((torch.cosine_similarity(found, expected) > 0.99).all())


def test_a_damaged_dense_module_is_named(sentence_model):
    save_file({"linear.weight": torch.zeros(24, 127)}, sentence_model / "2_Dense" / "model.safetensors")
    with pytest.raises(AiakqError, match="2_Dense") as caught:
        _loaded(sentence_model)
    assert caught.value.id == "tensor_mismatch"
    config = json.loads((sentence_model / "2_Dense" / "config.json").read_text())
    (sentence_model / "2_Dense" / "config.json").write_text(json.dumps(config | {"in_features": 127, "bias": False}))
    with pytest.raises(AiakqError, match="127 inputs") as caught:
        _loaded(sentence_model)
    assert caught.value.id == "model_malformed"


def test_dimensions_are_cut_before_the_length_is_made_one(tiny_model):
    folder = tiny_model("Qwen3ForCausalLM")
    llm = _loaded(folder, task="embed", hf_overrides={"matryoshka_dimensions": [16, 64]})
    last = torch.stack([states[-1] for states in _states(folder, TEXTS)])
    torch.testing.assert_close(_embeddings(llm, TEXTS), _normal(last), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_embeddings(llm, TEXTS, dimensions=16), _normal(last[:, :16]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_embeddings(llm, TEXTS, normalize=False), last, rtol=1e-4, atol=1e-4)
    with pytest.raises(AiakqError, match="one of 16, 64"):
        _embeddings(llm, TEXTS, dimensions=17)


def test_forms_of_prompts_and_truncation(tiny_model):
    llm = _loaded(tiny_model("Qwen3ForCausalLM"), task="embed")
    ids = llm.get_tokenizer()(TEXTS[0])["input_ids"]
    expected = llm.encode(TEXTS[0], use_tqdm=False)[0]
    assert expected.outputs.data.dtype == torch.float32 and expected.prompt_token_ids == ids and expected.finished
    for prompts in (ids, [ids], {"prompt": TEXTS[0]}, [{"prompt_token_ids": ids}]):
        found = llm.encode(prompts, use_tqdm=False)
        assert len(found) == 1 and torch.equal(found[0].outputs.data, expected.outputs.data)
    assert torch.equal(llm.encode(prompt_token_ids=ids, use_tqdm=False)[0].outputs.data, expected.outputs.data)
    short = llm.encode(ids[-3:], use_tqdm=False)[0].outputs.data
    assert torch.equal(llm.encode(ids, truncate_prompt_tokens=3, use_tqdm=False)[0].outputs.data, short)
    longest = llm.encode(ids * 20, truncate_prompt_tokens=-1, use_tqdm=False)[0]
    assert len(longest.prompt_token_ids) == 128
    for wrong, id in (
        (["a", ""], "empty_prompt"),
        ([[1], [99999]], "invalid_token_id"),
        (["y" * 129], "context_length_exceeded"),
    ):
        with pytest.raises(ValueError) as caught:
            llm.encode(wrong, use_tqdm=False)
        assert caught.value.id == id
    expected = "The prompt has 129 tokens; the context holds 128. Shorten the prompt, or set truncate_prompt_tokens."
    assert str(caught.value) == expected, "nothing is generated"
    assert not llm.engine.has_work()


def test_pages_are_shared_between_equal_prompts_of_one_salt(tiny_model):
    llm = _loaded(tiny_model("Qwen3ForCausalLM"), task="embed", block_size=4)
    first = llm.encode({"prompt": TEXTS[1], "cache_salt": "a"}, use_tqdm=False)[0]
    again = llm.encode({"prompt": TEXTS[1], "cache_salt": "a"}, use_tqdm=False)[0]
    other = llm.encode({"prompt": TEXTS[1], "cache_salt": "b"}, use_tqdm=False)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens, other.num_cached_tokens) == (0, 44, 0)
    assert torch.equal(first.outputs.data, again.outputs.data)


def test_a_score_of_embeddings_is_their_similarity(tiny_model):
    llm = _loaded(tiny_model("Qwen3ForCausalLM"), task="embed")
    vectors = _embeddings(llm, TEXTS).double()
    expected = [float(torch.cosine_similarity(vectors[0], vector, dim=0)) for vector in vectors]
    scores = [result.outputs.score for result in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert scores == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
def test_a_score_of_a_pair(architecture, tiny_classifier):
    """With a tokenizer that puts marks around and between texts, as many do."""
    from transformers import AutoModelForSequenceClassification

    folder = tiny_classifier(architecture, 1)
    llm = _loaded(folder)
    assert llm.engine.limits.task == "score"
    tokenizer = llm.get_tokenizer()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for result, text in zip(llm.score(TEXTS[0], TEXTS, use_tqdm=False), TEXTS, strict=True):
        ids = tokenizer(TEXTS[0], text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logit = model(ids).logits[0, 0]
        assert result.outputs.score == pytest.approx(float(logit.sigmoid()), rel=1e-4)
        assert result.prompt_token_ids == ids[0].tolist()


def test_a_score_layer_may_have_a_bias(tiny_classifier, tmp_path):
    from safetensors.torch import load_file

    folder = tiny_classifier("LlamaForCausalLM", 3)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bias = torch.tensor([3.0, -1.0, 0.5])
    save_file(load_file(folder / "model.safetensors") | {"score.bias": bias}, tmp_path / "model.safetensors")
    raw = PoolingParams(activation=False)
    plain, biased = (_loaded(each).classify(TEXTS, use_tqdm=False, pooling_params=raw) for each in (folder, tmp_path))
    for one, other in zip(plain, biased, strict=True):
        torch.testing.assert_close(torch.tensor(other.outputs.probs), torch.tensor(one.outputs.probs) + bias)


def test_an_original_reranker_scores_by_two_tokens(tiny_model, tmp_path):
    """As Qwen3-Reranker: the probability of the token for, among the two."""
    from transformers import AutoModelForCausalLM

    for tied, architecture in ((True, "Qwen3ForCausalLM"), (False, "LlamaForCausalLM")):
        folder = tiny_model(architecture)
        named = architecture.replace("ForCausalLM", "ForSequenceClassification")
        overrides = {"architectures": [named], "is_original_qwen3_reranker": True, "classifier_from_token": ["n", "y"]}
        llm = _loaded(folder, hf_overrides=overrides)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert bool(model.config.tie_word_embeddings) is tied
        tokenizer = llm.get_tokenizer()
        against, for_it = tokenizer.convert_tokens_to_ids(["n", "y"])
        for result, text in zip(llm.score(TEXTS[0], TEXTS, use_tqdm=False), TEXTS, strict=True):
            with torch.no_grad():
                logits = model(tokenizer(TEXTS[0] + text, return_tensors="pt")["input_ids"]).logits[0, -1]
            expected = logits[[against, for_it]].softmax(-1)[1]
            assert result.outputs.score == pytest.approx(float(expected), rel=1e-3)


def test_a_quantized_classifier(tiny_classifier, tmp_path):
    folder = tiny_classifier("LlamaForCausalLM", 3)
    quantize_checkpoint(QuantizeOptions(str(folder), str(tmp_path / "out"), "weight_only_int8", evaluate=False))
    llm = _loaded(tmp_path / "out")
    assert "w8a16" in llm.engine.facts["linear layers"] and llm.engine.limits.task == "classify"
    exact = _loaded(folder).classify(TEXTS, use_tqdm=False)
    for one, other in zip(llm.classify(TEXTS, use_tqdm=False), exact, strict=True):
        assert one.outputs.probs == pytest.approx(other.outputs.probs, abs=0.05)


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_any_number_of_ranks_gives_the_same_bits(kind, ranks, sentence_model, tiny_classifier):
    arguments: dict[str, Any] = {"override_pooler_config": {"pooling_type": kind}}
    alone, distributed = (_loaded(sentence_model, **arguments, **given) for given in ({}, ranks))
    assert torch.equal(_embeddings(alone, TEXTS), _embeddings(distributed, TEXTS))
    if kind == "LAST":
        folder = tiny_classifier("LlamaForCausalLM", 3)
        one, other = (
            [result.outputs.probs for result in _loaded(folder, **given).classify(TEXTS, use_tqdm=False)]
            for given in ({}, ranks)
        )
        assert one == other


def test_what_is_not_finite_fails_the_request_and_no_other(tiny_model):
    llm = _loaded(tiny_model("LlamaForCausalLM"), task="embed", enforce_eager=True)
    table = llm.engine.executor.runner.model.embedding.table
    good = _embeddings(llm, ["abc"])
    table[llm.tokenizer.encode("z")[0]] = torch.inf
    with pytest.raises(AiakqError) as caught:
        llm.embed(["abc", "xyz"], use_tqdm=False)
    assert caught.value.id == "numerical_error"
    assert torch.equal(_embeddings(llm, ["abc"]), good)
    table.fill_(torch.inf)
    failures = []
    while failures[-1:] != ["model_broken"] and len(failures) < 5:
        with pytest.raises(AiakqError) as caught:
            llm.embed(["abc"], use_tqdm=False)
        failures.append(caught.value.id)
    assert failures == ["numerical_error", "numerical_error", "model_broken"]


def test_what_a_model_is_not_there_for_is_refused(tiny_model, tiny_classifier):
    generates = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=64)
    embeds = _loaded(tiny_model("LlamaForCausalLM"), task="embed")
    classifies = _loaded(tiny_classifier("LlamaForCausalLM", 3))
    every = _loaded(tiny_model("LlamaForCausalLM"), task="reward")
    calls = [
        *((generates, name, "embed or classify") for name in ("encode", "embed", "classify")),
        *((embeds, name, "generate") for name in ("generate", "chat")),
        (embeds, "classify", "classify"),
        (classifies, "embed", "embed"),
        (every, "embed", "embed"),
        (every, "classify", "classify"),
    ]
    for llm, name, needed in calls:
        with pytest.raises(ValueError) as caught:
            getattr(llm, name)([{"role": "user", "content": "x"}] if name == "chat" else "x", use_tqdm=False)
        assert caught.value.id == "task_mismatch" and f"--task {needed}" in str(caught.value)
    for llm in (generates, classifies, every):
        with pytest.raises(AiakqError) as caught:
            llm.score("x", "y")
        assert caught.value.id == "task_mismatch"
    assert every.encode("xyz", use_tqdm=False)[0].outputs.data.shape == (3, 128)


def test_a_model_of_another_kind_is_refused_by_name(tmp_path, tiny_model):
    folder = tiny_model("LlamaForCausalLM")
    for architecture in ("ElectraModel", "DebertaV2ForSequenceClassification", "LlamaBidirectionalModel"):
        with pytest.raises(AiakqError, match=architecture) as caught:
            _loaded(folder, hf_overrides={"architectures": [architecture]})
        assert caught.value.id == "model_unsupported"


def test_random_weights_of_every_kind(tiny_model, tiny_classifier):
    embeds = _loaded(tiny_model("LlamaForCausalLM"), task="embed", load_format="dummy")
    assert _embeddings(embeds, TEXTS).norm(dim=1).tolist() == pytest.approx([1] * 3)
    classifies = _loaded(tiny_classifier("LlamaForCausalLM", 3), load_format="dummy")
    assert sum(classifies.classify("x", use_tqdm=False)[0].outputs.probs) == pytest.approx(1)


def _with_prompts(folder: Path, default: str | None = None) -> LLM:
    settings = {"prompts": {"query": "find: ", "topic": "about: "}, "default_prompt_name": default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return _loaded(folder, max_model_len=None)


def test_prompts_of_the_files_are_put_before_texts(sentence_model):
    llm = _with_prompts(sentence_model)
    plain = _embeddings(llm, TEXTS)
    for chosen, before in (({"prompt_name": "topic"}, "about: "), ({"input_type": "query"}, "find: ")):
        assert torch.equal(_embeddings(llm, TEXTS, **chosen), _embeddings(llm, [before + text for text in TEXTS]))
    assert torch.equal(_embeddings(llm, TEXTS, input_type="document"), plain)
    with pytest.raises(AiakqError, match="query, topic"):
        _embeddings(llm, TEXTS, prompt_name="answers")
    [found] = llm.score("a question", "an answer", use_tqdm=False)
    one, two = _embeddings(llm, ["find: a question", "an answer"]).double()
    assert found.outputs.score == pytest.approx(float(one @ two), abs=1e-6)


def test_a_default_prompt_is_that_of_texts_without_a_name(sentence_model):
    llm = _with_prompts(sentence_model, "topic")
    before = _embeddings(llm, TEXTS)
    ids = [llm.get_tokenizer()("about: " + text)["input_ids"] for text in TEXTS]
    assert torch.equal(before, torch.tensor([each.outputs.embedding for each in llm.embed(ids, use_tqdm=False)]))


@pytest.mark.parametrize(
    "settings", [{"prompts": []}, {"prompts": {"query": 5}}, {"prompts": {"query": ""}, "default_prompt_name": "topic"}]
)
def test_damaged_prompts_are_named(settings, sentence_model):
    (sentence_model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(AiakqError, match="config_sentence_transformers") as caught:
        _loaded(sentence_model)
    assert caught.value.id == "model_malformed"
