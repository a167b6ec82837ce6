"""POST /score and /rerank, each under several paths.

A model with one label is a cross-encoder, which scores a pair of texts. With an embedding model, the score is the
cosine similarity of the embeddings of both texts, and with a ColBERT model the sum of the largest similarities of the
tokens of a query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from pydantic import Field
from starlette.responses import Response

from aiakq.constraints import Constraint
from aiakq.errors import error
from aiakq.runtime.protocol.pooling_params import Pooled, PoolingParams, paired
from aiakq.server.api.pooling.pooled_results import (
    MAX_INPUTS,
    PooledList,
    PooledPrompt,
    PooledResults,
    PoolingUsage,
    pooling_route,
    usage_of,
)
from aiakq.server.api.pooling.pooling_fields import PoolingFields, same
from aiakq.server.api.request_model import FailFastList, Integer, RequestModel
from aiakq.server.http.responses import JSONResponse

_Texts = str | Annotated[FailFastList[str], Field(min_length=1, max_length=MAX_INPUTS)]
_Limit = Annotated[Integer, Constraint(type=int, low=0, expected="0 or more")]
#: Number of scores to compute from embeddings before yielding to other tasks.
_SCORES_AT_A_TIME = 16


class ScoringFields(PoolingFields):
    """Fields of both kinds of requests."""

    activation: bool | None = Field(None, description="Whether scores become probabilities; as the model says.")
    use_activation: bool | None = Field(None, description="vLLM's name of activation.")
    max_tokens_per_doc: _Limit | None = Field(
        None, description="Tokens of a document, the second text of a pair, to keep from its beginning; 0: all."
    )
    max_tokens_per_query: _Limit | None = Field(
        None, description="Tokens of a query, the first text of a pair, to keep from its beginning; 0: all."
    )

    def params(self) -> PoolingParams:
        """Return the pooling parameters of a pair. Raises ``unsupported_parameter`` and ``value_out_of_range``."""
        self.constraints().check(vars(self))
        return PoolingParams(activation=same(self, "activation", "use_activation"))


class ScoreRequest(ScoringFields):
    """The body of POST /score."""

    text_1: _Texts | None = Field(None, description="A text to compare with all of text_2, or a list as long.")
    text_2: _Texts | None = Field(None, description="A text, or a list.")
    queries: _Texts | None = Field(None, description="Another name of text_1.")
    documents: _Texts | None = Field(None, description="Another name of text_2.")
    items: _Texts | None = Field(None, description="Another name of text_2.")
    data_1: _Texts | None = Field(None, description="Another name of text_1.")
    data_2: _Texts | None = Field(None, description="Another name of text_2.")

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs. Raises ``missing_field``, ``unsupported_parameter``, ``invalid_type``."""
        both = []
        for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")):
            given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
            if not given:
                raise error("missing_field", param=names[0])
            if len(given) > 1:
                first, second, *_ = given
                raise error("unsupported_parameter", param=second, reason=f"{first} is given too, which is the same")
            [texts] = given.values()
            both.append([texts] if isinstance(texts, str) else list(texts))
        return paired(*both)


class RerankDocument(RequestModel):
    """A document as an object."""

    text: str = Field(description="The text.")


class RerankRequest(ScoringFields):
    """The body of POST /rerank, as in the APIs of Jina and Cohere, or with texts as in that of TEI."""

    query: str = Field(description="The text that documents are compared with.")
    documents: Annotated[FailFastList[str | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS)] | None = Field(
        None, description="The texts, or objects with a text. Required, or texts."
    )
    texts: Annotated[FailFastList[str], Field(min_length=1, max_length=MAX_INPUTS)] | None = Field(
        None, description="TEI's name of documents: the response is a list of objects with index and score."
    )
    top_n: _Limit | None = Field(None, description="The best so many; all if not given, or 0.")
    return_documents: bool | None = Field(None, description="Whether results repeat the documents; true if not given.")
    return_text: bool | None = Field(None, description="Whether results repeat texts; false if not given.")
    raw_scores: bool | None = Field(None, description="TEI's field: the contrary of activation.")

    def params(self) -> PoolingParams:
        """Return the pooling parameters of a pair. Raises as ``ScoringFields.params``."""
        if self.raw_scores is not None:
            if same(self, "activation", "use_activation") is not None:
                raise error("unsupported_parameter", param="raw_scores", reason="activation is given too")
            self.activation = not self.raw_scores
        return super().params()

    def listed(self) -> list[str]:
        """Return the documents. Raises ``missing_field``, ``unsupported_parameter`` and ``value_out_of_range``."""
        if self.texts is not None and (self.documents is not None or self.return_documents is not None):
            other = "return_documents" if self.documents is None else "documents"
            raise error("unsupported_parameter", param=other, reason="requests with texts have no such field")
        if self.texts is None and self.return_text is not None:
            raise error("unsupported_parameter", param="return_text", reason="it is for texts; use return_documents")
        documents = self.documents if self.texts is None else self.texts
        if documents is None:
            raise error("missing_field", param="documents")
        return [document if isinstance(document, str) else document.text for document in documents]


Scoring = TypeVar("Scoring", bound=ScoringFields)


class Score(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(PooledList):
    """Scores in the order of the pairs."""

    data: list[Score]


class RankedText(msgspec.Struct):
    """A document."""

    text: str


class RankedDocument(msgspec.Struct):
    """A document's index in the request, and its score."""

    index: int
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class RankedByTEI(msgspec.Struct, omit_defaults=True):
    """A text's index in the request, its score, and if asked for the text."""

    index: int
    score: float
    text: str | None = None


class RerankResponse(msgspec.Struct):
    """The documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


class ScoringResults(PooledResults[Scoring]):
    """Scores of pairs of texts."""

    async def scores(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], list[PooledPrompt]]:
        """Return the score of each pair, and the pooled prompts."""
        self.limits.check_scores()
        params = self.payload.params()
        pairs = await self._cut(pairs)
        if self.limits.is_classifier:
            outputs = await self.pool_pairs(pairs, params)
            return [prompt.pooled.vector()[0] for prompt in outputs], outputs
        return await self._similarities(pairs, params)

    async def _similarities(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams
    ) -> tuple[list[float], list[PooledPrompt]]:
        """Return the similarity of the embeddings of each pair, and the pooled prompts."""
        (texts, query_params), *others = self.limits.sides(pairs, params)
        outputs: list[PooledPrompt] = []
        for start in range(0, len(texts), MAX_INPUTS):  # two prompts per pair
            outputs += await self.pool(texts[start : start + MAX_INPUTS], query_params)
        queries = {text: output.pooled for text, output in zip(texts, outputs, strict=True)}
        scores = [0.0] * len(pairs)
        if not others:
            await self._fill(scores, pairs, queries, queries)
            return scores, outputs
        [(texts, document_params)] = others
        step = self._documents_at_once()
        for start in range(0, len(texts), step):
            part = texts[start : start + step]
            pooled = await self.pool(part, document_params)
            documents = {text: output.pooled for text, output in zip(part, pooled, strict=True)}
            await self._fill(scores, pairs, queries, documents)
            # Only their numbers of tokens: vectors of many tokens need much memory.
            outputs += [PooledPrompt(Pooled(b"", self.limits.width), output.num_tokens) for output in pooled]
        return scores, outputs

    def _documents_at_once(self) -> int:
        """Return the number of documents whose vectors are in memory together."""
        late = self.limits.late
        return MAX_INPUTS if late is None else max(1, min(MAX_INPUTS, self.limits.max_rows // late.document_length))

    async def _fill(
        self,
        scores: list[float],
        pairs: Sequence[tuple[str, str]],
        queries: Mapping[str, Pooled],
        documents: Mapping[str, Pooled],
    ) -> None:
        """Set the scores of the pairs whose document is in ``documents``."""
        num_scores = 0
        for index, (query, document) in enumerate(pairs):
            if document in documents:
                if num_scores % _SCORES_AT_A_TIME == 0:
                    await asyncio.sleep(0)
                num_scores += 1
                scores[index] = self.limits.score(queries[query], documents[document])

    async def _cut(self, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Return ``pairs`` with each text cut as the request says."""
        query_limit, limit = self.payload.max_tokens_per_query or 0, self.payload.max_tokens_per_doc or 0
        if not (query_limit or limit):
            return pairs
        queries = await self.cut([query for query, _ in pairs], query_limit)
        return list(zip(queries, await self.cut([text for _, text in pairs], limit), strict=True))


class ScoreResults(ScoringResults[ScoreRequest]):
    """The score of each pair."""

    fields, id_prefix = ScoreRequest, "score-"

    async def response(self) -> ScoreResponse:
        """Return the similarity or relevance score of each pair of texts."""
        scores, outputs = await self.scores(self.payload.pairs())
        return self.listed(ScoreResponse, [Score(index, value) for index, value in enumerate(scores)], outputs)


class RerankResults(ScoringResults[RerankRequest]):
    """Documents by their relevance to a query."""

    fields, id_prefix = RerankRequest, "rerank-"

    async def response(self) -> RerankResponse | Response:
        """Rank documents by their relevance to a query."""
        payload = self.payload
        texts = payload.listed()
        scores, outputs = await self.scores([(payload.query, text) for text in texts])
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: payload.top_n or None]
        if payload.texts is not None:
            shown = texts if payload.return_text else [None] * len(texts)
            return JSONResponse([RankedByTEI(index, scores[index], shown[index]) for index in order])
        repeats = payload.return_documents is not False
        results = [
            RankedDocument(index, scores[index], RankedText(texts[index]) if repeats else msgspec.UNSET)
            for index in order
        ]
        return RerankResponse(self.id, self.model, results, usage_of(outputs))


ROUTES = (
    *(pooling_route(path, ScoreResults, ScoreResponse, "The scores.") for path in ("/score", "/v1/score")),
    *(
        pooling_route(path, RerankResults, RerankResponse, "The documents, best first; as a list for texts.")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
)
