"""A GGUF file as a checkpoint: packed linears have the values of their blocks, in the model's order of rows."""

from __future__ import annotations

import pytest
import torch
from gguf_files import unpacked

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gguf.decoding import read_floats
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.gguf.writing import WrittenTensor, write_gguf
from aiakq.formats.gguf_model import tensor_names
from aiakq.formats.gguf_model.folder import gguf_folder
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.kernels.ops.linear_reference import dequantize

FAMILIES = ("llama", "mixtral", "gpt2", "gpt-oss", "gemma", "qwen3moe", "phi3")


def random_blocks(rows: int, k: int, kind: str) -> torch.Tensor:
    """Return blocks of random codes, with scales (and minima) of 0.01."""
    block = KINDS[NUMBERS[kind]]
    make = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (rows, k // block.values, block.nbytes), generator=make).to(torch.uint8)
    half = torch.tensor([0.01, 0.01]).half().view(torch.uint8)
    blocks[..., :2] = half[:2]
    blocks[..., 2:4] = half[2:] if kind == "Q4_1" else blocks[..., 2:4]
    return blocks.view(rows, -1)


@pytest.fixture
def quantized(tmp_path, monkeypatch):
    """Return a function that gives a family's file matrices of random blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(family: str, kinds=("Q8_0", "Q4_0", "Q4_1")) -> GGUFFile:
        file = GGUFFile.open(unpacked(family, tmp_path))
        written = {}
        for index, (name, header) in enumerate(file.tensors.items()):
            kind = kinds[index % len(kinds)]
            if len(header.shape) < 2 or header.shape[-1] % 32 or "gate_inp" in name:
                kind = header.kind.name
                rows = file.read(name)
            else:
                rows = random_blocks(header.rows, header.shape[-1], kind)
            written[name] = WrittenTensor(kind, header.shape, lambda rows=rows: rows)
        path = tmp_path / f"{family}-mixed.gguf"
        write_gguf(path, {**file.metadata, "tokenizer.ggml.model": "none"}, written)
        return GGUFFile.open(path)

    return make


def expected(file: GGUFFile, config) -> dict[str, torch.Tensor]:
    """Return the tensors of the model, from all blocks decoded to floats first."""

    def whole(name: str) -> torch.Tensor:
        header = file.tensors[name]
        return read_floats(file.read(name), header.kind, name).float().reshape(header.shape)

    shapes = {name: header.shape for name, header in file.tensors.items()}
    sources = tensor_names(config, Metadata(file.metadata, file.path.name), shapes)
    return {name: source.read(whole) for name, source in sources.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_the_values_of_its_blocks(family, quantized):
    file = quantized(family)
    checkpoint = Checkpoint.open(gguf_folder(file.path))
    wanted = expected(file, checkpoint.config)
    packed = checkpoint.quantized_linears()
    assert set(checkpoint.inventory) == set(wanted)
    for name, value in wanted.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and module in packed:
            weight = checkpoint.read_linear(module)
            assert torch.equal(dequantize(weight, torch.float32), value), name
            assert (weight.n, weight.k) == tuple(checkpoint.inventory[name].shape)
            assert checkpoint.linear_spec(module).scheme == weight.scheme
        else:
            found = checkpoint.tensor(name)
            assert torch.equal(found.float(), value), name
            assert found.shape == tuple(checkpoint.inventory[name].shape)


def test_linears_stay_packed_and_embeddings_do_not(quantized):
    checkpoint = Checkpoint.open(gguf_folder(quantized("llama", ("Q4_0",)).path))
    packed = checkpoint.quantized_linears()
    assert "model.layers.0.self_attn.q_proj" in packed
    assert "model.embed_tokens" not in packed
    assert checkpoint.inventory["model.embed_tokens.weight"].dtype == "F32"
    assert not checkpoint.remarks  # a device may look rows up in the blocks
    spec = checkpoint.spec
    assert spec is not None
    assert (spec.format, spec.bits, spec.group_size, spec.blocks) == ("gguf", 4, 32, "Q4_0")
    info = checkpoint.inventory["model.layers.0.self_attn.q_proj.weight"]
    assert info.nbytes == info.shape[0] * info.shape[1] // 32 * 18


def test_embeddings_are_there_as_blocks_too(quantized, tmp_path):
    file = quantized("llama", ("Q4_0",))
    checkpoint = Checkpoint.open(gguf_folder(file.path))
    assert checkpoint.foreign is not None
    table = checkpoint.foreign.table("model.embed_tokens.weight")
    assert table is not None
    assert torch.equal(dequantize(table, torch.float32), checkpoint.tensor("model.embed_tokens.weight").float())
    assert checkpoint.foreign.table("model.norm.weight") is None
    plain = Checkpoint.open(gguf_folder(unpacked("llama", tmp_path)))
    assert plain.foreign is not None and plain.foreign.table("model.embed_tokens.weight") is None


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_stacked_experts_are_there_as_blocks_with_gates_first(kind, quantized):
    file = quantized("gpt-oss", (kind,))
    checkpoint = Checkpoint.open(gguf_folder(file.path))
    assert checkpoint.foreign is not None
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        floats = checkpoint.tensor(name).float()
        packed = list(checkpoint.foreign.experts(name) or ())
        stacked = {(each.count, each.n, each.k, each.layer.table) for each in checkpoint.foreign.stacked_experts}
        assert (len(packed), packed[0].n, packed[0].k, "e2m1" if kind == "MXFP4" else None) in stacked
        for each, wanted in zip(packed, floats, strict=True):
            wanted = wanted.T if "down" in name else torch.cat([wanted.T[0::2], wanted.T[1::2]])
            assert torch.equal(dequantize(each, torch.float32), wanted)
        assert checkpoint.inventory[name].nbytes < floats.nbytes / 3


def test_embeddings_are_decoded_to_the_dtype_that_is_set(quantized):
    checkpoint = Checkpoint.open(gguf_folder(quantized("llama").path))
    checkpoint.read_with(mapped=False, threads=1, dtype=torch.bfloat16)
    assert checkpoint.tensor("model.embed_tokens.weight").dtype == torch.bfloat16


def test_a_file_that_changed_is_noticed(quantized):
    file = quantized("llama")
    checkpoint = Checkpoint.open(gguf_folder(file.path))
    file.path.write_bytes(file.path.read_bytes() + b"\0")
    assert checkpoint.changed_files() == [file.path.name]
    with pytest.raises(AiakqError, match="changed while it was read"):
        checkpoint.tensor("model.norm.weight")


def test_kinds_that_are_not_read_are_refused_when_the_file_is_opened(tmp_path, monkeypatch, quantized):
    file = quantized("llama", ("Q8_0",))
    written = {
        name: WrittenTensor(header.kind.name, header.shape, lambda name=name: file.read(name))
        for name, header in file.tensors.items()
    }
    name = "blk.0.ffn_down.weight"
    shape = (file.tensors[name].shape[0], 64)
    written[name] = WrittenTensor("NVFP4", shape, lambda: torch.zeros(shape[0], 36, dtype=torch.uint8))
    write_gguf(tmp_path / "bad.gguf", file.metadata, written)
    with pytest.raises(AiakqError, match=r"blk.0.ffn_down.weight"):
        gguf_folder(tmp_path / "bad.gguf")
