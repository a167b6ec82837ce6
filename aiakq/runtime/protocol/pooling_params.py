"""Pooling of the hidden states of a prompt: ``PoolingParams`` of a request, and ``Pooling`` in the engine."""

from __future__ import annotations

import array
import dataclasses
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from aiakq.constraints import declarations, declare
from aiakq.errors import error
from aiakq.runtime.protocol.late_interaction import LateInteraction
from aiakq.runtime.protocol.parameter import Checks, Parameter
from aiakq.runtime.protocol.text_prompts import TextPrompts

#: Kinds that reduce the rows of all tokens to one: their mean, their largest values, the mean weighted by position from
#: 1 on, and the sum divided by the square root of their number.
REDUCTIONS = ("MEAN", "MAX", "WEIGHTEDMEAN", "MEAN_SQRT_LEN")
#: Kinds of pooling, by vLLM's names; the last three reductions are those of sentence-transformers.
POOLING_TYPES = ("LAST", "CLS", "ALL", "STEP", *REDUCTIONS)
#: Maximum number of values in the result of one request, for prompts with many rows.
MAX_NUMBERS = 1 << 23
#: Activations of pooled rows; an empty name means none.
ACTIVATIONS = ("", "softmax", "sigmoid")


@dataclass
class PoolingParams:
    """Pooling parameters of a request; None selects the server's default.

    dimensions  number of leading dimensions of an embedding to keep, for Matryoshka models.
    normalize   whether to normalize an embedding to length 1.
    activation  whether to turn scores into probabilities.
    prompt_name name of the prompt of the model's files that is put before a text.
    input_type  kind of text: query, document, or a name as ``prompt_name``.
    """

    dimensions: int | None = declare(None)
    normalize: bool | None = declare(None)
    activation: bool | None = declare(None)
    prompt_name: str | None = declare(None)
    input_type: str | None = declare(None)

    def __post_init__(self) -> None:
        """Validate the types. Raises ``invalid_type``."""
        _CHECKS.check(vars(self))


_CHECKS = Checks(declarations(PoolingParams, Parameter))


class Pooling(msgspec.Struct, frozen=True):
    """How the model's output [T, D] for a prompt of T tokens is pooled.

    kind         LAST, CLS (the first token), ALL (a row per token), STEP (a row per ``step_tag_id``), or one of
                 ``REDUCTIONS``.
    activation   softmax, sigmoid, or empty for none.
    normalize    whether rows are normalized to length 1, after truncation to ``dimensions``.
    skipped      tokens without a row, of ALL.
    """

    kind: str
    normalize: bool = False
    activation: str = ""
    dimensions: int | None = None
    step_tag_id: int | None = None
    skipped: tuple[int, ...] = ()

    @property
    def reads_every_token(self) -> bool:
        """Whether outputs of tokens other than the last are needed, which rules out the prefix cache."""
        return self.kind != "LAST"

    @property
    def has_one_row(self) -> bool:
        """Whether the result is a single row."""
        return self.kind in ("LAST", "CLS", *REDUCTIONS)

    def positions(self, token_ids: Sequence[int], first: int, end: int, num_prompt: int) -> Sequence[int]:
        """Return the positions in ``first`` .. ``end`` - 1 of the prompt ``token_ids`` whose outputs are needed."""
        if self.kind == "LAST":
            return range(max(first, num_prompt - 1), end)
        if self.kind == "CLS":
            return range(first, min(end, 1))
        if self.kind == "STEP":
            return [at for at in range(first, end) if token_ids[at] == self.step_tag_id]
        if self.skipped:
            return [at for at in range(first, end) if token_ids[at] not in self.skipped]
        return range(first, end)

    def num_rows(self, token_ids: Sequence[int]) -> int:
        """Return the number of rows that a prompt is pooled to."""
        return 1 if self.has_one_row else len(self.positions(token_ids, 0, len(token_ids), len(token_ids)))


class Pooled(msgspec.Struct, frozen=True):
    """The pooled prompt: rows of ``width`` float32 values, in native byte order."""

    data: bytes
    width: int

    @property
    def num_rows(self) -> int:
        return len(self.data) // (4 * self.width)

    def vector(self) -> list[float]:
        """Return the single row."""
        return array.array("f", self.data).tolist()

    def rows(self) -> list[list[float]]:
        """Return all rows."""
        numbers = self.vector()
        return [numbers[start : start + self.width] for start in range(0, len(numbers), self.width)]


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine similarity of two vectors."""
    product: float = sum(map(operator.mul, one, other))
    lengths = math.sqrt(sum(x * x for x in one)) * math.sqrt(sum(x * x for x in other))
    return product / max(lengths, 1e-8)


def max_similarity(query: Pooled, document: Pooled) -> float:
    """Return the sum, over the vectors of a query, of its largest dot product with a vector of a document.

    Source: Khattab and Zaharia 2020 (arXiv:2004.12832), section 3.3.
    """
    import numpy as np

    queries, documents = (
        np.frombuffer(each.data, np.float32).reshape(-1, each.width).astype(np.float64) for each in (query, document)
    )
    if not len(queries) or not len(documents):
        return 0.0
    return float((queries @ documents.T).max(axis=1).sum())


def paired(ones: Sequence[str], twos: Sequence[str]) -> list[tuple[str, str]]:
    """Pair one text with each of several, or texts pairwise. Raises ``invalid_type`` and ``empty_prompt``."""
    if not ones or not twos:
        raise error("empty_prompt", param="text_2" if ones else "text_1")
    if len(ones) not in (1, len(twos)):
        reason = f"there are {len(ones)} of them and {len(twos)} of the other; one, or as many, are expected"
        raise error("invalid_type", param="text_1", reason=reason)
    return list(zip(list(ones) * (len(twos) if len(ones) == 1 else 1), twos, strict=True))


class PoolingLimits(msgspec.Struct, frozen=True):
    """Pooling of a server, and the limits of what requests may change.

    task        embed, classify, score or reward.
    pooling     default pooling of a request.
    width       number of values in a row.
    dimensions  sizes that an embedding may be truncated to; empty for any (Matryoshka), None for no truncation.
    labels      name of each score of a classifier.
    concatenates  whether two texts are scored as one concatenated text instead of a pair.
    reads_both_ways  whether the model is an encoder, whose attention reads whole texts. A text that is cut keeps the
                special tokens around it, as the tokenizer cuts it, and padding is not read.
    prompts     what the model's files put before texts.
    late        how a ColBERT model, whose texts have a vector per token, reads queries and documents; None for others.
    """

    task: str
    pooling: Pooling
    width: int
    dimensions: list[int] | None = None
    labels: list[str] = []
    concatenates: bool = False
    reads_both_ways: bool = False
    prompts: TextPrompts = TextPrompts()
    late: LateInteraction | None = None

    @property
    def is_classifier(self) -> bool:
        """Whether the model returns scores instead of hidden states."""
        return bool(self.labels)

    def describe(self) -> str:
        """Return a description for the start-up table."""
        pooling = self.pooling
        parts = [self.task, pooling.kind, *(["normalized"] if pooling.normalize else [])]
        parts += [pooling.activation] if pooling.activation else []
        return f"{', '.join(parts)}: {self.width} numbers" + ("" if pooling.has_one_row else " for each row")

    def before(self, params: PoolingParams) -> str:
        """Return what is put before texts. Raises ``unsupported_parameter``."""
        if self.late is not None and not self.prompts.named:
            return ""
        return self.prompts.before(params.prompt_name, params.input_type)

    def sides(self, pairs: Sequence[tuple[str, str]], params: PoolingParams) -> list[tuple[list[str], PoolingParams]]:
        """Return the distinct texts of ``pairs`` to embed, with their parameters: queries and documents, or one list of
        both if the model does not tell them apart."""
        if self.late is None and not self.prompts.has_roles:
            return [(list(dict.fromkeys(text for pair in pairs for text in pair)), params)]
        return [
            (list(dict.fromkeys(texts)), dataclasses.replace(params, input_type=role))
            for texts, role in zip(zip(*pairs, strict=True), ("query", "document"), strict=True)
        ]

    def score(self, query: Pooled, document: Pooled) -> float:
        """Return the similarity of the embeddings of two texts."""
        if self.late is not None:
            return max_similarity(query, document)
        return similarity(query.vector(), document.vector())

    @property
    def tasks(self) -> tuple[str, ...]:
        """vLLM's names of what the model does."""
        if self.task == "reward":
            return ("classify",) if self.pooling.has_one_row else ("token_classify", "token_embed")
        name = "embed" if self.task == "embed" else "classify"
        return (name if self.pooling.has_one_row else f"token_{name}",)

    def check_task(self, param: str, task: str | None) -> None:
        """Raise ``unsupported_parameter`` for another ``task`` than one of ``tasks``."""
        if task is not None and task not in self.tasks:
            reason = f"the server is started for {' and '.join(self.tasks)}; see --task and --override-pooler-config"
            raise error("unsupported_parameter", param=param, reason=reason)

    def check_embeds(self) -> None:
        """Raise ``task_mismatch`` unless the model returns embeddings."""
        if self.task != "embed" or not self.pooling.has_one_row:
            raise error("task_mismatch", task=self.task, wanted="return an embedding of a text", needed="embed")

    def check_classifies(self) -> None:
        """Raise ``task_mismatch`` unless the model has labels."""
        if self.task not in ("classify", "score") or not self.pooling.has_one_row:
            raise error("task_mismatch", task=self.task, wanted="return probabilities of labels", needed="classify")

    def check_scores(self) -> None:
        """Raise ``task_mismatch`` unless the model returns embeddings or a single score."""
        has_one_score = self.width == 1 and self.task in ("classify", "score")
        has_rows = self.pooling.has_one_row or self.late is not None
        if not (has_one_score or self.task == "embed") or not has_rows:
            raise error("task_mismatch", task=self.task, wanted="return a score of two texts", needed="score")

    @property
    def max_rows(self) -> int:
        """The maximum number of rows of the prompts of a request."""
        return MAX_NUMBERS // self.width

    def check_rows(self, num_rows: int, param: str) -> None:
        """Raise ``value_out_of_range`` if the prompts of a request are pooled to too many rows."""
        most = self.max_rows
        if not self.pooling.has_one_row and num_rows > most:
            allowed = f"at most {most} together, of {self.width} numbers each"
            raise error("value_out_of_range", param=param, value=f"{num_rows} rows", allowed=allowed)

    def resolve(self, params: PoolingParams) -> Pooling:
        """Return the pooling for ``params``. Raises ``value_out_of_range`` and ``unsupported_parameter``."""
        changes: dict[str, object] = {}
        if self.late is not None:
            if params.prompt_name is not None:
                reason = "the model embeds queries and documents differently; use input_type"
                raise error("unsupported_parameter", param="prompt_name", reason=reason)
            is_document = params.input_type is not None and self.late.role(params.input_type) == "document"
            changes["skipped"] = self.late.skipped if is_document else ()
        if params.dimensions is not None and params.dimensions != self.width:
            self._check_dimensions(params.dimensions)
            changes["dimensions"] = params.dimensions
        if params.normalize is not None:
            if self.is_classifier and params.normalize:
                raise error("unsupported_parameter", param="normalize", reason="the model returns scores")
            changes["normalize"] = params.normalize
        if params.activation is not None:
            if not self.is_classifier and params.activation:
                raise error("unsupported_parameter", param="activation", reason="the model returns no scores")
            if not params.activation:
                changes["activation"] = ""
            elif not self.pooling.activation:
                reason = "the server returns scores as the model computes them"
                raise error("unsupported_parameter", param="activation", reason=reason)
        return msgspec.structs.replace(self.pooling, **changes)

    def _check_dimensions(self, wanted: int) -> None:
        if self.task != "embed" or self.dimensions is None:
            reason = f"the model returns {self.width} values; config.json has neither is_matryoshka nor "
            reason += "matryoshka_dimensions (--hf-overrides can), so a truncated embedding would be of little use"
            raise error("unsupported_parameter", param="dimensions", reason=reason)
        if self.dimensions and wanted not in self.dimensions:
            allowed = "one of " + ", ".join(map(str, self.dimensions))
            raise error("value_out_of_range", param="dimensions", value=wanted, allowed=allowed)
        if not 1 <= wanted <= self.width:
            raise error("value_out_of_range", param="dimensions", value=wanted, allowed=f"1 to {self.width}")
