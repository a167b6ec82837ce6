"""Whole GGUF files from checkpoints: every family, every format, the same numbers, and what is refused."""

from __future__ import annotations

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


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_k", "q5_k_m"])
def test_every_type_rounds_the_matrices(kind, tiny_model, tmp_path):
    source = tiny_model("Qwen2ForCausalLM", hidden_size=256, num_attention_heads=4)
    report = convert(source, tmp_path / "x.gguf", kind)
    found = kinds(tmp_path / "x.gguf")
    stem = kind.upper().removesuffix("_M")
    assert found["blk.1.attn_q.weight"] == stem and found["blk.1.attn_norm.weight"] == "F32"
    assert found["token_embd.weight"] == {"F16": "F16", "Q8_0": "Q8_0"}.get(stem, "Q6_K")
    limit = {"F": 1e-3, "8": 0.006, "6": 0.03, "5": 0.05, "4": 0.1}[stem[0] if stem[0] == "F" else stem[1]]
    assert 0 < report.mean_error < limit and report.scheme.startswith(stem)


# --- quantized checkpoints --------------------------------------------------------------------------------------------


def fixture(name: str, folder: Path) -> Path:
    """Return a copy of a quantized fixture, with a tokenizer of 32 tokens."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "1", "2", "."]
    rust = RustTokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    copied = Path(shutil.copytree(FIXTURES / name, folder / name))
    PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>").save_pretrained(copied)
    return copied


#: Fixtures whose linears blocks hold as they are, and the kinds of these.
EXACT = {
    "gq-w3": {"Q4_0"},
    "gq-w8": {"Q8_0"},
    "gq-lmhead": {"Q4_0", "Q8_0"},
    "mlx-4bit": {"Q4_1"},
    "quanto-int8": {"Q8_0"},
}


@pytest.mark.parametrize("name", EXACT)
def test_integers_that_blocks_hold_stay_the_same_numbers(name, tmp_path):
    source = fixture(name, tmp_path)
    report = convert(source, tmp_path / "x.gguf")
    assert report.exact and set(kinds(tmp_path / "x.gguf").values()) - {"F32", "F16", "BF16"} == EXACT[name]
    original, found = Checkpoint.open(source), Checkpoint.open(gguf_folder(tmp_path / "x.gguf"))
    for linear in original.quantized_linears():
        assert torch.equal(floats(found, f"{linear}.weight"), floats(original, f"{linear}.weight"))


def test_symmetric_gptq_comes_back_with_the_same_codes_and_scales(tmp_path):
    source = fixture("ar-gptq", tmp_path)
    spec = Checkpoint.open(source).spec
    assert spec is not None and spec.bits == 4 and spec.group_size > 32
    convert(source, tmp_path / "x.gguf")
    convert(tmp_path / "x.gguf", tmp_path / "again", to="gptq", group_size=spec.group_size)
    original, found = Checkpoint.open(source), Checkpoint.open(tmp_path / "again")
    assert found.quantized_linears() == original.quantized_linears()
    for linear in original.quantized_linears():
        ours, theirs = found.read_linear(linear), original.read_linear(linear)
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scales.float(), theirs.scales.float())


@pytest.mark.parametrize(("name", "said"), [("aawq", "minima"), ("gq-desc", "act-order"), ("lc-sq", "activations")])
def test_what_blocks_do_not_hold_is_refused_unless_it_may_be_rounded(name, said, tmp_path):
    source = fixture(name, tmp_path)
    with pytest.raises(AiakqError, match=said) as refused:
        convert(source, tmp_path / "x.gguf")
    assert refused.value.id == "conversion_inexact" and "--lossy" in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    report = convert(source, tmp_path / "x.gguf", lossy=True)
    assert report.mean_error < {"aawq": 0.001, "gq-desc": 0.1, "lc-sq": 1e-9}[name] and not report.exact
    assert any(layer.change for layer in report.layers)


def test_floats_of_a_quantized_model_need_no_leave(tmp_path):
    report = convert(fixture("aawq", tmp_path), tmp_path / "x.gguf", "f32")
    assert report.exact and set(kinds(tmp_path / "x.gguf").values()) == {"F32"}


def test_a_file_that_is_read_is_written_as_it_was(tiny_model, tmp_path):
    convert(tiny_model("Qwen3ForCausalLM"), tmp_path / "one.gguf", "q5_0")
    report = convert(tmp_path / "one.gguf", tmp_path / "two.gguf")
    one, two = GGUFFile.open(tmp_path / "one.gguf"), GGUFFile.open(tmp_path / "two.gguf")
    assert report.exact and kinds(tmp_path / "one.gguf") == kinds(tmp_path / "two.gguf")
    assert all(torch.equal(one.read(name), two.read(name)) for name in one.tensors)
    assert {key: value for key, value in two.metadata.items() if key != "general.name"} == {
        key: value for key, value in one.metadata.items() if key != "general.name"
    }


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "output", "options", "said"),
    [
        ("LlamaForCausalLM", "x", {}, "ends with .gguf"),
        ("LlamaForCausalLM", "x.gguf", {"kind": "q4_7"}, "q4_k_m"),
        ("LlamaForCausalLM", "x.gguf", {"bits": 4}, "--gguf-type"),
        ("LlamaForCausalLM", "x", {"kind": "q4_0", "to": "bf16"}, "--to gguf"),
        ("OPTForCausalLM", "x.gguf", {}, "OPTForCausalLM"),
        ("Gemma3ForCausalLM", "x.gguf", {}, "query_pre_attn_scalar|layer_kinds"),
    ],
)
def test_what_is_not_written_is_refused_by_name(family, output, options, said, tiny_model, tmp_path):
    with pytest.raises(AiakqError, match=said):
        convert(tiny_model(family), tmp_path / output, **options)
    assert not list(tmp_path.iterdir())


def test_a_tensor_without_a_place_is_refused(tiny_model, tmp_path):
    source = Path(shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "model"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(32)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(AiakqError, match="q_norm"):
        convert(source, tmp_path / "x.gguf")


def test_a_file_is_replaced_only_if_asked(tiny_model, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    (tmp_path / "x.gguf").write_bytes(b"mine")
    with pytest.raises(AiakqError, match="already exists"):
        convert(source, tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == b"mine"
    convert(source, tmp_path / "x.gguf", overwrite=True)
    with pytest.raises(AiakqError) as refused:
        convert(tmp_path / "x.gguf", tmp_path / "x.gguf", overwrite=True)
    assert refused.value.id == "output_is_input"


def test_a_tensor_that_reads_otherwise_is_not_published(tiny_model, tmp_path, monkeypatch):
    from aiakq.convert.gguf.source import GGUFSource

    contents = GGUFSource.contents

    def wrong(self: GGUFSource, name: str, kind: str) -> torch.Tensor:
        made = contents(self, name, kind)
        return made.flip(0) if "attn_v" in name else made

    monkeypatch.setattr(GGUFSource, "contents", wrong)
    with pytest.raises(AiakqError) as refused:
        convert(tiny_model("LlamaForCausalLM"), tmp_path / "x.gguf")
    assert refused.value.id == "not_as_written" and not list(tmp_path.iterdir())


def test_names_and_values_are_those_of_the_gguf_package(tiny_model, tmp_path):
    gguf = pytest.importorskip("gguf")
    convert(tiny_model("LlamaForCausalLM"), tmp_path / "x.gguf", "q8_0")
    reader, file = gguf.GGUFReader(tmp_path / "x.gguf"), GGUFFile.open(tmp_path / "x.gguf")
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    known = set(gguf.TENSOR_NAMES.values())
    for tensor in reader.tensors:
        stem = tensor.name.rpartition(".")[0]
        assert any(stem == name.format(bid=int(stem.split(".")[1]) if stem.startswith("blk.") else 0) for name in known)
        assert tensor.tensor_type.name == file.tensors[tensor.name].kind.name


@pytest.mark.parametrize(
    "name", ["file/x.gguf", "x" * 300 + ".gguf", "x" * 245 + ".gguf"], ids=["file", "long", "part"]
)
def test_a_path_that_cannot_exist_is_refused_and_nothing_is_left(name, tiny_model, tmp_path):
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(AiakqError) as refused:
        convert(tiny_model("LlamaForCausalLM"), tmp_path / name, "f16")
    assert refused.value.id == "output_failed" and sorted(tmp_path.iterdir()) == before


def test_a_file_is_written_in_parts_that_replace_the_ones_before(tiny_model, tmp_path):
    source, output = tiny_model("LlamaForCausalLM"), tmp_path / "out" / "m.gguf"
    whole = convert(source, output)
    assert whole.output == str(output)
    with pytest.raises(AiakqError, match="already exists"):
        convert(source, output, max_shard_size="0.1MB")
    split = convert(source, output, max_shard_size="0.1MB", overwrite=True)
    parts = sorted(output.parent.iterdir())
    assert len(parts) > 1 and split.output == str(parts[0]) and not output.exists()
    assert split.bytes_after == sum(path.stat().st_size for path in parts)
    with pytest.raises(AiakqError, match="already exists"):
        convert(source, output)
    with pytest.raises(AiakqError, match="is the input"):
        convert(parts[0], output, overwrite=True)
    one, other = GGUFFile.open(parts[0]), Checkpoint.open(source)
    assert len(one.tensors) == len(other.inventory)
    convert(source, output, overwrite=True)
    assert list(output.parent.iterdir()) == [output]


def test_a_name_of_a_part_is_refused_before_the_input_is_looked_for(tmp_path):
    """What is written under it could not be loaded: readers look for the other parts."""
    with pytest.raises(AiakqError, match="DIR is .*m-00001-of-00002.gguf") as caught:
        convert(tmp_path / "missing", tmp_path / "m-00001-of-00002.gguf")
    assert caught.value.id == "bad_option"


def test_shards_of_a_folder_have_the_size_that_is_asked_for(tiny_model, tmp_path):
    file = tmp_path / "m.gguf"
    convert(tiny_model("LlamaForCausalLM"), file, "q8_0")
    convert(file, tmp_path / "folder", to="bf16", max_shard_size="0.1MB")
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 1
    with pytest.raises(AiakqError, match="--max-shard-size"):
        convert(file, tmp_path / "other", to="bf16", max_shard_size="many")
