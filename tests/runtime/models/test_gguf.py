"""Models in GGUF files answer as the checkpoints that they were made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf_files import original, originals, unpacked
from safetensors.torch import save_file

from aiakq import LLM, SamplingParams
from aiakq.formats.gguf.decoding import read_floats
from aiakq.formats.gguf.encoding import ENCODERS, encode
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.gguf.writing import WrittenTensor, write_gguf

PROMPTS = [{"prompt_token_ids": [5, 9, 33, 77, 120, 200, 31, 8]}, {"prompt_token_ids": list(range(3, 60))}]
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)


def answers(model: str, **options: str) -> list:
    llm = LLM(model, dtype="float32", skip_tokenizer_init=True, max_model_len=128, **options)
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [
        (each.token_ids, [max(value.logprob for value in step.values()) for step in each.logprobs]) for each in outputs
    ]


def requantized(family: str, folder: Path, kinds: Mapping[str, str]) -> tuple[Path, Path]:
    """Write the file of a family with its matrices as blocks, and one with the values of these blocks as F32.

    kinds  words in names of tensors -> kind of blocks, tried in this order.
    """
    file = GGUFFile.open(unpacked(family, folder))
    blocks, floats = {}, {}
    for name, header in file.tensors.items():
        rows = file.read(name)
        kind = next((kind for word, kind in kinds.items() if word in name), None)
        values = read_floats(rows, header.kind, name, torch.float32)
        if kind is None or len(header.shape) < 2 or header.shape[-1] % 32 or "gate_inp" in name:
            blocks[name] = WrittenTensor(header.kind.name, header.shape, lambda rows=rows: rows)
        else:
            rows = encode(values, kind) if kind in ENCODERS else mxfp4(values)
            values = read_floats(rows, KINDS[NUMBERS[kind]], name, torch.float32)
            blocks[name] = WrittenTensor(kind, header.shape, lambda rows=rows: rows)
        floats[name] = WrittenTensor("F32", header.shape, lambda values=values: values.contiguous().view(torch.uint8))
    paths = folder / "blocks.gguf", folder / "floats.gguf"
    for path, written in zip(paths, (blocks, floats), strict=True):
        write_gguf(path, file.metadata, written)
    return paths


def mxfp4(values: torch.Tensor) -> torch.Tensor:
    """Return blocks of MXFP4 with codes that repeat, and scales about as large as values [N, K]."""
    n, k = values.shape
    blocks = torch.arange(n * k // 32 * 17).remainder(251).to(torch.uint8).view(n, k // 32, 17)
    blocks[..., 0] = 122  # 2**-5
    return blocks.view(n, -1)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("llama", {"token_embd": "Q8_0", "": "Q4_0"}), ("gemma2", {"": "Q8_0"}), ("gpt-oss", {"exps": "MXFP4"})],
    ids=["embedding", "tied embedding", "experts"],
)
def test_blocks_that_stay_packed_answer_as_their_values(family, kinds, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocks, floats = requantized(family, tmp_path, kinds)
    for (ids, logprobs), (expected, wanted) in zip(
        answers(str(blocks), cpu_math="exact"), answers(str(floats)), strict=True
    ):
        assert ids == expected and logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_file_of_floats_is_a_gguf_file_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = str(unpacked("llama", tmp_path))
    assert answers(path, quantization="gguf") == answers(path)


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
