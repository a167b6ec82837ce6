"""Encoders: hidden states and scores of transformers, and the same bits whatever else is in a step."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import ENCODERS, WITH_SEGMENTS, save_encoder
from safetensors.torch import load_file, save_file

from aiakq import LLM, PoolingParams
from aiakq.errors import AiakqError
from aiakq.runtime.models.encoders import ENCODERS as NATIVE

ALL = {"pooling_type": "ALL", "normalize": False}
PAIRS = [("a question", "an answer which is longer"), ("x", "y"), ("the second question", "no")]


def _loaded(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", **arguments})


def _states(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    found = llm.encode([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    return [each.outputs.data for each in found]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """``encoder(name, head, **config)`` -> folder of a tiny random encoder, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def make(name: str, head: str = "AutoModel", **changes: Any) -> Path:
        key = (name, head, repr(sorted(changes.items())))
        if key not in made:
            made[key] = save_encoder(name, tmp_path_factory.mktemp(name), head, **changes)
        return made[key]

    return make


def _prompts(longest: int) -> list[list[int]]:
    """Every id, those of the padding and framing tokens within texts too."""
    draw = random.Random(5)
    return [[draw.randrange(320) for _ in range(length)] for length in (1, 2, 7, 40, longest, 17)]


def test_every_family_has_a_tiny_model():
    assert set(ENCODERS) == set(NATIVE) - {"JinaBertModel"}, "which transformers does not have; see test_jina_bert.py"


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_are_those_of_transformers_and_independent_of_the_batch(name, encoder):
    from transformers import AutoModel

    folder = encoder(name)
    llm = _loaded(folder, override_pooler_config=ALL)
    prompts = _prompts(300 if name == "ModernBertModel" else 96)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    together = _states(llm, prompts)
    for ids, found in zip(prompts, together, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).last_hidden_state[0]
        assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
    for ids, found in zip(reversed(prompts), reversed(together), strict=True):
        assert torch.equal(_states(llm, [ids])[0], found)
    few = _loaded(folder, override_pooler_config=ALL, max_num_seqs=2, max_num_batched_tokens=llm.config.max_model_len)
    assert all(map(torch.equal, _states(few, prompts[::-1]), together[::-1]))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", ENCODERS)
def test_scores_of_texts_and_pairs_are_those_of_transformers(name, labels, encoder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = encoder(name, "AutoModelForSequenceClassification", num_labels=labels)
    llm = _loaded(folder)
    assert llm.engine.limits.task == ("score" if labels == 1 else "classify")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def logits(*texts: str) -> torch.Tensor:
        encoded = tokenizer(*texts, return_tensors="pt")
        assert ("token_type_ids" in encoded) == (name in WITH_SEGMENTS)
        with torch.no_grad():
            return model(**encoded).logits[0]

    if labels == 1:
        found = [one.outputs.score for pair in PAIRS for one in llm.score(*pair, use_tqdm=False)]
        together = llm.score([one for one, _ in PAIRS], [two for _, two in PAIRS], use_tqdm=False)
        assert [each.outputs.score for each in together] == found
        expected = torch.cat([logits(*pair).sigmoid() for pair in PAIRS])
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-5)
    else:
        texts = [one for one, _ in PAIRS]
        found = [each.outputs.probs for each in llm.classify(texts, use_tqdm=False)]
        expected = torch.stack([logits(text).softmax(-1) for text in texts])
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_modernbert_read_from_the_mean_of_a_text(encoder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    head = {"num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}
    folder = encoder("ModernBertModel", "AutoModelForSequenceClassification", **head)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    encoded = AutoTokenizer.from_pretrained(folder)("a text", return_tensors="pt")
    with torch.no_grad():
        expected = model(**encoded).logits[0].softmax(-1)
    found = _loaded(folder).classify("a text", use_tqdm=False)[0].outputs.probs
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-5)


def test_files_with_the_head_of_the_training_are_read(encoder):
    plain = encoder("BertModel")
    folder = encoder("BertModel", "AutoModelForMaskedLM")
    masked = _states(_loaded(folder, override_pooler_config=ALL), _prompts(20))
    model = __import__("transformers").AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([_prompts(20)[3]])).last_hidden_state[0]
    assert (masked[3] - expected).abs().max() < 1e-5 * float(expected.abs().max())
    assert plain != folder


def test_old_names_of_norms_are_read(encoder, tmp_path):
    folder = encoder("BertModel")
    shutil.copytree(folder, tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    save_file(renamed, tmp_path / "old" / "model.safetensors")
    expected = _states(_loaded(folder, override_pooler_config=ALL), _prompts(9))
    assert all(map(torch.equal, _states(_loaded(tmp_path / "old", override_pooler_config=ALL), _prompts(9)), expected))


def test_xlm_roberta_with_fused_projections_is_the_same(encoder, tmp_path):
    """jina-reranker-v2 is stored so."""
    folder = encoder("XLMRobertaModel", "AutoModelForSequenceClassification", num_labels=1)
    shutil.copytree(folder, tmp_path / "fused")
    tensors, renamed = load_file(folder / "model.safetensors"), {}
    names = {
        "embeddings.LayerNorm": "emb_ln",
        "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj",
    }
    names |= {"attention.output.LayerNorm": "norm1", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"}
    names |= {"output.LayerNorm": "norm2"}
    for name in tensors:
        part = ("attention.self.query", "attention.self.key", "attention.self.value")
        if part[0] in name:
            fused = [tensors[name.replace(part[0], each)] for each in part]
            renamed[name.replace("layer.", "layers.").replace(part[0], "mixer.Wqkv")] = torch.cat(fused)
        elif "attention.self." not in name:
            new = name
            for old, fresh in names.items():
                new = new.replace(old, fresh)
            renamed[new] = tensors[name]
    save_file(renamed, tmp_path / "fused" / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "modeling_xlm_roberta.XLMRobertaModel"}, "use_flash_attn": True}
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config | {"position_embedding_type": "absolute"}))
    scores = [
        [one.outputs.score for one in _loaded(each).score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)]
        for each in (folder, tmp_path / "fused")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def _published(folder: Path, copy: Path, **config: Any) -> Path:
    """The model in ``folder`` with the config.json of its authors."""
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Model"}, **config}))
    return copy


_SIZES = {"vocab_size": 320, "type_vocab_size": 2, "pad_token_id": 0}


def test_nomic_bert_of_its_authors_is_the_same(encoder, tmp_path):
    folder = encoder("NomicBertModel")
    config = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        **_SIZES,
    }
    config |= {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_inner": 256, "n_positions": 96, "layer_norm_epsilon": 1e-12}
    config |= {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, "prenorm": False}
    config |= {"qkv_proj_bias": False, "mlp_fc1_bias": False, "causal": False, "max_trained_positions": 2048}
    copy = _published(folder, tmp_path / "published", **config)
    expected, found = (_states(_loaded(each, override_pooler_config=ALL), _prompts(96)) for each in (folder, copy))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("architecture", ["NewModel", "GteModel"])
def test_gte_of_its_authors_has_scaled_frequencies(architecture, encoder, tmp_path):
    from transformers import AutoModel

    folder = encoder("GteModel")
    config = {"architectures": [architecture], "model_type": "new" if architecture == "NewModel" else "gte", **_SIZES}
    config |= {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 256}
    config |= {
        "max_position_embeddings": 96,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm",
    }
    config |= {"position_embedding_type": "rope", "rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    config |= {"pack_qkv": True, "logn_attention_scale": False, "unpad_inputs": False, "type_vocab_size": 1}
    copy = _published(folder, tmp_path / "published", **config)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    model.rotary_emb.inv_freq = (20000 * 8.0) ** -(torch.arange(0, 32, 2) / 32) / 8.0 ** (2 / 32)
    for ids, found in zip(_prompts(96), _states(_loaded(copy, override_pooler_config=ALL), _prompts(96)), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).last_hidden_state[0]
        assert (found - expected).abs().max() < 1e-5 * float(expected.abs().max())


def test_modernbert_in_the_old_spelling_is_the_same(encoder, tmp_path):
    folder = encoder("ModernBertModel")
    shutil.copytree(folder, tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"], config["rope_parameters"]
    older = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (tmp_path / "old" / "config.json").write_text(json.dumps({**config, **older, "layer_norm_eps": 1e-5}))
    expected = _states(_loaded(folder, override_pooler_config=ALL), _prompts(100))
    found = _states(_loaded(tmp_path / "old", override_pooler_config=ALL), _prompts(100))
    assert all(map(torch.equal, found, expected))


def test_texts_that_are_cut_keep_their_special_tokens(encoder):
    from transformers import AutoTokenizer

    folder = encoder("BertModel", "AutoModelForSequenceClassification", num_labels=1)
    llm, tokenizer = _loaded(folder), AutoTokenizer.from_pretrained(folder)
    long, other = "a long text " * 20, "another one " * 5
    with pytest.raises(AiakqError, match="truncate_prompt_tokens") as refused:
        llm.score(long, other, use_tqdm=False)
    assert refused.value.id == "context_length_exceeded"
    for keep in (-1, 96, 20, 4):
        [found] = llm.score(long, other, use_tqdm=False, truncate_prompt_tokens=keep)
        expected = tokenizer(long, other, truncation="longest_first", max_length=96 if keep == -1 else keep)
        assert found.prompt_token_ids == expected["input_ids"]
    with pytest.raises(AiakqError, match="special tokens"):
        llm.score(long, other, use_tqdm=False, truncate_prompt_tokens=3)
    # Later texts are not cut.
    assert len(llm.score("a", "b" * 50, use_tqdm=False)[0].prompt_token_ids) == 54


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"task": "generate"}, "generates no text"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"max_num_batched_tokens": 50}, "in one step"),
        ({"task": "score"}, "without labels"),
        ({"model_impl": "transformers"}, "--model-impl"),
    ],
)
def test_what_encoders_do_not_have_is_refused(arguments, word, encoder):
    with pytest.raises(AiakqError, match=word):
        _loaded(encoder("BertModel"), **arguments)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        ("BertModel", {"attends_backwards": 3}, "attends_backwards"),
        ("BertModel", {"model_type": "roberta"}, "model_type"),
        ("RobertaModel", {"pad_token_id": 500}, "pad_token_id"),
        ("MPNetModel", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
        ("JinaEmbeddingsV3Model", {"auto_map": {"AutoModel": "modeling.XLMRobertaModel"}}, "Python code of its own"),
        ("GteModel", {"auto_map": {"AutoModel": "modeling.NewModel"}, "logn_attention_scale": True}, "logn_attention"),
        ("GteModel", {"auto_map": {"AutoModel": "modeling.NewModel"}, "rope_scaling": {"type": "yarn"}}, "yarn"),
        (
            "NomicBertModel",
            {"auto_map": {"AutoModel": "m.NomicBertModel"}, "rotary_scaling_factor": 2},
            "rotary_scaling",
        ),
        (
            "NomicBertModel",
            {"auto_map": {"AutoModel": "m.NomicBertModel"}, "moe_every_n_layers": 2},
            "moe_every_n_layers",
        ),
        ("ModernBertModel", {"layer_types": ["full_attention"]}, "layer_types"),
        ("ModernBertModel", {"local_attention": "128"}, "local_attention"),
    ],
)
def test_configs_that_are_not_computed_are_refused(name, changes, word, encoder, tmp_path):
    folder = encoder(name)
    shutil.copytree(folder, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(AiakqError, match=word):
        _loaded(tmp_path / "changed")


def test_a_mean_without_modules_and_random_weights(encoder):
    llm = _loaded(encoder("BertModel"))
    assert llm.engine.limits.pooling.pooling.kind == "MEAN"
    ids = _prompts(9)[4]
    states = _states(_loaded(encoder("BertModel"), override_pooler_config=ALL), [ids])[0]
    found = llm.embed({"prompt_token_ids": ids}, use_tqdm=False, pooling_params=PoolingParams(normalize=False))
    torch.testing.assert_close(torch.tensor(found[0].outputs.embedding), states.mean(0), rtol=1e-5, atol=1e-6)
    dummy = _loaded(encoder("BertModel"), load_format="dummy")
    assert len(dummy.embed("a text", use_tqdm=False)[0].outputs.embedding) == 128
