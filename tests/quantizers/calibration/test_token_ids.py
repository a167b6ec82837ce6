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
        {"INPUT_IDS": TEXT + [0], "ATTENTION_MASK": MASK + [0]},
        {"inputIds": TEXT + [0], "attentionMask": MASK + [0]},
        {"input_ids": TEXT + [0], "attn_mask": MASK + [0]},
        {"input_ids": TEXT + [0], "attention_masks": MASK + [0]},
        {"input_ids": TEXT + [0], "attention_mask": [MASK + [0]]},
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
        ({"input_ids": TEXT, "attention_mask": [MASK] * 10}, "one list of ids, and an attention_mask of several"),
        ({"labels": TEXT}, "no list 'input_ids'"),
        ({"input_ids": [*TEXT, -100]}, "outside 0..511.* with 0 in an attention_mask"),
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
        ("semicolons.csv", csv_of(TEXT, TEXT, TEXT).replace('",', '";').replace("s,n", "s;n")),
        ("printed.csv", "n,input_ids\n" + f'1,"{str(TEXT).replace(",", "")}"\n' * 3),
        ("words.csv", "input_ids\n" + (" ".join(map(str, TEXT)) + "\n") * 3),
        ("lines.csv", (",".join(map(str, TEXT)) + "\n") * 3),
        ("lines.tsv", ("\t".join(map(str, TEXT)) + "\n") * 3),
        ("semicolons.txt", (";".join(map(str, TEXT)) + "\n") * 3),
        ("floats.txt", (" ".join(f"{each:.18e}" for each in TEXT) + "\n") * 3),
        ("floats.json", [[float(each) for each in TEXT]] * 3),
        ("tensors.txt", f"tensor({TEXT})\n" * 3),
        ("arrays.txt", f"array({TEXT}, dtype=int64)\n" * 3),
        ("literals.txt", f"{{'input_ids': {TEXT}}}\n" * 3),
        ("strings.jsonl", (json.dumps({"input_ids": " ".join(map(str, TEXT))}) + "\n") * 3),
        ("wrapped.json", {"data": [{"input_ids": TEXT}] * 3}),
        ("split.json", {"train": [TEXT] * 3}),
        ("nested.json", {"data": {"train": {"input_ids": [TEXT] * 3}}}),
        ("viewer.json", {"features": [{"name": "input_ids"}], "rows": [{"row": {"input_ids": TEXT}}] * 3}),
        ("pandas.json", {"input_ids": {"0": TEXT, "1": TEXT, "2": TEXT}}),
        ("prompts.jsonl", (json.dumps({"prompt_token_ids": TEXT[:4], "token_ids": TEXT[4:]}) + "\n") * 3),
        ("names.jsonl", (json.dumps({"Input IDs": TEXT}) + "\n") * 3),
        ("camel.json", {"inputIds": [TEXT] * 3}),
        ("upper.jsonl", (json.dumps({"INPUT_IDS": TEXT}) + "\n") * 3),
        ("upper.json", {"INPUT_IDS": [TEXT] * 3, "n": 3}),
        ("texts.jsonl", (json.dumps({"input_ids": [str(each) for each in TEXT]}) + "\n") * 3),
        ("words.jsonl", (json.dumps({"tokens": ["a"] * 10, "ids": TEXT}) + "\n") * 3),
        ("encodings.json", {"encodings": {"input_ids": [TEXT] * 3, "attention_mask": [MASK] * 3}}),
        ("inputs.jsonl", (json.dumps({"id": 1, "inputs": {"input_ids": [TEXT]}}) + "\n") * 3),
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


@pytest.mark.parametrize(
    "columns",
    [
        {"input_mask": MASK + [0] * 4},
        {"mask": MASK + [0] * 4},
        {"loss_mask": [0] * 5 + [1] * 5 + [0] * 4},
        {"labels": TEXT + [-100] * 4},
        {"labels": [-100] * 5 + TEXT[5:] + [-100] * 4},
        {"special_tokens_mask": [1] + [0] * 9 + [1] * 4},
        {"labels": " ".join(map(str, TEXT + [-100] * 4))},
        {"label_ids": TEXT + [-100] * 4},
        {"segment_ids": MASK + [0] * 4},
        {"length": 10},
        {"length": [10]},
        {"valid_length": 10},
        {"position_ids": [*range(10), 9, 9, 9, 9]},
        {"position_ids": [*range(10), 0, 0, 0, 0]},
    ],
)
def test_padding_is_recognized_by_other_columns(read, columns):
    """Of a tokenizer whose padding id is another, so that the run itself says nothing."""
    ids = TEXT + [99] * 4
    for mask in ({}, {"attention_mask": [1] * 14}):
        found = read({"input_ids": ids, **columns, **mask}, padding=PaddingIds(2))
        assert found.samples == [TEXT] and not found.unread


@pytest.mark.parametrize(
    "columns", [{"labels": TEXT + [2] + [-100] * 4}, {"loss_mask": [0] * 5 + [1] * 6 + [0] * 4}], ids=str
)
@pytest.mark.parametrize("padding", [PaddingIds(2, kept=True), PaddingIds()], ids=["known", "unknown"])
def test_a_mask_of_ones_does_not_hide_padding_that_other_columns_mark(read, columns, padding):
    """A trainer padded with the id that ends texts after the masks were made."""
    row = {"input_ids": [*TEXT, 2, 2, 2, 2, 2], "attention_mask": [1] * 15}
    found = read({**row, **columns}, padding=padding)
    assert found.samples == [[*TEXT, 2]] and found.num_padding == 4
    assert "4 tokens of f were left out as padding: runs of the id 2." in found.warnings("f", padding)


def test_masks_that_hide_padding_elsewhere_are_believed(read):
    ones = {"input_ids": [*TEXT, 7, 7, 7], "attention_mask": [1] * 13, "labels": TEXT + [-100] * 3}
    zeros = {"input_ids": [*TEXT, 0, 0, 0], "attention_mask": [1] * 10 + [0] * 3, "labels": TEXT + [-100] * 3}
    assert read([ones, zeros], "ids.json").samples == [[*TEXT, 7, 7, 7], TEXT]


def test_a_long_run_under_a_mask_of_ones_is_named(read):
    padding = PaddingIds(2, kept=True)
    found = read({"input_ids": TEXT + [2] * 9, "attention_mask": [1] * 19}, padding=padding)
    assert found.samples == [TEXT + [2] * 9] and "begin or end with a run" in found.warnings("f", padding)[0]


@pytest.mark.parametrize(
    "columns",
    [
        {"labels": [-100] * 5 + TEXT[5:]},
        {"labels": TEXT[:5] + [-100] * 5},
        {"labels": TEXT[1:] + [-100]},
        {"loss_mask": [0] * 5 + [1] * 5},
        {"mask": [1] * 5 + [0] * 5},
        {"special_tokens_mask": [1] + [0] * 9},
        {"token_type_ids": [0] * 5 + [1] * 5},
        {"segment_ids": [0] * 10},
        {"position_ids": list(range(10))},
        {"length": 10},
    ],
)
def test_text_that_a_loss_ignores_is_calibrated(read, columns):
    found = read({"input_ids": TEXT, **columns})
    assert found.samples == [TEXT] and not found.warnings("f", PaddingIds())


@pytest.mark.parametrize(
    "columns", [{"attention_mask": [1] * 4 + [2] * 6}, {"position_ids": [*range(4), *range(6)]}], ids=str
)
def test_packed_samples_are_separated(read, columns):
    assert read({"input_ids": TEXT, **columns}).samples == [TEXT[:4], TEXT[4:]]


def test_an_id_that_only_pads_is_left_out_whatever_the_mask_says(read):
    masked = {"input_ids": TEXT + [0] * 4, "attention_mask": [1] * 14}
    assert read(masked, padding=PaddingIds(0)).samples == [TEXT]
    assert read(masked, padding=PaddingIds(0, kept=True)).samples == [TEXT + [0] * 4]


def test_long_runs_of_the_padding_id_separate_samples(read):
    assert read([TEXT + [0] * 6 + TEXT], padding=PaddingIds(0)).samples == [TEXT, TEXT]
    assert read([TEXT + [2] * 6 + TEXT], padding=PaddingIds(2, kept=True)).samples == [[*TEXT, 2], TEXT]


@pytest.mark.parametrize("kept", [False, True])
def test_a_sample_of_padding_is_left_out(read, kept):
    assert read([[2] * 8, TEXT], padding=PaddingIds(2, kept)).samples == [TEXT]


@pytest.mark.parametrize("padding", [PaddingIds(), PaddingIds(2)])
def test_samples_filled_up_to_one_length_are_recognized(read, padding):
    found = read([TEXT + [99] * 6, TEXT[:8] + [99] * 8, [*TEXT, *range(20, 26)]], padding=padding)
    assert found.samples == [[*TEXT, 99], [*TEXT[:8], 99], [*TEXT, *range(20, 26)]]
    assert "12 tokens of f were left out as padding: runs of the id 99." in found.warnings("f", padding)


@pytest.mark.parametrize("empty", [None, {"input_ids": None}, {"input_ids": []}, {"input_ids": "nan"}])
def test_rows_without_ids_are_counted(read, empty):
    found = read("".join(json.dumps(row) + "\n" for row in ({"input_ids": TEXT}, empty, {"input_ids": TEXT})))
    assert found.samples == [TEXT, TEXT] and found.num_empty == 1
    assert "1 rows of f were left out" in found.warnings("f", PaddingIds())[0]


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"input_ids": TEXT, "labels": [7, 8, 9]}, "labels"),
        ({"input_ids": TEXT, "decoder_input_ids": [7, 8, 9]}, "decoder_input_ids"),
        ({"prompt_token_ids": TEXT, "outputs": [{"token_ids": [7, 8]}]}, "outputs"),
    ],
)
def test_other_ids_are_named(read, row, unread):
    found = read(row)
    assert found.samples == [TEXT] and list(found.unread) == [unread]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"input_ids": TEXT, "padding_mask": [0] * 10}, "ones are padding in some programs"),
        ({"text": "A text of words."}, "no list 'input_ids' .*--calibration"),
        ("input_ids\n[3 4 ... 9]\n", "shortened with '...'"),
        ({"input_ids": [3.5]}, "holds '3.5', which is no integer"),
        ({"input_ids": TEXT, "attention_mask": [0.0] * 9 + [-1e4]}, "not 0 or 1"),
    ],
)
def test_ids_that_cannot_be_read_right_are_refused(read, content, reason):
    with pytest.raises(AiakqError, match=reason):
        read(content, "ids.csv" if isinstance(content, str) else "ids.jsonl")


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "int64", "float64"])
def test_types_of_ids_in_parquet(tmp_path, kind):
    import pyarrow
    import pyarrow.parquet

    ids = pyarrow.array([TEXT, None, TEXT], type=pyarrow.list_(pyarrow.type_for_alias(kind)))
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": ids}), tmp_path / "ids.parquet")
    found = read_token_file(tmp_path / "ids.parquet", 512, PaddingIds())
    assert found.samples == [TEXT] * 2 and found.num_empty == 1


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("prompt_ids", "completion_ids"), ("prompt_input_ids", "chosen_input_ids"), ("prompt_token_ids", "token_ids")],
)
@pytest.mark.parametrize("suffix", ["attention_mask", "mask"])
def test_prompts_and_answers_have_masks_of_their_own(read, prompt, answer, suffix):
    """As trainers of preferences and rewards store them: prompts padded on the left, answers on the right."""
    stem = answer.removesuffix("ids").removesuffix("token_").removesuffix("input_")
    row = {prompt: [0] * 3 + TEXT[:6], answer: TEXT[6:] + [0] * 3, f"prompt_{suffix}": [0] * 3 + [1] * 6}
    found = read({**row, **({f"{stem}{suffix}": [1] * 4 + [0] * 3} if stem else {answer: TEXT[6:]})})
    assert found.samples == [TEXT] and not found.unread
    right = {prompt: TEXT[:6] + [0] * 3, answer: TEXT[6:], f"prompt_{suffix}": [1] * 6 + [0] * 3}
    assert read(right).samples == [TEXT[:6], TEXT[6:]]


def test_a_mask_of_the_loss_over_prompt_and_answer_hides_nothing(read):
    row = {"prompt_ids": TEXT[:6], "completion_ids": TEXT, "completion_mask": [0] * 6 + [1] * 4}
    assert read(row).samples == [TEXT]


def test_a_mask_of_texts_is_read_like_ids_of_texts(read):
    row = {"input_ids": [str(token) for token in [*TEXT, 0]], "attention_mask": ["1"] * 10 + ["0"]}
    assert read(row).samples == [TEXT]


@pytest.mark.parametrize("filled", [1, -1])
def test_padding_on_the_left_leaves_no_sample_of_its_own(read, filled):
    """Positions of padding are 1 in transformers, and the text begins at 0."""
    row = {"input_ids": [0] * 5 + TEXT, "position_ids": [filled] * 5 + list(range(10))}
    assert read([row, row], "ids.json").samples == [TEXT, TEXT]
