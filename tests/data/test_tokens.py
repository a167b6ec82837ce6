"""Documents as text, and text as token ids: every accepted form of a file, every refusal with its place."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from aiakq.data import documents, tables
from aiakq.data.tokens import read_documents, tokenize
from aiakq.errors import AiakqError

TALK = [{"role": "user", "content": "Who was he?"}, {"role": "assistant", "content": "A sailor."}]
RENDERED = "<|im_start|>user\nWho was he?<|im_end|>\n<|im_start|>assistant\nA sailor.<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(example_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(example_model)


def test_pieces_change_no_token_at_line_ends(tokenizer: Any) -> None:
    text = "".join(f"Line {i} of a text that is longer than one piece.\n" for i in range(500))
    assert tokenize([text], tokenizer)[0] == tokenizer(text, add_special_tokens=False)["input_ids"]


def documents_of(tmp_path: Path, name: str, content: str | bytes, tokenizer: Any = None) -> list[str]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_documents(path, tokenizer)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "One."}\n\n{"text": "Two."}\n'),
        ("a.jsonl", '"One."\r\n"Two."\r\n'),
        ("a.ndjson", '{"content": "One."}\n{"document": "Two."}'),
        ("a.json", '["One.", {"text": "Two."}]'),
        ("a.csv", 'id,text\n1,One.\n2,"Two."\n'),
        ("a.tsv", "id\ttext\n1\tOne.\n2\tTwo.\n"),
    ],
)
def test_forms_of_texts(tmp_path: Path, name: str, content: str) -> None:
    assert documents_of(tmp_path, name, content) == ["One.", "Two."]


def test_a_line_end_inside_a_text_is_no_line_end(tmp_path: Path) -> None:
    assert documents_of(tmp_path, "a.jsonl", '{"text": "One.\u2028More."}\n') == ["One.\u2028More."]


def test_a_small_parquet_file_that_holds_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value, repeated by reference: a few hundred bytes."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(tables, "MAX_BYTES", 1 << 20)
    values = pyarrow.array(["a" * 10_000]).take(pyarrow.array([0] * 1000))
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    rows = documents.read_file(tmp_path / "a.parquet")
    with pytest.raises(AiakqError, match="its rows hold more than 1 GiB"):
        for read, _ in enumerate(rows, 1):
            assert read <= 128


def test_tables_of_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["One.", "Two."]}), tmp_path / "a.parquet")
    assert read_documents(tmp_path / "a.parquet") == ["One.", "Two."]
    with pytest.raises(AiakqError, match="no Parquet file"):
        documents_of(tmp_path, "b.parquet", b"PAR1 and nothing more")


@pytest.mark.slow
def test_forms_of_conversations(tmp_path: Path, tokenizer: Any) -> None:
    """All in one file, so that the process that renders them starts once."""
    lines = [
        {"messages": TALK},
        {"text": "A text between them."},
        {"messages": {"role": ["user", "assistant"], "content": ["Who was he?", "A sailor."]}},
        TALK,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who was he?"}]}, TALK[1]]},
        {"conversations": [{"from": "human", "value": "Who was he?"}, {"from": "gpt", "value": "A sailor."}]},
        {"prompt": "Who was he?", "completion": "A sailor."},
        {"prompt": [TALK[0]], "completion": [TALK[1]]},
        {"instruction": "Who was he?", "input": "", "output": "A sailor."},
        {"question": "Who was he?", "answer": "A sailor.", "id": 7},
        {"system": "Be brief.", "prompt": "Who was he?", "response": "A sailor."},
        {"instruction": "Who was he?", "input": "Ahab", "output": "A sailor."},
        {"messages": TALK, "tools": [{"name": "find_people", "parameters": {"type": "object", "properties": {}}}]},
    ]
    found = documents_of(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)), tokenizer)
    assert found[:10] == [RENDERED, "A text between them.", *[RENDERED] * 8]
    assert found[10] == "<|im_start|>system\nBe brief.<|im_end|>\n" + RENDERED
    assert found[11] == RENDERED.replace("he?", "he?\n\nAhab")
    assert "find_people" in found[12] and found[12].endswith(RENDERED)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"body": 1, "n": 2}\n', "line 2 has no text, messages, or question .* body, n"),
        ("a.jsonl", '{"text": "fine"}\nnot json\n', "line 2 is no JSON"),
        ("a.jsonl", '{"text": "fine"}\n17\n', "line 2 is neither"),
        ("a.jsonl", '{"messages": ["hello"]}', "line 1, message 1 is no JSON object"),
        ("a.jsonl", '{"messages": [{"content": "hello"}]}', "line 1, message 1 has no role"),
        ("a.jsonl", '{"conversations": [{"from": "human", "value": 3}]}', "line 1, message 1 has no text"),
        ("a.jsonl", '{"prompt": 1, "completion": "x"}', "line 1 has 'prompt', which is no text"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1 holds half a character"),
        ("a.json", "[1]", "item 1 is neither"),
        ("a.csv", "id,xyz\n1,One.\n", "row 1 has no text"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_bad_documents(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    with pytest.raises(AiakqError, match=says) as caught:
        documents_of(tmp_path, name, content)
    assert caught.value.id == "calibration"
