"""JinaBERT: both of its authors' classes, beside the published equations."""

from __future__ import annotations

import random

import pytest
import torch
from jina_models import CONFIG, jina_bert_states, save_jina_bert

from aiakq import LLM
from aiakq.errors import AiakqError

ALL = {"pooling_type": "ALL", "normalize": False}


def _states(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    found = llm.encode([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    return [each.outputs.data for each in found]


@pytest.mark.parametrize(("has_norms", "outer"), [(False, ""), (False, "bert."), (True, "")])
def test_hidden_states_are_those_of_the_equations_and_independent_of_the_batch(has_norms, outer, tmp_path):
    tensors = save_jina_bert(tmp_path, has_norms, outer)
    llm = LLM(str(tmp_path), dtype="float32", override_pooler_config=ALL)
    assert llm.config.max_model_len == 600
    draw = random.Random(5)
    prompts = [[draw.randrange(320) for _ in range(length)] for length in (1, 2, 40, 530, 17)]
    together = _states(llm, prompts)
    for ids, found in zip(prompts, together, strict=True):
        expected = jina_bert_states(tensors, ids)
        assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
        assert torch.equal(_states(llm, [ids])[0], found)


def test_without_modules_an_embedding_is_the_mean(tmp_path):
    tensors = save_jina_bert(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32")
    [found] = llm.embed("a text", use_tqdm=False)
    expected = torch.nn.functional.normalize(jina_bert_states(tensors, found.prompt_token_ids).mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(found.outputs.embedding), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"position_embedding_type": None}, "position_embedding_type"),
        ({"feed_forward_type": "original"}, "feed_forward_type"),
        ({"architectures": ["BertModel"]}, "position_embedding_type"),
    ],
)
def test_other_configs_are_refused(changes, word, tmp_path):
    save_jina_bert(tmp_path, **changes)
    with pytest.raises(AiakqError, match=word):
        LLM(str(tmp_path), dtype="float32")


def test_original_files_of_jina_embeddings_v3_are_refused_by_name(tmp_path):
    """They are of XLM-RoBERTa by name, and have rotary positions and adapters."""
    changes = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary"}
    save_jina_bert(tmp_path, **{**dict.fromkeys(CONFIG.keys() & {"feed_forward_type", "emb_pooler"}), **changes})
    with pytest.raises(AiakqError, match="rotary"):
        LLM(str(tmp_path), dtype="float32")
