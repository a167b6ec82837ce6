"""Calibration samples: every accepted form of a file, every refusal with its line, and the choice by seed."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.data import chat
from aiakq.data.tokens import read_documents, tokenize
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
    assert sorted(len(sample) for sample in samples.samples) == [3, 5, 10, 10]
    assert samples.tokens == 28
    assert samples.lengths == (3, 5, 10)
    assert samples.warnings == [
        "Calibration has 28 tokens in 4 samples of token ids of ids.txt; 1280 (128 x 10) were asked for. "
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


def test_texts(tmp_path: Path, tokenizer: Any) -> None:
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


# --- forms of documents -----------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "Who was he?"}, {"role": "assistant", "content": "A sailor."}]
RENDERED = "<|im_start|>user\nWho was he?<|im_end|>\n<|im_start|>assistant\nA sailor.<|im_end|>\n"


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
    ]
    found = documents_of(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)), tokenizer)
    assert found[:10] == [RENDERED, "A text between them.", *[RENDERED] * 8]
    assert found[10] == "<|im_start|>system\nBe brief.<|im_end|>\n" + RENDERED
    assert found[11] == RENDERED.replace("he?", "he?\n\nAhab")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"body": 1, "n": 2}\n', "line 2 has no text, messages, or question .* body, n"),
        ("a.jsonl", '{"text": "fine"}\nnot json\n', "line 2 is no JSON"),
        ("a.jsonl", '{"text": "fine"}\n17\n', "line 2 is neither"),
        ("a.jsonl", '{"messages": []}', "line 1 is a conversation without messages"),
        ("a.jsonl", '{"messages": ["hello"]}', "line 1, message 1 is no JSON object"),
        ("a.jsonl", '{"messages": [{"content": "hello"}]}', "line 1, message 1 has no role"),
        ("a.jsonl", '{"conversations": [{"from": "human", "value": 3}]}', "line 1, message 1 has no text"),
        ("a.jsonl", '{"prompt": 1, "completion": "x"}', "line 1 has 'prompt', which is no text"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1 holds half a character"),
        ("a.json", '{"text": "One."}', "no JSON list"),
        ("a.json", "[1]", "item 1 is neither"),
        ("a.csv", "id,body\n1,One.\n", "row 1 has no text"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_bad_documents(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    with pytest.raises(AiakqError, match=says) as caught:
        documents_of(tmp_path, name, content)
    assert caught.value.id == "calibration"


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
            "{% if messages|length == 3 %}{{ raise_exception('Roles must alternate.') }}{% endif %}fine",
            "fails at line 2: Roles must alternate",
        ),
        # The sandbox bounds a range, but not loops in loops.
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "fails at line 1: it takes longer than 1 seconds",
        ),
        ("{% set x = 'a' * 99999999999 %}", "fails at line 1"),
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
def test_a_template_knows_no_clock(tmp_path: Path, example_model: Path) -> None:
    tokenizer = with_template(example_model, tmp_path / "model", "{{ strftime_now('%Y-%m-%d') }}{{ bos_token }}")
    assert chat.render([("line 1", TALK)], tokenizer, "talk") == ["2025-01-01<|endoftext|>"]


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
