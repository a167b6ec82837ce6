"""Files of token ids: every form in which tokenizers and trainers save them, without their padding."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from aiakq.errors import AiakqError
from aiakq.quantizers.calibration.token_ids import PaddingIds, read_token_file, read_token_ids

TEXT = list(range(3, 13))
MASK = [1] * 10


@pytest.fixture
def read(tmp_path):
    def run(content: object, name: str = "ids.jsonl", padding: PaddingIds | None = None):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_token_file(path, 512, padding or PaddingIds())

    return run


@pytest.mark.parametrize(
    "content",
    [
        {"input_ids": TEXT + [0] * 6, "attention_mask": MASK + [0] * 6},
        {"input_ids": [0] * 6 + TEXT, "attention_mask": [0] * 6 + MASK},
        {"input_ids": [TEXT + [0] * 6], "attention_mask": [MASK + [0] * 6]},
        {"input_ids": TEXT + [0], "attention_mask": [True] * 10 + [False], "labels": [-100] * 11, "position_ids": [0]},
        [{"input_ids": TEXT + [0], "attention_mask": MASK + [0]}],
    ],
)
def test_masked_positions_are_left_out(read, content):
    found = read(content)
    assert found.samples == [TEXT] and found.num_masked in (1, 6)
    assert "attention_mask is 0" in found.warnings("ids.jsonl", PaddingIds())[0]


def test_a_gap_in_the_mask_ends_a_sample(read):
    assert read({"input_ids": [3, 4, 0, 5, 6], "attention_mask": [1, 1, 0, 1, 1]}).samples == [[3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"input_ids": TEXT, "attention_mask": [1]}, "10 ids and an attention_mask of 1 values"),
        ({"input_ids": [TEXT, TEXT], "attention_mask": MASK}, "attention_mask of another shape"),
        ({"input_ids": TEXT, "attention_mask": [2] * 10}, "not 0 or 1"),
        ({"input_ids": TEXT, "attention_mask": "no"}, "holds 'no', which is no list"),
        ({"labels": TEXT}, "no list 'input_ids'"),
        ({"input_ids": [*TEXT, -100]}, "outside 0..511"),
        ({"input_ids": TEXT, "attention_mask": [0] * 10}, "no sample"),
    ],
)
def test_masks_that_do_not_fit_are_refused(read, content, reason):
    with pytest.raises(AiakqError, match=reason):
        read(content)


@pytest.mark.parametrize("line", [TEXT + [0] * 5, [0] * 5 + TEXT, [0] * 2 + TEXT + [0] * 3])
def test_padding_without_a_mask_is_left_out(read, line):
    found = read([line, TEXT], padding=PaddingIds(0))
    assert found.samples == [TEXT, TEXT] and found.num_padding == 5
    assert "as padding: runs of the id 0" in found.warnings("f", PaddingIds(0))[0]


def test_one_padding_id_stays_if_it_also_ends_texts(read):
    assert read([[*TEXT, 2, 2, 2], [*TEXT, 2], TEXT], padding=PaddingIds(2, kept=True)).samples == [
        [*TEXT, 2],
        [*TEXT, 2],
        TEXT,
    ]
    tokenizer = SimpleNamespace(pad_token_id=2, eos_token_id=2, bos_token_id=1)
    assert PaddingIds.of(tokenizer) == PaddingIds(2, True)
    assert PaddingIds.of(None, 7) == PaddingIds(7, True) and PaddingIds.of(None).pad is None


def test_runs_of_an_id_are_named_if_the_padding_id_is_unknown(read):
    found = read([TEXT + [0] * 5, TEXT])
    assert found.samples[0] == TEXT + [0] * 5
    assert "1 lines of f begin or end with a run" in found.warnings("f", PaddingIds())[0]


def csv_of(*rows: list[int]) -> str:
    return "input_ids,n\n" + "".join(f'"{row}",1\n' for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("columns.json", {"input_ids": [TEXT] * 3, "attention_mask": [MASK] * 3}),
        ("objects.json", [{"input_ids": TEXT}] * 3),
        ("lists.json", [TEXT] * 3),
        ("batches.jsonl", (json.dumps({"input_ids": [TEXT]}) + "\n") * 3),
        ("lines.jsonl", (json.dumps(TEXT) + "\r\n") * 3),
        ("mark.txt", "\ufeff" + "\n\n".join([" ".join(map(str, TEXT))] * 3)),
        ("wide.txt", ((",".join(map(str, TEXT)) + "\n") * 3).encode("utf-16")),
        ("cells.csv", csv_of(TEXT, TEXT, TEXT)),
    ],
)
def test_the_usual_forms_are_read(read, name, content):
    assert read(content, name).samples == [TEXT] * 3


def test_a_parquet_file_is_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"input_ids": [[*TEXT, 0]] * 2, "attention_mask": [[*MASK, 0]] * 2})
    pyarrow.parquet.write_table(table, tmp_path / "ids.parquet")
    assert read_token_ids(tmp_path / "ids.parquet", 512) == [TEXT] * 2
