"""Models in GGUF files answer as the checkpoints that they were made from."""

from __future__ import annotations

import json

import pytest
from gguf_files import original, originals, unpacked
from safetensors.torch import save_file

from aiakq import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": [5, 9, 33, 77, 120, 200, 31, 8]}, {"prompt_token_ids": list(range(3, 60))}]
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)


def answers(model: str) -> list:
    llm = LLM(model, dtype="float32", skip_tokenizer_init=True, max_model_len=128)
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [
        (each.token_ids, [max(value.logprob for value in step.values()) for step in each.logprobs]) for each in outputs
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3moe", "gpt2"])
def test_a_file_answers_as_its_original(family, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "original"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(originals()[family]["config"]))
    tensors = {name: original(name, tuple(shape)) for name, shape in originals()[family]["shapes"].items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for (ids, logprobs), (expected, wanted) in zip(
        answers(str(unpacked(family, tmp_path))), answers(str(source)), strict=True
    ):
        assert ids == expected and logprobs == pytest.approx(wanted, abs=1e-4)
