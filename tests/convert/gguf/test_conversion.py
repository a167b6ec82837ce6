"""Whole GGUF files from checkpoints: every family, every format, the same numbers, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.conversion import convert_checkpoint
from aiakq.convert.report import ConversionReport
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import as_floats
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model.folder import gguf_folder
from aiakq.runtime.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[2] / "formats" / "fixtures"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def convert(source: Path, output: Path, kind: str = "auto", to: str = "gguf", **options: Any) -> ConversionReport:
    arguments = ConvertArguments(input=str(source), output=str(output), to=to, gguf_type=kind, **options)
    return convert_checkpoint(arguments)


def kinds(path: Path) -> dict[str, str]:
    return {name: tensor.kind.name for name, tensor in GGUFFile.open(path).tensors.items()}


def floats(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    module = name.removesuffix(".weight")
    packed = module in checkpoint.quantized_linears()
    return as_floats(checkpoint.read_linear(module)) if packed else checkpoint.tensor(name).float()


#: Tiny models of families that are written, with what files can say of them.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "MixtralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen2MoeForCausalLM": {"mlp_only_layers": []},
    "Qwen3MoeForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 48},
    "Gemma3ForCausalLM": {
        "query_pre_attn_scalar": 48,
        "layer_types": ["sliding_attention"] * 4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
    },
    "Phi3ForCausalLM": {},
    "GPT2LMHeadModel": {},
    "GraniteMoeForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_it_was(family, tiny_model, tmp_path):
    source = tiny_model(family, **FAMILIES[family])
    report = convert(source, tmp_path / "x.gguf")
    assert report.exact or all("norm" in layer.name for layer in report.layers if layer.relative_error)
    original, found = Checkpoint.open(source), Checkpoint.open(gguf_folder(tmp_path / "x.gguf"))
    stored = set(original.inventory) - ({"lm_head.weight"} if original.config["tie_word_embeddings"] else set())
    assert set(found.inventory) == stored
    for name in stored:
        torch.testing.assert_close(found.tensor(name).float(), original.tensor(name).float(), rtol=0, atol=1e-6)
    ours, theirs = Tokenizer.load(gguf_folder(tmp_path / "x.gguf")), Tokenizer.load(source)
    assert ours.encode("It's 12 o'clock.") == theirs.encode("It's 12 o'clock.")
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k_m", "q6_k"])
def test_every_type_rounds_the_matrices(kind, example_model, tmp_path):
    report = convert(example_model, tmp_path / "x.gguf", kind)
    found = kinds(tmp_path / "x.gguf")
    stem = kind.upper().removesuffix("_M")
    assert found["blk.1.attn_q.weight"] == stem and found["blk.1.attn_norm.weight"] == "F32"
    tied = {"F16": "F16", "Q8_0": "Q8_0"}.get(stem, "Q6_K")
    assert found["token_embd.weight"] == tied
    limit = {"F": 1e-5, "8": 0.006, "6": 0.03, "5": 0.05, "4": 0.1}[stem[0] if stem[0] == "F" else stem[1]]
    assert 0 < report.mean_error < limit and report.scheme.startswith(stem)


# --- quantized checkpoints --------------------------------------------------------------------------------------------

#: Fixtures whose linears blocks hold as they are, and their kind.
EXACT = {"gq-w3": "Q4_0", "lc-w8a16": "Q8_0", "ar-auto_gptq-W3A16": "Q4_0"}


@pytest.mark.parametrize("name", EXACT)
def test_symmetric_integers_stay_the_same_numbers(name, tmp_path):
    report = convert(FIXTURES / name, tmp_path / "x.gguf")
    assert report.exact and kinds(tmp_path / "x.gguf")["blk.0.attn_q.weight"] == EXACT[name]
    original, found = Checkpoint.open(FIXTURES / name), Checkpoint.open(gguf_folder(tmp_path / "x.gguf"))
    for linear in original.quantized_linears():
        assert torch.equal(floats(found, f"{linear}.weight"), floats(original, f"{linear}.weight"))
