"""The tokenizer: text to ids and back as transformers does it, and the placeholder without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.tokenizer import NoTokenizer, Tokenizer
from aiakq.runtime.text.tokenizer_source import TokenizerSource

TEXTS = ["", " ", "naïve café — 你好, 🙂🙃 end", "a\n\n  b\t", "<|im_start|>user\nHi<|im_end|>"]


@pytest.mark.parametrize("mode", ["auto", "slow"])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(text: str, mode: str, example_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, hf = Tokenizer.load(example_model, mode=mode), AutoTokenizer.from_pretrained(example_model)
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == hf.encode(text, add_special_tokens=special)
        for skip in (True, False):
            expected = hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_pairs_are_those_of_transformers(mode: str, example_model: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(example_model)
    end = hf.convert_ids_to_tokens(0)
    hf._tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, 0)]
    )
    ours = Tokenizer(hf, compiled=mode != "slow")
    ids = ours.encode_pair("one text", "and another")
    assert ids == hf("one text", "and another")["input_ids"] and ids.count(0) == 2
    assert ids == ours.encode("one text") + ours.encode("and another")


def test_tokenizers_in_python_get_arguments_for_spaces() -> None:
    class InPython:
        is_fast = False

        def decode(self, ids: list[int], spaces_between_special_tokens: bool, **options: Any) -> str:
            return (" " if spaces_between_special_tokens else "").join(map(str, ids))

    tokenizer = Tokenizer(InPython())
    assert (tokenizer.decode([1, 2]), tokenizer.decode([1, 2], spaces=False)) == ("1 2", "12")


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(AiakqError, match="tokenizer.json cannot be read: it is not JSON") as caught:
        TokenizerSource(str(tmp_path)).load()
    assert caught.value.id == "model_malformed"


def test_a_template_may_be_missing_be_given_or_fail(byte_tokenizer: Any) -> None:
    tokenizer, messages = Tokenizer(byte_tokenizer), [{"role": "user", "content": "Hi"}]
    assert not tokenizer.has_chat_template
    with pytest.raises(AiakqError) as caught:
        tokenizer.chat_prompt(messages)
    assert caught.value.id == "no_chat_template"
    assert tokenizer.chat_prompt(messages, "{{ messages[0].content }}{{ tone }}", arguments={"tone": "!"}) == "Hi!"
    refuses = "{{ raise_exception('no greetings') }}"
    for template, id in (
        (refuses, "template_unusable"),
        ("{% if messages[0].content == 'Hi' %}" + refuses + "{% endif %}{{ messages[0].content }}", "chat_template"),
    ):
        with pytest.raises(AiakqError, match="no greetings") as caught:
            tokenizer.chat_prompt(messages, template)
        assert caught.value.id == id


def test_without_a_tokenizer_there_is_no_text() -> None:
    tokenizer = TokenizerSource("/nowhere", left_out=True).load()
    assert isinstance(tokenizer, NoTokenizer) and not tokenizer.has_text and not tokenizer.has_chat_template
    assert tokenizer.decode([1, 2, 3]) == ""
    for refused in (lambda: tokenizer.encode("a"), lambda: tokenizer.chat_prompt([])):
        with pytest.raises(AiakqError) as caught:
            refused()
        assert caught.value.id == "no_tokenizer"


@pytest.mark.parametrize(
    ("normalizer", "refused"),
    [
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 17}, True),
        (
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5}] * 2,
            },
            True,
        ),
        ({"type": "Prepend", "prepend": "a" * 1000}, True),
        (
            {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            False,
        ),
    ],
)
def test_a_normalizer_that_swells_texts_is_refused(
    normalizer: dict[str, Any], refused: bool, example_model: Path, tmp_path: Path
) -> None:
    """Where a tokenizer runs in the process of the caller: in Rust, a failed allocation ends the process."""
    from aiakq import LLM
    from aiakq.quantizers.calibration.samples import load_tokenizer

    shutil.copytree(example_model, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": normalizer}))
    if not refused:
        Tokenizer.load(path.parent).check_growth()
        return
    for call in (lambda: LLM(model=str(path.parent)), lambda: load_tokenizer(path.parent)):
        with pytest.raises(AiakqError, match="times longer") as caught:
            call()
        assert caught.value.id == "model_malformed"


def test_a_panic_of_the_tokenizer_is_an_error_of_the_registry(example_model: Path, tmp_path: Path) -> None:
    from aiakq import LLM
    from aiakq.data.tokens import tokenize
    from aiakq.quantizers.calibration.samples import load_tokenizer

    folder = shutil.copytree(example_model, tmp_path / "model")
    saved = json.loads((folder / "tokenizer.json").read_text())
    part = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({**saved, "pre_tokenizer": part}))
    text = 40 * "a" + " there"
    with pytest.raises(AiakqError) as caught:
        LLM(model=str(folder), num_gpu_blocks_override=17, max_model_len=64).generate([text], use_tqdm=False)
    assert caught.value.id == "tokenization"
    with pytest.raises(AiakqError) as caught:
        tokenize([text], load_tokenizer(folder))
    assert caught.value.id == "model_malformed"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps({**saved, "normalizer": normalizer}))
    with pytest.raises(AiakqError) as caught:
        Tokenizer.load(folder)
    assert caught.value.id == "model_malformed"


def find_book(title: str, shelves: list[int]) -> str:
    """Find a book.

    Args:
        title: What is on its cover.
        shelves: Where to look.
    """
    return title


class Library:
    def lend(self, title: str) -> None:
        """Lend a book.

        Args:
            title: What is on its cover.
        """


@pytest.mark.parametrize("place", [False, True], ids=["no place for tools", "a place for tools"])
@pytest.mark.parametrize("tool", [find_book, Library().lend], ids=["function", "method"])
def test_python_functions_are_tools_as_transformers_describes_them(example_model: Path, place: bool, tool: Any) -> None:
    from transformers.utils import get_json_schema

    tokenizer = Tokenizer.load(example_model)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = ("{% for t in tools %}{{ t | tojson }}{% endfor %}" if place else "") + template
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "Hi"}], template, (tool,))
    assert prompt == tokenizer.chat_prompt([{"role": "user", "content": "Hi"}], template, [get_json_schema(tool)])
    assert json.dumps(get_json_schema(tool)) in prompt


def test_tools_that_cannot_be_described_are_named(example_model: Path) -> None:
    def silent(title: str) -> None: ...

    def unannotated(title):  # type: ignore[no-untyped-def]
        """Find a book.

        Args:
            title: What is on its cover.
        """

    tokenizer = Tokenizer.load(example_model)
    for tool, says in ((silent, "no docstring"), (unannotated, "type hint"), (int, "expected"), (len, "expected")):
        with pytest.raises(AiakqError, match=says) as caught:
            tokenizer.chat_prompt([{"role": "user", "content": "Hi"}], None, [find_book, tool])
        assert (caught.value.id, caught.value.param) == ("invalid_type", "tools[1]")
