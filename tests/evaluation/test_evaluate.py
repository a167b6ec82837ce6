"""Perplexity and comparison against sums written out by hand."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.errors import AiakqError
from aiakq.evaluation import evaluate
from aiakq.evaluation.metrics import compare, perplexity, windows
from aiakq.evaluation.text import load_windows


class Table:
    """A model whose logits depend on the last token only."""

    def __init__(self, seed: int, vocab: int = 11) -> None:
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))
        self.calls: list[tuple[int, ...]] = []

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(ids.shape))
        return self.table[ids]


def ids(count: int) -> list[int]:
    return torch.randint(0, 11, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def test_token_ids_are_split_into_whole_windows() -> None:
    assert windows(list(range(10)), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(list(range(10)), 4, limit=1).tolist() == [[0, 1, 2, 3]]
    assert windows([1, 2, 3], 100).tolist() == [[1, 2, 3]]
    with pytest.raises(AiakqError) as caught:
        windows([1], 4)
    assert caught.value.id == "evaluation_text"


def test_a_tokenizer_of_another_model_is_refused(byte_tokenizer: Any) -> None:
    assert int(load_windows(None, byte_tokenizer, 64, len(byte_tokenizer), 640)[0].max()) < len(byte_tokenizer)
    with pytest.raises(AiakqError, match="does not belong to this model") as caught:
        load_windows(None, byte_tokenizer, 64, 50, 640)
    assert caught.value.id == "evaluation_text"


def test_a_tokenizer_of_another_folder(example_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "model"
    shutil.copytree(example_model, bare, ignore=shutil.ignore_patterns("*token*"))

    def measured(model: Path, tokenizer: Path | None) -> float:
        options = EvalArguments(model=str(model), limit=64, tokenizer=tokenizer and str(tokenizer))
        return evaluate.run(options, lambda *_: None).metrics["perplexity"]

    with pytest.raises(AiakqError, match="has no tokenizer.*--tokenizer"):
        measured(bare, None)
    assert measured(bare, example_model) == measured(example_model, None)


def test_models_whose_tokenizers_differ_are_not_compared(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, other = tiny_model("LlamaForCausalLM"), tmp_path / "other"
    shutil.copytree(source, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    bare = tmp_path / "bare"
    shutil.copytree(source, bare, ignore=shutil.ignore_patterns("*token*"))
    text = tmp_path / "text.txt"
    text.write_text("abc abc " * 20)

    def kl(model: Path, original: Path, *versus: Path, tokenizer: Path | None = None) -> float:
        options = EvalArguments(
            model=str(model),
            versus=tuple(map(str, versus)),
            original=str(original),
            text=(str(text),),
            tokenizer=tokenizer and str(tokenizer),
        )
        return evaluate.run(options, lambda *_: None).metrics["kl"]

    for models in ((other, source), (source, source, other)):
        with pytest.raises(AiakqError, match="their tokenizers divide text.txt into different tokens") as caught:
            kl(*models)
        assert caught.value.id == "option_conflict" and "--tokenizer" in caught.value.remedy
    assert kl(other, source, tokenizer=source) == 0.0
    assert kl(source, bare) == 0.0, "a model without a tokenizer is given the other one's tokens"


def test_a_model_is_not_compared_with_itself_under_another_name(tmp_path: Path) -> None:
    options = EvalArguments(model=str(tmp_path / "a"), versus=(str(tmp_path / "b" / ".." / "a"),), original="o")
    with pytest.raises(AiakqError, match="a model is not compared with itself"):
        evaluate.check(options)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a", "text.txt has 1 token; at least 32 are needed"),
        (b"", "text.txt has 0 tokens; at least 32 are needed"),
        ("café".encode("latin1"), "text.txt: it is not UTF-8 text"),
    ],
)
def test_an_unusable_text_is_not_called_calibration_data(
    content: bytes, words: str, byte_tokenizer: Any, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    with pytest.raises(AiakqError) as caught:
        load_windows(text, byte_tokenizer, 64, 1000)
    assert caught.value.id == "evaluation_text" and words in caught.value.message


def test_windows_fit_into_the_context_of_every_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc abc " * 20)
    source, short = (str(tiny_model("GPT2LMHeadModel", n_positions=count)) for count in (512, 64))
    for models in ({"original": short}, {"original": source, "versus": (short,)}):
        options = EvalArguments(model=source, text=(str(text),), **models)
        with pytest.raises(AiakqError) as caught:
            evaluate.run(options, lambda *_: None)
        assert caught.value.message == f"--seqlen is 160, which is not at most 64, the context of {short}."


def test_a_rounded_kv_cache_is_that_of_the_model_not_of_its_original(tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("LlamaForCausalLM"))

    def divergence(kv_cache_dtype: str) -> float:
        options = EvalArguments(model=model, original=model, text=("prose",), limit=64, kv_cache_dtype=kv_cache_dtype)
        return float(evaluate.run(options, lambda *_: None).metrics["kl"])

    assert divergence("auto") == pytest.approx(0.0, abs=1e-9)
    assert divergence("fp8_e5m2") > divergence("int8") > 1e-9, "with an original rounded alike both would be 0"


def test_perplexity_is_the_sum_over_predictions() -> None:
    model, text = Table(0), windows(ids(205), 20)
    total = count = 0.0
    for row in text.tolist():
        for now, then in zip(row[:-1], row[1:], strict=True):
            total -= float(torch.log_softmax(model.table[now].double(), 0)[then])
            count += 1
    seen = []
    result = perplexity(model, text, lambda done, whole: seen.append((done, whole)))
    assert result.value == pytest.approx(math.exp(total / count), rel=1e-6)
    assert result.tokens == count == 10 * 19
    assert seen[-1] == (10, 10)
    assert model.calls[0] == (1, 20)  # the first shows how large a batch may be


def test_uniform_predictions_have_the_vocabulary_as_perplexity() -> None:
    model = Table(0)
    model.table.zero_()
    assert perplexity(model, windows(ids(100), 10)).value == pytest.approx(11.0, rel=1e-6)


def test_compare() -> None:
    one, two, text = Table(0), Table(1), windows(ids(150), 15)
    result = compare(one, two, text)
    assert result.perplexity == pytest.approx(perplexity(one, text).value, rel=1e-6)
    assert result.perplexity_original == pytest.approx(perplexity(two, text).value, rel=1e-6)
    kl = agreement = 0.0
    for now in text[:, :-1].flatten().tolist():
        p, q = two.table[now].double().softmax(0), one.table[now].double().softmax(0)
        kl += float((p * (p / q).log()).sum())
        agreement += float(p.argmax() == q.argmax())
    assert result.kl == pytest.approx(kl / result.tokens, rel=1e-5)
    assert result.top1_agreement == pytest.approx(agreement / result.tokens)
    same = compare(one, one, text)
    assert same.kl == pytest.approx(0.0, abs=1e-9)
    assert same.top1_agreement == 1.0


def test_impossible_tokens_do_not_break_the_comparison() -> None:
    one, two = Table(0), Table(1)
    one.table[:, 3] = -math.inf
    two.table[:, 3] = -math.inf
    text = windows([i % 3 for i in range(40)], 10)
    result = compare(one, two, text)
    assert math.isfinite(result.kl)


def test_a_broken_model_gives_a_number_not_a_crash() -> None:
    model = Table(0)
    model.table.fill_(float("nan"))
    assert math.isnan(perplexity(model, windows(ids(40), 10)).value)
    model.table.zero_()
    model.table[:, 0] = 1e6
    assert perplexity(model, windows([5] * 40, 10)).value == math.inf
