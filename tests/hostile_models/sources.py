"""The sound models that are mutated: every format that is read, as files of other tools or after their own code.

A source is a name and a function that writes its folder. ``sources`` returns all of them, smallest work first.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from base import CONFIG, base_tensors, write_base
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FIXTURES = ROOT / "tests" / "formats" / "fixtures"
GGUF = ROOT / "tests" / "formats" / "gguf_fixtures"
#: Families of GGUF files: dense, with experts, with biases, with a rotation of their own.
_FAMILIES = ("llama", "qwen3moe", "gpt-oss", "gemma3", "phi3", "deepseek2", "gpt2", "llama4")
#: Kinds of blocks, of which a few are in each file.
_KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0"),
)
Writer = Callable[[Path], None]


def sources() -> dict[str, Writer]:
    """Return name -> function that writes the folder of a model."""
    found: dict[str, Writer] = {}
    for path in sorted(FIXTURES.glob("*/config.json")):
        found[path.parent.name] = lambda folder, path=path: _copy(path.parent, folder)
    for family in _FAMILIES:
        found[f"gguf-{family}"] = lambda folder, family=family: _unpack(family, folder)
    for at in range(5):
        found[f"gguf-blocks-{at}"] = lambda folder, at=at: _blocks(at, folder)
    found |= {f"published-{name}": lambda folder, name=name: _publish(name, folder) for name in _published()}
    found |= {"mistral": lambda folder: _mistral(folder, False), "mistral-fp8": lambda folder: _mistral(folder, True)}
    found |= {"16 bits": _small, "shards": _shards, "gptq, 2 bits and an order": _gptq2, "marlin": _marlin}
    return found


def _copy(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)
    (folder / "expected.safetensors").unlink()


def _unpack(family: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "model.gguf").write_bytes(lzma.decompress((GGUF / f"{family}.gguf.xz").read_bytes()))


def _small(folder: Path) -> None:
    """The model of ``base.py``, of one layer and without a tokenizer."""
    write_base(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    tensors = {name: tensor for name, tensor in base_tensors().items() if ".1." not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))


def _blocks(at: int, folder: Path) -> None:
    """The file of Llama with each matrix in another kind of blocks, which llama.cpp's own code made."""
    from aiakq.formats.gguf.file import GGUFFile
    from aiakq.formats.gguf.kinds import KINDS, NUMBERS
    from aiakq.formats.gguf.writing import WrittenTensor, write_gguf

    plain = folder.parent / f"{folder.name}-plain"
    _unpack("llama", plain)
    file, stored = GGUFFile.open(plain / "model.gguf"), load_file(GGUF / "blocks.safetensors")
    stored["MXFP4.blocks"].view(-1, 17)[:, 0] = 120  # exponents of which sums stay finite
    tensors = {}
    for number, (name, tensor) in enumerate(file.tensors.items()):
        fitting = [kind for kind in _KINDS if KINDS[NUMBERS[kind]].values in (tensor.shape[-1], 32)]
        fitting = [kind for kind in fitting if (KINDS[NUMBERS[kind]].values == 256) == (tensor.shape[-1] == 256)]
        kind = tensor.kind.name if len(tensor.shape) < 2 else fitting[(number + at) % len(fitting)]
        blocks = file.read(name)
        if kind in _KINDS:
            need = tensor.shape[0] * KINDS[NUMBERS[kind]].row_bytes(tensor.shape[-1])
            blocks = stored[f"{kind}.blocks"].reshape(-1).repeat(need)[:need]
        tensors[name] = WrittenTensor(kind, tensor.shape, lambda blocks=blocks: blocks)
    folder.mkdir()
    write_gguf(folder / "model.gguf", file.metadata, tensors)
    file.close()
    shutil.rmtree(plain)


def _published() -> list[str]:
    from tests.formats.test_float4 import PUBLISHED as FP4
    from tests.formats.test_fp8 import PUBLISHED as FP8

    return [*FP8, *FP4]


def _publish(name: str, folder: Path) -> None:
    from tests.formats.test_float4 import PUBLISHED as FP4
    from tests.formats.test_fp8 import PUBLISHED as FP8
    from tests.fp8_files import publish

    base = folder.parent / f"{folder.name}-16-bits"
    _small(base)
    publish(base, folder, (FP8 | FP4)[name])
    shutil.rmtree(base)


def _mistral(folder: Path, fp8: bool) -> None:
    from tests.mistral_files import write_mistral

    write_mistral(folder, fp8, n_layers=1)


def _shards(folder: Path) -> None:
    _small(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-{1 + at % 2:05d}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _packed(folder: Path, config: dict[str, object], store: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Write the small model with its linears as ``store`` returns them."""
    _small(folder)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {"weight": tensor} if "_proj" not in name else store(tensor)
        prefix = name.removesuffix("weight")
        stored |= {prefix + suffix: each.contiguous() for suffix, each in parts.items()}
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / "model.safetensors")
    full = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(full))


def _gptq2(folder: Path) -> None:
    from aiakq import formats
    from aiakq.formats import quantization_config
    from aiakq.kernels.types import QWeight
    from aiakq.spec import QuantSpec

    spec, random = QuantSpec("gptq", "gptq_v2", 2, 32, symmetric=False, desc_act=True), torch.Generator().manual_seed(0)

    def store(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        n, k = tensor.shape
        codes, zeros = (torch.randint(0, 4, (n, size), generator=random).to(torch.uint8) for size in (k, k // 32))
        scales = (torch.rand(n, k // 32, generator=random) * 0.02 + 0.01).half()
        weight = QWeight("w2a16", codes, scales, zeros, torch.randperm(k, generator=random), group_size=32)
        return formats.load(spec.format).write(weight, spec, torch.float16)

    _packed(folder, quantization_config.write(spec), store)


def _marlin(folder: Path) -> None:
    from tests.formats.test_marlin import pack

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "is_marlin_format": True, "desc_act": False}
    random = torch.Generator().manual_seed(0)

    def store(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        n, k = max(64, tensor.shape[0]), tensor.shape[1]  # the kernel has no fewer outputs
        codes = torch.randint(0, 16, (k, n), generator=random)
        words, scales = pack(codes, (torch.rand(k // 64, n, generator=random) * 0.02 + 0.01).half())
        return {"qweight": words, "scales": scales}

    _packed(folder, config | {"checkpoint_format": "marlin", "sym": True}, store)
    full = json.loads((folder / "config.json").read_text()) | {"num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(full))
