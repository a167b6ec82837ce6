"""Calibration samples: every accepted form of a file, every refusal with its line, and the choice by seed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.quantizers.calibration import load_samples, load_tokenizer, read_token_ids, tokenize
from aiakq.quantizers.options import QuantizeOptions


def options(**fields: Any) -> QuantizeOptions:
    return QuantizeOptions("in", "out", "gptq", **fields)


@pytest.fixture(scope="module")
def tokenizer(example_model: Path) -> Any:
    return load_tokenizer(example_model)


def ids_of(tmp_path: Path, content: str | bytes, vocab: int = 100) -> list[list[int]]:
    path = tmp_path / "ids.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_token_ids(path, vocab)


@pytest.mark.parametrize(
    "content",
    [
        "1,2,3\n4,5\n",
        "1 2 3\n4 5",
        "1, 2,\t3\r\n4, 5\r\n",
        "[1, 2, 3]\n[4, 5]\n",
        "# two samples\n1 2 3  # the first\n\n4 5\n",
        "\ufeff1,2,3\n4,5",
        "[[1, 2, 3], [4, 5]]",
        "[\n  [1, 2, 3],\n  [4, 5]\n]\n",
        '{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5], "text": "# five"}\n',
        "[1,2,3],\n[4,5],\n",
    ],
)
def test_forms_of_token_ids(tmp_path: Path, content: str) -> None:
    assert ids_of(tmp_path, content) == [[1, 2, 3], [4, 5]]


def test_one_list_is_one_sample(tmp_path: Path) -> None:
    assert ids_of(tmp_path, "[1, 2, 3]") == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no sample"),
        ("# nothing\n", "no sample"),
        ("1 2\n3 100\n", "line 2 holds the id 100, outside 0..99"),
        ("1 2\n3 -1\n", "line 2 holds the id -1"),
        ("1 2\n\n3 x\n", "line 3 holds 'x'"),
        ("1 2.5\n", "line 1 holds '2.5'"),
        ("1 " + "9" * 5000, "line 1"),
        ("[[1, 2], [3, true]]", "sample 2 holds 'True'"),
        ("[[1, 2], 3]", "sample 2 is no list"),
        ('{"ids": [1]}', "line 1"),
        ('{"input_ids": [1, "2"]}', "line 1 holds '2'"),
        (b"\xff\xfe\x00\x01", "UTF-8"),
        ("It was a dark night", "line 1 holds 'It'"),
    ],
)
def test_bad_token_ids(tmp_path: Path, content: str | bytes, says: str) -> None:
    with pytest.raises(AiakqError) as caught:
        ids_of(tmp_path, content)
    assert caught.value.id == "calibration"
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_long_samples_are_cut_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(" ".join(str(i % 50) for i in range(25)) + "\n1 2 3\n")
    samples = load_samples(options(token_ids=path, seqlen=10), None, 50)
    assert [len(sample) for sample in samples.samples] == [10, 10, 5, 3]
    assert samples.tokens == 28
    assert any("28 tokens" in warning for warning in samples.warnings)


def test_the_bundled_text_is_the_default(tokenizer: Any) -> None:
    samples = load_samples(options(samples=8, seqlen=64), tokenizer, 4096)
    assert samples.source == "the bundled text"
    assert samples.warnings == []
    assert [len(sample) for sample in samples.samples] == [64] * 8
    again = load_samples(options(samples=8, seqlen=64), tokenizer, 4096)
    other = load_samples(options(samples=8, seqlen=64, seed=1), tokenizer, 4096)
    assert samples.digest == again.digest != other.digest


def test_texts(tmp_path: Path, tokenizer: Any) -> None:
    plain = tmp_path / "text.txt"
    plain.write_text("Once upon a time there was a model. " * 50)
    lines = tmp_path / "text.jsonl"
    lines.write_text('{"text": "Once upon a time"}\n{"text": "there was a model"}\n')
    for path in (plain, lines):
        samples = load_samples(options(calibration=path, samples=4, seqlen=32), tokenizer, 4096)
        assert samples.source == path.name
        assert samples.tokens > 0
    lines.write_text('{"text": "fine"}\n{"body": 1}\n')
    with pytest.raises(AiakqError, match="line 2"):
        load_samples(options(calibration=lines), tokenizer, 4096)
    plain.write_text("")
    with pytest.raises(AiakqError, match="no token"):
        load_samples(options(calibration=plain), tokenizer, 4096)
    with pytest.raises(AiakqError, match="no such file"):
        load_samples(options(calibration=tmp_path / "nothing.txt"), tokenizer, 4096)


def test_a_tokenizer_of_another_model_is_noticed(tokenizer: Any) -> None:
    with pytest.raises(AiakqError, match="outside 0..99"):
        load_samples(options(samples=2, seqlen=32), tokenizer, 100)


def test_without_tokenizer_only_ids_work() -> None:
    with pytest.raises(AiakqError, match="-token"):
        load_samples(options(), None, 100)


def test_pieces_change_no_token_at_line_ends(tokenizer: Any) -> None:
    text = "".join(f"Line {i} of a text that is longer than one piece.\n" for i in range(500))
    assert tokenize([text], tokenizer)[0] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_what_the_tokenizer_puts_first_stays_first() -> None:
    class WithBos:
        bos_token_id = 7

        def __call__(self, text: Any, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
            if isinstance(text, list):
                return {"input_ids": [[1] * len(part) for part in text]}
            return {"input_ids": [7] if add_special_tokens else []}

    samples = load_samples(options(samples=3, seqlen=16), WithBos(), 10)
    assert all(sample[0] == 7 and torch.all(sample[1:] == 1) and len(sample) == 16 for sample in samples.samples)
