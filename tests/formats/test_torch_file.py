"""Weights in torch's own container: plain tensors are read where they lie, everything else is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import UNSAFE, AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.hub import resolve_model
from aiakq.formats.model_folder import INDEX
from aiakq.formats.torch_file import read_torch_file


@pytest.fixture
def folder(empty_model: Path) -> Path:
    return empty_model


def test_a_dtype_that_is_not_read_is_not_called_damage(tmp_path):
    torch.save({"a.weight": torch.ones(2, dtype=torch.complex64)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(AiakqError, match="The dtype torch.complex64 of the tensor a.weight in") as caught:
        read_torch_file(tmp_path / "pytorch_model.bin", "pytorch_model.bin")
    assert caught.value.id == "unsupported" and "damaged" not in str(caught.value)


def test_one_file_with_shared_and_transposed_tensors(folder: Path) -> None:
    both = torch.randn(4, 6)
    tensors = {"a.weight": both, "b.weight": both, "c": both.T, "d": both[1:3].half(), "e": torch.nn.Parameter(both)}
    torch.save(tensors, folder / "pytorch_model.bin")
    checkpoint = Checkpoint.open(folder)
    info = checkpoint.inventory["d"]
    assert (info.dtype, info.shape, info.file) == ("F16", (2, 6), "pytorch_model.bin")
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor.detach())
    checkpoint.close()
    assert torch.equal(checkpoint.tensor("c"), both.T)


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_a_state_dict_may_be_wrapped(folder: Path, wrapper: str) -> None:
    torch.save({wrapper: {"a": torch.ones(3)}, "epoch": 7}, folder / "pytorch_model.bin")
    assert list(Checkpoint.open(folder).inventory) == ["a"]


def test_shards_with_an_index(folder: Path, write_weights, refused) -> None:
    files = {name: f"pytorch_model-0000{number}-of-00002.bin" for number, name in ((1, "a"), (2, "b"))}
    write_weights(folder, files)
    assert refused(folder).id == "model_incomplete"
    index = folder / "pytorch_model.bin.index.json"
    write_weights(folder, files, index.name)
    assert torch.equal(Checkpoint.open(folder).tensor("b"), torch.ones(2, 3))
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    assert refused(folder).id == "path_outside_model"
    index.write_text(json.dumps({"weight_map": {**files, "c": files["a"]}}))
    assert "c" in Checkpoint.open(folder).remarks[0]
    torch.save({"whole": torch.ones(3)}, folder / "pytorch_model.bin")
    assert list(Checkpoint.open(folder).inventory) == ["whole"]


def test_a_file_truncated_while_it_is_read_raises_an_error(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, file)
    checkpoint = Checkpoint.open(folder)
    checkpoint.mapped = True  # which has no effect on torch's files
    assert torch.equal(checkpoint.tensor("a"), torch.ones(1 << 20))
    os.truncate(file, 4096)
    with pytest.raises(AiakqError) as caught:
        checkpoint.tensor("b")
    assert caught.value.id == "model_malformed"


def test_safetensors_come_first(folder: Path) -> None:
    from safetensors.torch import save_file

    torch.save({"a": torch.ones(3)}, folder / "pytorch_model.bin")
    save_file({"b": torch.ones(2)}, folder / "model.safetensors")
    assert list(Checkpoint.open(folder).inventory) == ["b"]


class Payload:
    """Pickles to a call of ``open``, which would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def with_pickle(path: Path, content: bytes) -> None:
    """A file of torch's whose pickle is replaced."""
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            data = content if entry.filename.endswith("data.pkl") else source.read(entry.filename)
            target.writestr(entry.filename, data)


def test_code_is_never_run(folder: Path, tmp_path: Path, refused) -> None:
    canary = tmp_path / "ran"
    file = folder / "pytorch_model.bin"
    for save in (
        lambda: torch.save({"a": Payload(canary)}, file),
        lambda: torch.save({"a": Payload(canary)}, file, _use_new_zipfile_serialization=False),
        lambda: file.write_bytes(pickle.dumps({"a": Payload(canary)})),
        lambda: with_pickle(file, pickle.dumps(Payload(canary))),
    ):
        save()
        problem = refused(folder)
        assert (problem.id, problem.exit_code) == ("pickle_refused", UNSAFE)
        assert not canary.exists()


@pytest.mark.parametrize(
    "content",
    [
        {"a": torch.ones(3), "lr": 0.1},
        {"a": [torch.ones(3)]},
        {3: torch.ones(3)},
        {"../a": torch.ones(3)},
        {"a\nb": torch.ones(3)},
        [torch.ones(3)],
        {},
        torch.ones(3),
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.eye(3).to_sparse_csr()},
        {"a": torch.zeros(1).expand(10**9)},
        {"a": torch.empty(3, device="meta")},
        {"a": types.SimpleNamespace(b=1)},
    ],
    ids=lambda content: str(type(content)),
)
def test_anything_but_plain_tensors_is_refused(folder: Path, content: object, refused) -> None:
    torch.save(content, folder / "pytorch_model.bin")
    assert refused(folder).id == "pickle_refused"


def test_a_shape_beyond_the_data_is_refused(folder: Path, refused) -> None:
    """The pickle claims a larger storage, or a larger shape, than the record has."""
    good = io.BytesIO()
    torch.save({"a": torch.ones(300)}, good)
    with zipfile.ZipFile(good) as archive:
        content = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert content.count(b"M,\x01") == 2  # the storage's length and the tensor's
    for count in (1, 2):
        with_pickle(folder / "pytorch_model.bin", content.replace(b"M,\x01", b"J\x00\x00\x00\x70", count))
        assert refused(folder).id in ("pickle_refused", "model_malformed")


def test_damaged_files(folder: Path, refused) -> None:
    file = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, file)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-30], b"version https://git-lfs", b"", b"<html>", b"PK\x03\x04"):
        file.write_bytes(content)
        assert refused(folder).id in ("model_malformed", "pickle_refused")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}))
        archive.writestr("x/version", "3")
    assert refused(folder).id == "model_malformed"
    file.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    assert refused(folder).id == "model_malformed"


def test_hub_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's files are fetched only where the repository has no safetensors."""
    import huggingface_hub

    asked: list[list[str]] = []
    ignored: list[list[str]] = []
    tokens: list[str | None] = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **options: str | None) -> str:
        asked.append(allow_patterns)
        ignored.append(ignore_patterns)
        tokens.append(options["token"])
        return str(tmp_path)

    files: list[str] = []

    def info(self: Any, name: str, revision: str | None = None) -> types.SimpleNamespace:
        tokens.append(self.token)
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=file) for file in files])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    files[:] = ["config.json", "model.safetensors", "pytorch_model.bin"]
    resolve_model("org/name")
    files[:] = ["config.json", "pytorch_model-00001-of-00002.bin", "original/model.safetensors", "training_args.bin"]
    resolve_model("org/name")
    assert not any("bin" in pattern for pattern in asked[0])
    assert [pattern for pattern in asked[1] if "bin" in pattern] == ["pytorch_model*.bin"]
    files[:] = ["config.json", "model.fp16.safetensors", "pytorch_model.bin"]  # a variant does not count
    resolve_model("org/name")
    assert [pattern for pattern in asked[2] if "bin" in pattern] == ["pytorch_model*.bin"]
    for weights, wanted in (("safetensors", {"*.safetensors"}), ("pt", {"pytorch_model*.bin"}), ("none", set())):
        resolve_model("org/name", weights=weights, ignore=["consolidated*"])
        assert {pattern for pattern in asked[-1] if "bin" in pattern or "tensors" in pattern} == wanted
        assert ignored[-1] == ["*/*", "consolidated*"]
    tokens.clear()
    resolve_model("org/name", token="secret")
    assert tokens == ["secret", "secret"]  # to list the files and to fetch them


def as_torch_file(source: Path, target: Path, strip: str = "") -> Path:
    """A copy of a model folder with its weights in pytorch_model.bin, names without the prefix ``strip``."""
    checkpoint = Checkpoint.open(source)
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copy(path, target / path.name)
    tensors = {name.removeprefix(strip): checkpoint.tensor(name) for name in checkpoint.inventory}
    torch.save(tensors, target / "pytorch_model.bin")
    return target


@pytest.mark.parametrize("architecture", ["OPTForCausalLM", "GPTNeoXForCausalLM"])
def test_models_in_torch_files_are_quantized_and_served(tiny_model, tmp_path: Path, architecture: str) -> None:
    """OPT's published files lack the outermost prefix of their names."""
    from aiakq.evaluation.scoring import load_for_scoring
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    source = tiny_model(architecture)
    strip = "model." if architecture.startswith("OPT") else ""
    folder = as_torch_file(source, tmp_path / "torch", strip)
    ids = torch.arange(3, 40).unsqueeze(0)
    wanted = load_for_scoring(source, "float32", "cpu").logits(ids)
    assert torch.equal(load_for_scoring(folder, "float32", "cpu").logits(ids), wanted)
    outputs = []
    for number, path in enumerate((source, folder)):
        output = tmp_path / f"out{number}"
        quantize_checkpoint(QuantizeOptions(str(path), str(output), "weight_only_int8", evaluate=False))
        outputs.append(load_for_scoring(output, "float32", "cpu").logits(ids))
        assert not list(output.glob("*.bin")) and (output / "model.safetensors").exists()
    assert torch.equal(*outputs)


def test_a_folder_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").mkdir()
    with pytest.raises(AiakqError, match="not a regular file") as caught:
        read_torch_file(tmp_path / "pytorch_model.bin", "pytorch_model.bin")
    assert caught.value.id == "model_malformed"
