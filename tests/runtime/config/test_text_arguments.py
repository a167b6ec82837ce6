"""Arguments about the tokenizer: its code, its folder, or no tokenizer."""

from __future__ import annotations

import pytest

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
EXTENSION = """
class Backwards:
    eos_token_id = 1

    def __init__(self, folder):
        from transformers import AutoTokenizer
        self.inner = AutoTokenizer.from_pretrained(folder)

    def encode(self, text, add_special_tokens=True):
        return self.inner.encode(text[::-1], add_special_tokens=add_special_tokens)

    def decode(self, ids, **options):
        return self.inner.decode(ids, **options).upper()


def get_tokenizer(folder):
    return Backwards(folder)
"""


def load(example_model, **arguments) -> LLM:
    return LLM(str(example_model), dtype="float32", num_gpu_blocks_override=64, **arguments)


def test_the_slow_tokenizer_gives_the_same_text(example_model):
    text = "naïve café — 你好, 🙂🙃 end"
    answers = []
    for mode in ("auto", "slow"):
        llm = load(example_model, tokenizer_mode=mode)
        calls = []
        inner, llm.tokenizer.hf.encode = llm.tokenizer.hf.encode, lambda *a, **k: calls.append(a) or inner(*a, **k)  # noqa: B023
        result = llm.generate(text, GREEDY, use_tqdm=False)[0]
        answers.append((result.prompt_token_ids, result.outputs[0].text))
        assert bool(calls) == (mode == "slow"), "the slow one goes through transformers"
    assert answers[0] == answers[1]


def test_an_extension_makes_the_tokenizer(example_model, tmp_path):
    path = tmp_path / "vllm_extension.py"
    path.write_text(EXTENSION)
    plain, other = load(example_model), load(example_model, tokenizer_extension_path=str(path))
    wanted = plain.generate("abc def", GREEDY, use_tqdm=False)[0]
    found = other.generate("fed cba", GREEDY, use_tqdm=False)[0]
    assert found.prompt_token_ids == wanted.prompt_token_ids
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert type(other.get_tokenizer()).__name__ == "Backwards"
    assert found.outputs[0].text == wanted.outputs[0].text.upper()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("get_tokenizer = 5", "TypeError"),
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("def other(): pass", "get_tokenizer"),
        ("def get_tokenizer(folder): return object()", "no encode"),
    ],
)
def test_an_extension_that_cannot_be_used_says_why(content, reason, example_model, tmp_path):
    path = tmp_path / "extension.py"
    path.write_text(content)
    with pytest.raises(AiakqError, match=reason) as caught:
        load(example_model, tokenizer_extension_path=str(path))
    assert caught.value.id == "tokenizer_extension"


def test_an_extension_has_to_be_named_exactly(example_model, tmp_path, monkeypatch):
    (tmp_path / "extension.py").write_text(EXTENSION)
    monkeypatch.chdir(tmp_path)
    for path in ("extension.py", str(tmp_path / "other.py")):
        with pytest.raises(AiakqError, match="absolute path") as caught:
            load(example_model, tokenizer_extension_path=path)
        assert caught.value.id == "bad_option"


def test_without_a_tokenizer_inputs_and_outputs_are_token_ids(example_model):
    with_text, without = load(example_model), load(example_model, skip_tokenizer_init=True)
    prompt = {"prompt_token_ids": [40, 50, 60]}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    wanted = with_text.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    output = without.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == wanted.token_ids and output.text == "" != wanted.text
    assert next(iter(output.logprobs[0].values())).decoded_token is None
    with pytest.raises(AiakqError) as caught:
        without.generate("text", use_tqdm=False)
    assert caught.value.id == "no_tokenizer"
    with pytest.raises(AiakqError) as caught:
        without.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)
    assert caught.value.id == "no_tokenizer"
    with pytest.raises(AiakqError):
        without.get_tokenizer()
    for wrong in ({"stop": "x"}, {"bad_words": ["x"]}):
        with pytest.raises(AiakqError) as caught:
            without.generate(prompt, SamplingParams(**wrong), use_tqdm=False)
        assert caught.value.param == next(iter(wrong))
    assert not without.engine.has_work()
