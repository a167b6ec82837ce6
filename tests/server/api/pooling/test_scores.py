"""/score and /rerank of real servers: pairs of texts, or the similarity of two embeddings."""

from __future__ import annotations

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.server.api.pooling.scores import RerankRequest, ScoreRequest

QUERY = "what is it?"
DOCUMENTS = ["it is this", "something else, which is longer", "no"]


@pytest.fixture(scope="module")
def expected(cross_encoder) -> list[float]:
    """The score of each document with the query, as sentence-transformers' cross-encoders compute it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(cross_encoder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(cross_encoder)
    with torch.no_grad():
        logits = [model(**tokenizer(QUERY, text, return_tensors="pt")).logits[0, 0] for text in DOCUMENTS]
    return torch.stack(logits).sigmoid().tolist()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_pairs_are_scored(path, names, score_http, expected):
    body = dict(zip(names, (QUERY, DOCUMENTS), strict=True))
    answer = score_http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == [0, 1, 2] and {entry["object"] for entry in data} == {"score"}
    assert [entry["score"] for entry in data] == pytest.approx(expected, rel=1e-4)
    tokens = 3 * len(QUERY) + sum(map(len, DOCUMENTS))
    assert answer.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    each = score_http.post(path, json=dict(zip(names, ([QUERY] * 3, DOCUMENTS), strict=True))).json()["data"]
    assert each == data


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(path, score_http, expected):
    body = {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]}
    answer = score_http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [result["index"] for result in results] == order
    assert [result["relevance_score"] for result in results] == pytest.approx([expected[at] for at in order], rel=1e-4)
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[at] for at in order]
    best = score_http.post(path, json=body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{"index": order[0], "relevance_score": results[0]["relevance_score"]}]


def test_raw_scores_on_request(score_http, expected):
    body = {"text_1": QUERY, "text_2": DOCUMENTS, "activation": False}
    scores = [entry["score"] for entry in score_http.post("/score", json=body).json()["data"]]
    assert torch.tensor(scores).sigmoid().tolist() == pytest.approx(expected, rel=1e-4)


def test_embeddings_are_compared(embed_http):
    answer = embed_http.post("/v1/embeddings", json={"input": [QUERY, *DOCUMENTS]}).json()["data"]
    query, *documents = (torch.tensor(entry["embedding"], dtype=torch.float64) for entry in answer)
    cosines = [float(torch.cosine_similarity(query, document, dim=0)) for document in documents]
    data = embed_http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    assert [entry["score"] for entry in data] == pytest.approx(cosines, abs=1e-6)
    results = embed_http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [result["relevance_score"] for result in results] == sorted((entry["score"] for entry in data), reverse=True)


def test_texts_are_ranked_as_clients_of_tei_expect(score_http):
    documents = score_http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    ranked = [{"index": each["index"], "score": each["relevance_score"]} for each in documents]
    body = {"query": QUERY, "texts": DOCUMENTS}
    assert score_http.post("/rerank", json=body).json() == ranked
    assert score_http.post("/rerank", json=body | {"top_n": 1, "return_text": False}).json() == ranked[:1]
    texts = [each["text"] for each in score_http.post("/rerank", json=body | {"return_text": True}).json()]
    assert texts == [DOCUMENTS[each["index"]] for each in ranked]
    raw, given = (
        score_http.post("/rerank", json=body | fields).json()
        for fields in ({"raw_scores": True}, {"activation": False})
    )
    assert raw == given != ranked
    assert score_http.post("/rerank", json=body | {"raw_scores": False, "truncate": False}).json() == ranked


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/rerank", {"query": "x"}, "missing_field", "documents"),
        ("/rerank", {"query": "x", "texts": ["y"], "documents": ["y"]}, "unsupported_parameter", "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "return_text": True}, "unsupported_parameter", "return_text"),
        (
            "/rerank",
            {"query": "x", "texts": ["y"], "raw_scores": True, "activation": True},
            "unsupported_parameter",
            "raw_scores",
        ),
        ("/score", {"text_2": "y"}, "missing_field", "text_1"),
        ("/score", {"text_1": "x"}, "missing_field", "text_2"),
        ("/score", {"text_1": "x", "text_2": "y", "queries": "x"}, "unsupported_parameter", "queries"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "invalid_type", "text_1"),
        ("/score", {"text_1": "x" * 100, "text_2": "y" * 100}, "context_length_exceeded", "input"),
        ("/rerank", {"query": "x", "documents": []}, "value_out_of_range", "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "value_out_of_range", "top_n"),
        (
            "/rerank",
            {"query": "x", "documents": [{"text": "y", "texts": "z"}]},
            "unknown_field",
            "documents[0].texts",
        ),
        ("/v1/embeddings", {"input": "x"}, "task_mismatch", None),
    ],
)
def test_what_cannot_be_scored_is_refused(path, body, code, param, score_http):
    answer = score_http.post(path, json=body)
    failure = answer.json()["error"]
    assert (failure["code"], failure["param"]) == (code, param), failure
    assert answer.status_code == 400


def test_one_label_also_classifies(score_http):
    entry = score_http.post("/classify", json={"input": QUERY}).json()["data"][0]
    assert entry["label"] == "LABEL_0" and entry["num_classes"] == 1 and 0 < entry["probs"][0] < 1


def test_pairs_have_several_names():
    for one, two in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        assert ScoreRequest(**{one: "a", two: ["b", "c"]}).pairs() == [("a", "b"), ("a", "c")]
    with pytest.raises(AiakqError) as caught:
        ScoreRequest(text_1="a", documents="b", data_2="c").pairs()
    assert caught.value.param == "data_2"


@pytest.mark.parametrize("name", ["score_http", "embed_http"])
def test_documents_and_queries_are_cut_to_their_first_tokens(name, request):
    http = request.getfixturevalue(name)

    def scores(query, documents, **fields) -> list[float]:
        body = {"text_1": query, "text_2": documents, **fields}
        answer = http.post("/score", json=body)
        assert answer.status_code == 200, answer.text
        return [entry["score"] for entry in answer.json()["data"]]

    long = [*DOCUMENTS, "x" * 1000, QUERY]
    assert scores(QUERY, long, max_tokens_per_doc=4) == scores(QUERY, [text[:4] for text in long])
    assert scores(QUERY, DOCUMENTS, max_tokens_per_query=3) == scores(QUERY[:3], DOCUMENTS)
    both = scores(QUERY, long, max_tokens_per_query=3, max_tokens_per_doc=4)
    assert both == scores(QUERY[:3], [text[:4] for text in long])
    assert scores(QUERY, DOCUMENTS, max_tokens_per_doc=0) == scores(QUERY, DOCUMENTS, max_tokens_per_doc=4096)


def test_ranked_documents_are_returned_in_full(score_http):
    body = {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 2}
    results = score_http.post("/rerank", json=body).json()["results"]
    assert sorted(result["document"]["text"] for result in results) == sorted(DOCUMENTS)


@pytest.mark.parametrize("name", ["max_tokens_per_doc", "max_tokens_per_query"])
def test_a_negative_limit_of_tokens_is_refused(name):
    with pytest.raises(AiakqError) as caught:
        RerankRequest(query="a", documents=["b"], **{name: -1}).params()
    assert (caught.value.id, caught.value.param) == ("value_out_of_range", name)
