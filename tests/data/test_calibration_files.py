"""Files of calibration text in common formats."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os

import pytest

from aiakq.data.documents import read_file
from aiakq.data.rows import RowOptions
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
        ("semicolons.csv", "text;n\n" + f"{TEXT};1\n" * 3),
        ("tabs.csv", "n\ttext\n" + f"1\t{TEXT}\n" * 3),
        ("bars.csv", "n|words\n" + f"1|{TEXT}\n" * 3),
        ("commas.tsv", "n,text\n" + f"1,{TEXT}\n" * 3),
        ("excel.csv", "sep=;\nn;text\n" + f"1;{TEXT}\n" * 3),
        ("no_header.csv", f"1,{TEXT}\n" * 3),
        ("index.csv", ",text\n" + "".join(f"{n},{TEXT}\n" for n in range(3))),
        ("mark.csv", "\ufefftext,n\n" + f"{TEXT},1\n" * 3),
        ("null.csv", "text,n\n" + f"{TEXT},1\n" * 3 + "nan,2\n,3\n"),
        ("nested.json", {"data": {"train": [{"text": TEXT}] * 3}}),
        ("splits.json", {"train": [{"text": TEXT}] * 3, "test": [{"text": "other"}] * 3}),
        ("columns_of_a_split.json", {"train": {"text": [TEXT] * 3}}),
        ("viewer_with_features.json", {"features": [{"name": "text"}], "rows": [{"row": {"text": TEXT}}] * 3}),
        ("pandas_columns.json", {"text": {"0": TEXT, "1": TEXT, "2": TEXT}}),
        ("pandas_split.json", {"columns": ["text"], "index": [0, 1, 2], "data": [[TEXT]] * 3}),
        ("pandas_index.json", {"0": {"text": TEXT}, "1": {"text": TEXT}, "2": {"text": TEXT}}),
        ("pandas_table.json", {"schema": {"fields": []}, "data": [{"index": 0, "text": TEXT}] * 3}),
        ("rows.txt", lines(*[{"text": TEXT}] * 3)),
        ("rows", json.dumps([{"text": TEXT}] * 3)),
        ("twice.jsonl", lines(*[json.dumps({"text": TEXT})] * 3)),
        ("lines.jsonl.bz2", bz2.compress(lines(*[{"text": TEXT}] * 3).encode())),
        ("lines.jsonl.xz", lzma.compress(lines(*[{"text": TEXT}] * 3).encode())),
        ("NaN.json", '[{"text": "%s", "n": NaN}, {"text": "%s"}, {"text": NaN}, {"text": "%s"}]' % ((TEXT,) * 3)),
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
def test_conversations_are_distinguished_from_lists_of_texts(read, name, content, count):
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


def test_a_file_of_zstandard_is_read(tmp_path):
    import pyarrow

    with pyarrow.CompressedOutputStream(str(tmp_path / "rows.jsonl.zst"), "zstd") as stream:
        stream.write(lines(*[{"text": TEXT}] * 2).encode())
    assert [document.text for document in read_file(tmp_path / "rows.jsonl.zst")] == [TEXT] * 2


def test_fields_that_parquet_adds_to_other_messages_are_left_out(tmp_path):
    import pyarrow
    import pyarrow.parquet

    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("a", "b")]
    talk = [*TALK, *({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [talk]}), tmp_path / "rows.parquet")
    found = next(iter(read_file(tmp_path / "rows.parquet")))
    assert [message["tool_calls"] for message in found.messages[1:]] == [[call] for call in calls]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("loose.csv", f"text,n\n{TEXT},1\nHello, world,2\n", "row 2 has 3 fields instead of 2"),
        ("broken.csv", "text,n\nOne line\nand one more,1\n", "row 1 has 1 field instead of 2"),
        ("quotes.csv", f'text,n\n"He said "{TEXT}" twice",1\n', "it is no table"),
        ("twins.csv", "text,text\na b,c d\n", "two columns named 'text'"),
        ("pointer.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a git-lfs pointer"),
        ("pointer.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a git-lfs pointer"),
        ("pointer.jsonl.gz", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a git-lfs pointer"),
        ("packed.jsonl", gzip.compress(b"{}", mtime=0), "a gzip file without the suffix .gz"),
        ("table.txt", b"PAR1....", "a Parquet file without the suffix"),
        ("wide.txt", TEXT.encode("utf-16-le"), "UTF-16 needs a byte order mark"),
        ("splits.json", {"test": [{"text": TEXT}], "validation": [{"text": TEXT}]}, "the splits test, validation"),
    ],
)
def test_files_that_would_be_misread_are_refused(read, name, content, reason):
    with pytest.raises(AiakqError, match=reason):
        read(name, content)


def test_quotes_may_be_escaped_as_spark_does(read):
    found, _ = read("spark.csv", 'text,n\n"He said \\"no\\", twice",1\n')
    assert [document.text for document in found] == ['He said "no", twice']


def test_what_cannot_be_read_is_refused(read, tmp_path):
    with pytest.raises(AiakqError, match="not UTF-8 text .line 2"):
        read("latin.txt", "line\ncaf\u00e9".encode("latin-1"))
    with pytest.raises(AiakqError, match="no gzip file"):
        read("broken.txt.gz", b"text")
    os.mkfifo(tmp_path / "pipe.txt")
    for path, reason in ((tmp_path / "pipe.txt", "named pipe"), ("/dev/zero", "a device"), (tmp_path, "a folder")):
        with pytest.raises(AiakqError, match=reason):
            list(read_file(type(tmp_path)(path)))
