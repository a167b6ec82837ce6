"""Calibration samples: every accepted form of a file, every refusal with its line, and the choice by seed."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.data import chat
from aiakq.errors import AiakqError
from aiakq.quantizers.calibration.samples import load_samples, load_tokenizer, read_token_ids
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
        ('{"labels": 1}', "line 1"),
        ('{"input_ids": [1, "2"]}', "line 1 holds '2'"),
        (b"\xff\x00\x01", "UTF-8"),
        (b"1 2\x00 3", "line 1 holds '2\\x00'"),
        (b"\x7fELF\x02\x01\x01" + bytes(range(128)), "line 1"),
        ("\ufeff", "no sample"),
        ("\r\n \r\n", "no sample"),
        ("[[], []]", "no sample"),
        ("[" * 100_000, "line 1"),
        ("[[1e400]]", "sample 1 holds 'inf'"),
        ("١ ٢\n", "line 1 holds"),
        ("It was a dark night", "line 1 holds 'It'"),
    ],
)
def test_bad_token_ids(tmp_path: Path, content: str | bytes, says: str) -> None:
    with pytest.raises(AiakqError) as caught:
        ids_of(tmp_path, content)
    assert caught.value.id == "calibration"
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["ids.txt", "talk.jsonl", "rows.csv", "rows.parquet", "text.txt"])
def test_calibration_files_that_are_no_files(tmp_path: Path, name: str, tokenizer: Any) -> None:
    """Larger than any of use, empty, a pipe without a writer, a device without an end, a link to nothing, a folder."""
    path = tmp_path / name

    def refused(says: str) -> None:
        field = "token_ids" if name == "ids.txt" else "calibration"
        with pytest.raises(AiakqError, match=says) as caught:
            load_samples(options(**{field: path}), tokenizer, 4096)
        assert caught.value.id == "calibration" and "\n" not in str(caught.value)

    with open(path, "wb") as stream:
        stream.truncate(10 << 30)
    refused("larger than 1 GiB")
    path.write_bytes(b"")
    refused("no sample|no token|no Parquet")
    path.unlink()
    os.mkfifo(path)
    refused("named pipe|there is no such file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused("device|named pipe|there is no such file")
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    refused("there is no such file")
    path.unlink()
    path.mkdir()
    refused("no regular file|a folder|datasets cannot read it")


def test_long_samples_are_cut_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(" ".join(str(i % 50) for i in range(25)) + "\n1 2 3\n")
    samples = load_samples(options(token_ids=path, seqlen=10), None, 50)
    assert sorted(len(sample) for sample in samples.samples) == [3, 5, 10, 10]
    assert samples.tokens == 28
    assert samples.lengths == (3, 5, 10)
    assert samples.warnings == [
        "Calibration has 28 tokens in 4 samples of token ids of ids.txt; 1,280 (128 x 10) were asked for. "
        "Few tokens make poor statistics."
    ]


def test_the_order_of_lines_does_not_matter(tmp_path: Path, tokenizer: Any) -> None:
    rows = [" ".join(str((i * j) % 50) for j in range(1, 9)) for i in range(1, 20)]
    texts = [json.dumps({"text": f"This is story number {i}, and it is a short one."}) for i in range(20)]
    digests = set()
    for order in (1, -1):
        path = tmp_path / "ids.txt"
        path.write_text("\n".join(rows[::order]))
        lines = tmp_path / "text.jsonl"
        lines.write_text("\n".join(texts[::order]))
        digests.add(
            (
                load_samples(options(token_ids=path, samples=5), None, 50).digest,
                load_samples(options(calibration=lines, samples=5, seqlen=16), tokenizer, 4096).digest,
            )
        )
    assert len(digests) == 1


def test_the_bundled_text_is_the_default(tokenizer: Any) -> None:
    samples = load_samples(options(samples=8, seqlen=64), tokenizer, 4096)
    assert samples.source == "the bundled text"
    assert samples.warnings == []
    assert [len(sample) for sample in samples.samples] == [64] * 8
    again = load_samples(options(samples=8, seqlen=64), tokenizer, 4096)
    other = load_samples(options(samples=8, seqlen=64, seed=1), tokenizer, 4096)
    assert samples.digest == again.digest != other.digest


def test_calibration_reads_plain_text_and_json_lines(tmp_path: Path, tokenizer: Any) -> None:
    plain = tmp_path / "text.txt"
    plain.write_text("Once upon a time there was a model. " * 50)
    lines = tmp_path / "text.jsonl"
    lines.write_text('{"text": "Once upon a time"}\n{"text": "there was a model"}\n')
    for path in (plain, lines):
        samples = load_samples(options(calibration=path, samples=4, seqlen=32), tokenizer, 4096)
        assert samples.source == path.name
        assert samples.tokens > 0
    plain.write_text("")
    with pytest.raises(AiakqError, match="no token"):
        load_samples(options(calibration=plain), tokenizer, 4096)
    with pytest.raises(AiakqError, match="no such file"):
        load_samples(options(calibration=tmp_path / "nothing.txt"), tokenizer, 4096)
    with pytest.raises(AiakqError, match="no such file.*token ids"):
        load_samples(options(token_ids=tmp_path / "nothing.txt"), tokenizer, 4096)


def test_rows_left_out_of_a_table_are_reported(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,n\nnan,1\n,2\n")
    with pytest.raises(AiakqError, match="none of its 2 rows has a text"):
        load_samples(options(calibration=path), tokenizer, 4096)
    path.write_text("text,summary\nnan,1\nOnce upon a time,A tale of old times.\n")
    left_out, unread, _ = load_samples(options(calibration=path), tokenizer, 4096).warnings
    assert left_out == "1 rows of rows.csv were left out: they have no text, or a part of it is missing."
    assert unread == "Columns of rows.csv with text that were not read: 'summary'. See --calibration-column."


def test_padding_that_was_decoded_into_a_text_is_left_out(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"Once upon a time number {n}." + tokenizer.pad_token * 40}) for n in range(4)]
    path.write_text("\n".join(lines))
    found = load_samples(options(calibration=path, samples=4, seqlen=16), tokenizer, 4096)
    assert sum((sample == tokenizer.pad_token_id).sum().item() for sample in found.samples) <= 4 + 4
    assert any("were left out as padding" in warning for warning in found.warnings)


def test_a_tokenizer_of_another_model_is_noticed(tokenizer: Any) -> None:
    with pytest.raises(AiakqError, match="outside 0..99"):
        load_samples(options(samples=2, seqlen=32), tokenizer, 100)


def test_without_tokenizer_only_ids_work() -> None:
    with pytest.raises(AiakqError, match="-token"):
        load_samples(options(), None, 100)


def test_special_tokens_at_the_start_stay_at_the_start() -> None:
    class WithBos:
        bos_token_id = 7

        def __call__(self, text: Any, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
            if isinstance(text, list):
                return {"input_ids": [[1] * len(part) for part in text]}
            return {"input_ids": [7] if add_special_tokens else []}

    samples = load_samples(options(samples=3, seqlen=16), WithBos(), 10)
    assert all(sample[0] == 7 and torch.all(sample[1:] == 1) and len(sample) == 16 for sample in samples.samples)


# --- conversations ----------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "Who was he?"}, {"role": "assistant", "content": "A sailor."}]


def with_template(example_model: Path, folder: Path, template: str | None) -> Any:
    """The example's tokenizer with another chat template."""
    folder.mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (folder / name).write_bytes((example_model / name).read_bytes())
    config = json.loads((example_model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def test_a_damaged_tokenizer_is_refused_with_its_file(tmp_path: Path, example_model: Path) -> None:
    content = (example_model / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content[: len(content) // 2])
    with pytest.raises(AiakqError, match=r"tokenizer\.json cannot be read: it is not JSON") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.id == "model_malformed"


def test_conversations_need_a_template(tmp_path: Path, example_model: Path) -> None:
    tokenizer = with_template(example_model, tmp_path / "model", None)
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps({"messages": TALK}))
    with pytest.raises(AiakqError, match="line 2 is a conversation, but the model folder has no chat template"):
        load_samples(options(calibration=path), tokenizer, 4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% if messages|length == 3 %}{{ raise_exception('Roles must alternate.') }}{% endif %}{{ messages }}",
            "fails at line 2: Roles must alternate",
        ),
        # The sandbox bounds a range, but not loops in loops.
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "fails at line 1: it takes longer than 1 seconds",
        ),
        ("{% set x = 'a' * 99999999999 %}", "fails at line 1"),
        ("{{ 'a' * 2000000 }}{{ messages }}", "fails at line 1: it makes 20000[0-9]+ characters of"),
    ],
)
def test_a_template_that_fails_names_the_line(
    tmp_path: Path, example_model: Path, template: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_SECONDS", 1)
    tokenizer = with_template(example_model, tmp_path / "model", template)
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": [*TALK, TALK[0]]}))
    started = time.monotonic()
    with pytest.raises(AiakqError, match=says):
        load_samples(options(calibration=path), tokenizer, 4096)
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_templates_cannot_read_the_clock(tmp_path: Path, example_model: Path) -> None:
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = with_template(
        example_model, tmp_path / "model", "{{ strftime_now('%Y-%m-%d') }}{{ bos_token }}" + shown
    )
    assert chat.render([("line 1", TALK, [])], tokenizer, "talk") == ["2025-01-01<|endoftext|>Who was he?A sailor."]


def test_saved_data_sets(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"The story of the number {i} begins here. " * 8 for i in range(40)]})
    rows.save_to_disk(str(tmp_path / "rows"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "parts"))
    asked = {"samples": 4, "seqlen": 32}
    one = load_samples(options(calibration=tmp_path / "rows", **asked), tokenizer, 4096)
    assert one.source == "rows"
    assert one.digest == load_samples(options(calibration=f"{tmp_path}/parts:test", **asked), tokenizer, 4096).digest
    assert one.digest != load_samples(options(calibration=tmp_path / "rows", seed=1, **asked), tokenizer, 4096).digest
    with pytest.raises(AiakqError, match="no split 'train', only test"):
        load_samples(options(calibration=f"{tmp_path}/parts:train"), tokenizer, 4096)
    with pytest.raises(AiakqError, match="datasets cannot read it"):
        load_samples(options(calibration=tmp_path), tokenizer, 4096)


def test_several_sources_share_the_samples(tmp_path: Path, tokenizer: Any) -> None:
    for name, word in (("a.txt", "sea"), ("b.txt", "sky"), ("c.txt", "sun")):
        (tmp_path / name).write_text(f"The {word} is wide. " * 500)
    given = ",".join(str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt"))
    samples = load_samples(options(calibration=given, samples=5, seqlen=16), tokenizer, 4096)
    assert samples.source == "a.txt and b.txt and c.txt"
    texts = [tokenizer.decode(sample) for sample in samples.samples]
    assert [sum(word in text for text in texts) for word in ("sea", "sky", "sun")] == [2, 2, 1]
