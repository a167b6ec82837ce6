"""Figures of texts: of one model, of a pair, of two quantized models of the same original."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from aiakq.evaluation.intervals import Interval
from aiakq.evaluation.metrics import compare, perplexity
from aiakq.evaluation.text import EvaluationText
from aiakq.evaluation.text_quality import (
    comparison_document,
    overall,
    paired_document,
    perplexity_document,
    verdict,
)
from aiakq.evaluation.wording import BETTER, MIXED, SAME, WORSE, figure_rows, perplexity_remark, quoted

VOCAB = 23


class Bigram:
    """Logits by the last token; ``changed`` adds noise to those after some tokens."""

    def __init__(self, noise: float = 0.0, seed: int = 1) -> None:
        table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
        self.table = table + noise * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


class Letters:
    """A tokenizer of letters, one of which is a control character."""

    def decode(self, ids: list[int]) -> str:
        return "".join("\x1b" if token == 0 else chr(96 + token) for token in ids)


def text(windows: int = 12, length: int = 65) -> EvaluationText:
    ids = torch.randint(0, VOCAB, (windows, length), generator=torch.Generator().manual_seed(2))
    return EvaluationText("words", "some words", ids)


def test_a_pair_has_intervals_around_every_figure() -> None:
    given = text()
    document = comparison_document(given, compare(Bigram(0.2), Bigram(), given.windows), Letters())
    for key in ("kl", "kl_p99", "top1_agreement", "perplexity", "perplexity_ratio"):
        bounds = document[f"{key}_interval"]
        assert bounds["low"] <= document[key] <= bounds["high"], key
    assert document["kl_median"] < document["kl_p99"] <= document["kl_p999"] <= document["kl_max"]
    assert document["kl_max"] == document["kl_max_interval"]["high"]
    assert document["tokens"] == 12 * 64 and document["blocks"] * document["block_tokens"] >= 12 * 64


def test_a_model_alone_has_a_perplexity_with_an_interval() -> None:
    given = text()
    document = perplexity_document(given, perplexity(Bigram(), given.windows))
    assert document["perplexity_interval"]["low"] < document["perplexity"] < document["perplexity_interval"]["high"]
    assert [row[0] for row in figure_rows([document])] == ["perplexity", "  95 % interval", "tokens"]


def test_the_worst_tokens_are_those_with_the_largest_divergence() -> None:
    given, ours, theirs = text(), Bigram(0.5), Bigram()
    compared = compare(ours, theirs, given.windows)
    flat = compared.scores.kl.flatten()
    worst = comparison_document(given, compared, Letters())["worst_tokens"]
    assert [each["kl"] for each in worst] == pytest.approx(flat.sort(descending=True).values[:5].tolist())
    for each in worst:
        row, at = each["window"], each["position"]
        ids = given.windows[row].tolist()
        assert flat.view(12, 64)[row, at - 1] == pytest.approx(each["kl"])
        assert each["id"] == ids[at] and each["context"] == Letters().decode(ids[max(0, at - 12) : at])
        p = theirs.table[ids[at - 1]].softmax(0)
        assert each["p_original"] == pytest.approx(float(p[ids[at]]), rel=1e-5)
        assert each["original_choices"][0]["id"] == int(p.argmax())
        assert each["original_choices"][0]["p"] == pytest.approx(float(p.max()), rel=1e-5)


def test_control_characters_of_a_text_are_shown_escaped() -> None:
    assert quoted("a\x1b[31m\n\u202eb") == r"'a\x1b[31m\n\u202eb'"


def test_a_model_is_better_where_the_paired_interval_says_so() -> None:
    given, original = text(), Bigram()
    close, far, twin = (compare(Bigram(noise, seed), original, given.windows) for noise, seed in
                        ((0.1, 1), (0.3, 1), (0.1, 9)))  # fmt: skip
    document = paired_document(given, close, far)
    assert document["verdict"] == BETTER and document["kl_difference_interval"]["high"] < 0
    assert document["kl_ratio_interval"]["low"] < document["kl_ratio"] < document["kl_ratio_interval"]["high"] < 1
    assert paired_document(given, far, close)["verdict"] == WORSE
    assert paired_document(given, close, close)["verdict"] == SAME
    assert paired_document(given, close, twin)["kl_difference"] == pytest.approx(close.kl - twin.kl)


def test_verdicts_over_texts() -> None:
    assert verdict(Interval(-2.0, -1.0)) == BETTER and verdict(Interval(-1.0, 1.0)) == SAME == verdict(None)
    assert overall([BETTER, SAME]) == BETTER and overall([SAME, WORSE]) == WORSE
    assert overall([SAME, SAME]) == SAME and overall([BETTER, WORSE]) == MIXED


def remark(ratio: float, low: float, high: float) -> str | None:
    entry: dict[str, Any] = {"name": "prose", "perplexity_ratio": ratio}
    return perplexity_remark({**entry, "perplexity_ratio_interval": {"low": low, "high": high}})


def test_a_perplexity_below_the_originals_is_said_not_to_be_fidelity() -> None:
    found = remark(0.99, 0.98, 0.995)
    assert found is not None and "-1.00 %; 95 % interval -2.00 to -0.50 %" in found
    assert "This is not fidelity, but a difference" in found
    assert "may be chance" in str(remark(0.99, 0.98, 1.01))
    assert remark(1.01, 0.98, 1.02) is None


def test_a_broken_model_has_figures_without_intervals() -> None:
    given, broken = text(), Bigram()
    broken.table.fill_(math.nan)
    document = comparison_document(given, compare(broken, Bigram(), given.windows), Letters())
    assert math.isnan(document["kl"]) and document["kl_interval"] is None
    assert document["worst_tokens"] == []


@pytest.mark.parametrize("logit", [math.nan, -math.inf])
def test_a_broken_model_is_worse_than_any_other(logit: float) -> None:
    given, broken, original = text(), Bigram(), Bigram()
    broken.table[3] = logit
    broken.table[3, 0] = 0.0
    bad, good = (compare(model, original, given.windows) for model in (broken, Bigram(0.5)))
    assert not math.isfinite(bad.kl)
    assert paired_document(given, bad, good)["verdict"] == WORSE
    assert paired_document(given, good, bad)["verdict"] == BETTER
    assert overall([paired_document(given, bad, good)["verdict"], SAME]) == WORSE
