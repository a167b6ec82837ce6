"""Files of calibration text as people have them."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from aiakq.data.documents import RowOptions, read_file
from aiakq.errors import AiakqError

TEXT = "The quick brown fox."
TALK = [{"role": "user", "content": TEXT}]


@pytest.fixture
def read(tmp_path):
    def run(name: str, content: object, column: str | None = None):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        rows = RowOptions(column)
        return list(read_file(path, rows)), rows

    return run


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("empty", [{"text": None}, {"text": ""}, {"text": " \n"}, {"messages": []}, None, ""])
def test_a_row_without_text_is_left_out_and_counted(read, empty):
    found, rows = read("rows.jsonl", lines({"text": TEXT}, empty, {"text": TEXT}))
    assert [document.text for document in found] == [TEXT, TEXT] and rows.num_empty == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lines.json", lines(*[{"text": TEXT}] * 3)),
        ("columns.json", {"text": [TEXT] * 3, "n": [1, 2, 3]}),
        ("wrapped.json", {"data": [{"text": TEXT}] * 3, "version": 1}),
        ("split.json", {"train": [{"text": TEXT}] * 3}),
        ("viewer.json", {"rows": [{"row_idx": 0, "row": {"text": TEXT}}] * 3}),
        ("array.jsonl", [{"text": TEXT}] * 3),
        ("pretty.jsonl", json.dumps([{"text": TEXT}] * 3, indent=2)),
        ("texts.json", [TEXT] * 3),
        ("blank.jsonl", "\ufeff\n" + "\r\n\r\n".join([json.dumps({"text": TEXT})] * 3)),
        ("wide.jsonl", lines(*[{"text": TEXT}] * 3).encode("utf-16")),
        ("lines.jsonl.gz", gzip.compress(lines(*[{"text": TEXT}] * 3).encode(), mtime=0)),
        ("table.csv", "text,n\n" + f"{TEXT},1\n" * 3),
        ("table.tsv", "text\tn\n" + f"{TEXT}\t1\n" * 3),
        ("one_column.csv", "whatever,n\n" + f"{TEXT},1\n" * 3),
        ("code.jsonl", lines(*[{"code": TEXT, "language": "en"}] * 3)),
    ],
)
def test_the_usual_files_are_read(read, name, content):
    assert [document.text for document in read(name, content)[0]] == [TEXT] * 3


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("one.json", TALK, 1),
        ("object.json", {"messages": TALK}, 1),
        ("columns.json", {"messages": [TALK, TALK]}, 2),
        ("lists.jsonl", lines(TALK, TALK), 2),
        ("chosen.jsonl", lines({"chosen": TALK, "rejected": TALK}), 1),
        ("fields.jsonl", lines({"messages": {"role": ["user"], "content": [TEXT]}}), 1),
    ],
)
def test_conversations_are_told_from_lists_of_texts(read, name, content, count):
    found, _ = read(name, content)
    assert [list(document.messages) for document in found] == [TALK] * count


def test_a_column_can_be_named(read):
    rows = lines({"text": "other", "prompt": TEXT, "talk": TALK})
    assert read("rows.jsonl", rows, "prompt")[0][0].text == TEXT
    assert list(read("rows.jsonl", rows, "talk")[0][0].messages) == TALK
    with pytest.raises(AiakqError, match="no column 'none' .it has prompt, talk, text"):
        read("rows.jsonl", rows, "none")
    with pytest.raises(AiakqError, match="--calibration-column"):
        read("rows.jsonl", lines({"abc": TEXT, "xyz": TEXT}))


def test_an_arrow_file_of_datasets_is_read(tmp_path):
    import pyarrow

    table = pyarrow.table({"text": [TEXT] * 2})
    for opener in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        with opener(str(tmp_path / "rows.arrow"), table.schema) as writer:
            writer.write_table(table)
        assert [document.text for document in read_file(tmp_path / "rows.arrow")] == [TEXT] * 2


def test_what_cannot_be_read_is_refused(read, tmp_path):
    with pytest.raises(AiakqError, match="not UTF-8 text .line 2"):
        read("latin.txt", "line\ncaf\u00e9".encode("latin-1"))
    with pytest.raises(AiakqError, match="no gzip file"):
        read("broken.txt.gz", b"text")
    os.mkfifo(tmp_path / "pipe.txt")
    for path, reason in ((tmp_path / "pipe.txt", "named pipe"), ("/dev/zero", "a device"), (tmp_path, "a folder")):
        with pytest.raises(AiakqError, match=reason):
            list(read_file(type(tmp_path)(path)))
