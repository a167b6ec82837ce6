"""Opening checkpoint folders: whole ones from their headers alone, damaged and hostile ones by name."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq.errors import UNSAFE, AiakqError
from aiakq.formats import checkpoint as checkpoint_module
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.hub import resolve_model
from aiakq.formats.model_folder import INDEX, MANIFEST
from aiakq.formats.safetensors_file import DTYPE_BYTES, DTYPES, read_header, write_file

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model in two shards with an index."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    shards = {
        "model-00001-of-00002.safetensors": {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4).half()},
        "model-00002-of-00002.safetensors": {"c.weight": torch.arange(5)},
    }
    for file, tensors in shards.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_inventory_and_tensors(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.spec is None
    assert checkpoint.quantized_linears() == []
    info = checkpoint.inventory["a.weight"]
    assert (info.dtype, info.shape, info.file, info.nbytes) == ("F32", (2, 3), "model-00001-of-00002.safetensors", 24)
    assert torch.equal(checkpoint.tensor("c.weight"), torch.arange(5))


def test_every_dtype_is_read_as_the_official_package_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    monkeypatch.setattr(checkpoint_module, "_MAX_OPEN", 3)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        for number, shape in enumerate([(7, 5), (3,), (), (0, 4)]):
            made = torch.randint(0, 2, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            tensors[f"{name}.{number}"] = made.view(dtype).reshape(shape)
    assert set(DTYPES) == set(DTYPE_BYTES)
    (tmp_path / "config.json").write_text("{}")
    weight_map = {}
    for number in range(9):
        held = dict(list(tensors.items())[number::9])
        save_file(held, tmp_path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(held, f"model-{number}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(tmp_path)
    for name, file in weight_map.items():
        wanted = safetensors.torch.load_file(tmp_path / file)[name]
        found = checkpoint.tensor(name)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
    checkpoint.close()


@pytest.mark.parametrize("kind", ["safetensors", "bin", "mapped"])
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("what", ["cut off", "emptied", "written to", "replaced"])
def test_a_shard_that_changes_while_it_is_read_is_an_error(tmp_path: Path, kind: str, when: str, what: str) -> None:
    """A mapping ends the process by SIGBUS once it is looked at; it is not handed out, nor are other weights."""
    tensors = {"a": torch.ones(1 << 16), "b": torch.zeros(1 << 16)}
    file = tmp_path / ("pytorch_model.bin" if kind == "bin" else "model.safetensors")
    torch.save(tensors, file) if kind == "bin" else save_file(tensors, file)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.mapped = kind == "mapped"
    first = checkpoint.tensor("a") if when == "between" else None
    if what == "replaced":
        file.rename(tmp_path / "old")
        file.write_bytes((tmp_path / "old").read_bytes())
    elif what == "written to":
        with open(file, "r+b") as stream:
            stream.seek(-100, os.SEEK_END)
            stream.write(b"x")
            os.utime(stream.fileno())
    else:
        os.truncate(file, file.stat().st_size // 8 if what == "cut off" else 0)
    if kind != "mapped" and (what, when) == ("replaced", "between"):
        assert torch.equal(checkpoint.tensor("b"), tensors["b"]), "the old one is open and whole"
        assert checkpoint.changed_files() == [file.name]
    else:
        with pytest.raises(AiakqError, match=rf"{file.name}.* while it was read") as caught:
            checkpoint.tensor("b")
        assert caught.value.id == "model_malformed"
    assert first is None or checkpoint.mapped or torch.equal(first, tensors["a"]), "what was read stays"


def test_quantized_linears_are_found_in_the_tensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    for name, count in (("gq-desc", 1), ("lc-sq", 1), ("lc-w8a16", 1), ("aawq", 1)):
        path = tmp_path / name
        path.mkdir()
        prefix = "model.layers.0.self_attn.k_proj."
        with safe_open(FIXTURES / name / "model.safetensors", framework="pt") as file:
            owned = [key for key in file.keys() if key.startswith(prefix)]
            tensors = {f"m.k_proj.{key.removeprefix(prefix)}": file.get_tensor(key) for key in owned}
        config = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
        tensors["m.k_proj.bias"] = torch.ones(128)
        tensors["m.norm.weight"] = torch.ones(256)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
        checkpoint = Checkpoint.open(path)
        assert checkpoint.quantized_linears() == ["m.k_proj"]
        assert len(checkpoint.quantized_linears()) == count
        weight = checkpoint.read_linear("m.k_proj")
        assert (weight.n, weight.k) == (128, 256)
        assert weight.bias is not None


def test_an_error_names_folder_and_tensor(tmp_path: Path) -> None:
    save_file(
        {"x.qweight": torch.zeros(4, 32, dtype=torch.int32), "x.scales": torch.ones(1, 32)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    with pytest.raises(AiakqError) as caught:
        Checkpoint.open(tmp_path).read_linear("x")
    assert str(tmp_path) in str(caught.value)
    assert "x.qzeros is missing" in str(caught.value)


def test_older_tools_keep_the_quantization_in_a_separate_file(tmp_path: Path) -> None:
    save_file({"x.weight": torch.ones(2)}, tmp_path / "gptq_model-4bit-128g.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "sym": true, "desc_act": false}')
    spec = Checkpoint.open(tmp_path).spec
    assert spec is not None
    assert (spec.format, spec.bits, spec.group_size) == ("gptq", 4, 128)


def test_checkpoints_with_missing_files_are_refused(folder: Path, tmp_path: Path, refused) -> None:
    assert refused(tmp_path / "nowhere").id == "model_missing"
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "kept")
    problem = refused(folder)
    assert problem.id == "model_incomplete"
    assert shard.name in str(problem)
    (folder / INDEX).unlink()
    (folder / "other.safetensors").write_bytes(b"")
    assert "index" in str(refused(folder))
    (folder / "config.json").unlink()
    assert refused(folder).id == "model_incomplete"


@pytest.mark.parametrize("change", ["left out", "too many", "another file"])
def test_an_index_that_is_not_exact_is_noted_and_its_files_are_read(folder: Path, change: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    names = index["weight_map"]
    if change == "left out":
        del names["b.weight"]
    elif change == "too many":
        names["d.weight"] = names["a.weight"]
    else:
        names["a.weight"] = names["c.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.inventory) == {"a.weight", "b.weight", "c.weight"}
    assert torch.equal(checkpoint.tensor("a.weight"), torch.ones(2, 3))
    [remark] = checkpoint.remarks
    assert "index" in remark and {"left out": "b", "too many": "d", "another file": "a"}[change] + ".weight" in remark


def test_two_tensors_of_one_name_have_to_be_equal(folder: Path, refused) -> None:
    second = "model-00002-of-00002.safetensors"
    save_file({"c.weight": torch.arange(5), "a.weight": torch.ones(2, 3)}, folder / second)
    assert torch.equal(Checkpoint.open(folder).tensor("a.weight"), torch.ones(2, 3))
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["a.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert torch.equal(Checkpoint.open(folder).tensor("a.weight"), torch.ones(2, 3))
    save_file({"c.weight": torch.arange(5), "a.weight": torch.zeros(2, 3)}, folder / second)
    assert "a.weight is in model-00001-of-00002.safetensors, too, with other values" in str(refused(folder))


def test_a_file_of_the_whole_model_precedes_an_index(folder: Path) -> None:
    save_file({"whole": torch.ones(1)}, folder / "model.safetensors")
    assert list(Checkpoint.open(folder).inventory) == ["whole"]


@pytest.mark.parametrize(("file", "kind"), [("q4.gguf", "GGUF"), ("weights.00.npz", "MLX"), ("model.onnx", "ONNX")])
def test_files_of_weights_that_are_not_read_are_named(tmp_path: Path, file: str, kind: str, refused) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"x")
    problem = refused(tmp_path)
    assert problem.id == "format_unsupported" and kind in str(problem) and file in str(problem)


def test_pickles_are_refused(tmp_path: Path, refused) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    problem = refused(tmp_path)
    assert (problem.id, problem.exit_code) == ("pickle_refused", UNSAFE)


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/outside.safetensors", "..", "", ".", "sub/../../outside.safetensors", "a\0b"],
)
def test_an_index_cannot_name_files_outside_the_folder(folder: Path, file: str, refused) -> None:
    save_file({"a": torch.ones(1)}, folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    assert refused(folder).id == "path_outside_model"


@pytest.mark.parametrize("file", ["sub/x.bin", "x.bin", "model-00001-of-00002.SAFETENSORS"])
def test_an_index_that_names_other_files_of_the_folder_is_malformed(folder: Path, file: str, refused) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    problem = refused(folder)
    assert problem.id == "model_malformed" and INDEX in str(problem) and repr(file) in str(problem)


def test_a_whole_set_of_shards_needs_no_index(folder: Path, tmp_path: Path, refused) -> None:
    (folder / INDEX).unlink()
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.inventory) == {"a.weight", "b.weight", "c.weight"} and "no index" in checkpoint.remarks[0]
    (folder / "model-00001-of-00002.safetensors").rename(tmp_path / "kept")
    assert set(Checkpoint.open(folder).inventory) == {"c.weight"}  # the only file, whatever its name
    (folder / "model-00003-of-00003.safetensors").write_bytes((tmp_path / "kept").read_bytes())
    assert "says which of its 2 files" in str(refused(folder))
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    assert "model-00002-of-00003.safetensors is missing" in str(refused(folder))


def test_files_of_weights_that_are_not_read_are_noted(folder: Path) -> None:
    save_file({"d.weight": torch.ones(1)}, folder / "model-00003-of-00003.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    [remark] = Checkpoint.open(folder).remarks
    assert "the index does not name them: model-00003-of-00003.safetensors" in remark and "consolidated" not in remark
    save_file({"whole": torch.ones(1)}, folder / "model.safetensors")
    [remark] = Checkpoint.open(folder).remarks
    assert "model.safetensors holds the model" in remark and "model-00001-of-00002.safetensors" in remark


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00002-of-00002.safetensors"])
def test_links_that_lead_nowhere_are_named(folder: Path, name: str, refused) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("nowhere")
    assert f"{name} " in str(refused(folder)) and "a link to 'nowhere', which does not exist" in str(refused(folder))
    (folder / name).unlink()
    (folder / name).symlink_to("/nowhere/at/all")
    assert "a link to '/nowhere/at/all', which does not exist" in str(refused(folder))
    assert "cp -rL" not in str(refused(folder))
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    assert "loop of links" in str(refused(folder)) or refused(folder).id == "path_outside_model"
    (folder / name).unlink()
    (folder / "inner").mkdir(exist_ok=True)
    (folder / name).symlink_to("inner")
    assert "it is a folder" in str(refused(folder))


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "model.Safetensors", "model.safetensor"])
def test_a_file_that_is_nearly_named_as_weights_is_named(tmp_path: Path, name: str, refused) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / name)
    assert f"{name} would have to be renamed" in str(refused(tmp_path))


def test_a_shard_whose_name_differs_in_case_is_named(folder: Path, refused) -> None:
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model-00002-of-00002.SAFETENSORS")
    assert "unless model-00002-of-00002.SAFETENSORS is meant" in str(refused(folder))


def test_links_stay_in_the_folder_or_the_hub_cache(tmp_path: Path, refused) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    assert refused(folder).id == "path_outside_model"

    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    save_file({"a": torch.ones(1)}, cache / "blobs" / "abcd")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    assert torch.equal(Checkpoint.open(snapshot).tensor("a"), torch.ones(1))


def test_a_named_pipe_does_not_block(tmp_path: Path, refused) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    assert refused(tmp_path).id == "model_malformed"


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(start: int, end: int, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        b"<!DOCTYPE html><html></html>",
        container({}, length=2**63),
        container({"a": entry(0, 4)}, b"\0" * 3),  # half written
        container({"a": entry(0, 4)}, b"\0" * 5),
        container({"a": entry(4, 8)}, b"\0" * 8),  # a hole
        container({"a": entry(0, 4), "b": entry(2, 6)}, b"\0" * 6),  # an overlap
        container({"a": entry(0, 4, (2,))}, b"\0" * 4),
        container({"a": entry(0, 4, (-1,))}, b"\0" * 4),
        container({"a": entry(0, 4, (True,))}, b"\0" * 4),
        container({"a": entry(0, 0, (0, 2**62))}),
        container({"a": entry(0, 4, dtype="F5")}, b"\0" * 4),
        container({"../a": entry(0, 4)}, b"\0" * 4),
        container({"a\nb": entry(0, 4)}, b"\0" * 4),
        container({"a": 5}),
        container([1]),
        container(b'{"a": ' + b"[" * 100_000),
        container(b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": {}}', b"\0" * 4),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes, refused) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    problem = refused(tmp_path)
    assert problem.id == "model_malformed"
    assert "model.safetensors" in str(problem)


def test_too_many_tensors_are_refused_before_they_are_parsed(tmp_path: Path, refused) -> None:
    """Hundreds of thousands of empty tensors fit into one header; comparing them with the model takes minutes."""
    (tmp_path / "config.json").write_text("{}")
    content = container(json.dumps({f"{number:06d}": entry(0, 0, (0,), "U8") for number in range(230_000)}).encode())
    (tmp_path / "model.safetensors").write_bytes(content)
    began = time.process_time()
    assert "more than 100000 tensors" in str(refused(tmp_path))
    assert time.process_time() - began < 1


def test_a_folder_in_place_of_weights_is_refused(tmp_path: Path, refused) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").mkdir()
    assert refused(tmp_path).id == "model_malformed"


@pytest.mark.parametrize("name", ["", " ", "a/b/" + "c" * 5000, "zero\0byte"])
def test_names_of_no_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(AiakqError) as caught:
        resolve_model(str(tmp_path / name) if name.strip() else name)
    assert caught.value.id == "model_missing"


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", '{"a": NaN', "[" * 100_000])
def test_a_malformed_config_is_refused(folder: Path, text: str, refused) -> None:
    (folder / "config.json").write_text(text)
    assert refused(folder).id == "model_malformed"


def test_a_folder_of_ours_without_its_manifest_is_refused(folder: Path, refused) -> None:
    (folder / "config.json").write_text('{"aiakq": {}}')
    problem = refused(folder)
    assert problem.id == "model_incomplete"
    assert MANIFEST in str(problem)
    size = (folder / "model-00001-of-00002.safetensors").stat().st_size
    files = {"model-00001-of-00002.safetensors": {"size": size}}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))
    Checkpoint.open(folder)
    files["model-00001-of-00002.safetensors"]["size"] += 1
    (folder / MANIFEST).write_text(json.dumps({"files": files}))
    assert refused(folder).id == "model_malformed"


def test_model_paths_resolve_to_existing_folders_only(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder
    for name in ("./nothing", "/no/such/folder", "a/b/c", "../up", "org/na me"):
        with pytest.raises(AiakqError) as caught:
            resolve_model(name)
        assert caught.value.id == "model_missing"
    with pytest.raises(AiakqError) as caught:
        resolve_model(folder / "config.json")
    assert caught.value.id == "model_is_file"


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(AiakqError) as caught:
        resolve_model("some-org/some-model-nobody-has")
    assert caught.value.id == "model_hub"
    assert "\n" not in str(caught.value)


def test_written_files_are_read_by_the_official_package(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.arange(7, dtype=torch.int64),
        "c": torch.zeros(0, 4),
        "d": torch.tensor(3.5),
        "e": torch.randn(4, 6).T,
        "f": torch.randint(-5, 5, (9,), dtype=torch.int8),
    }
    size, digest = write_file(tmp_path / "x.safetensors", tensors)
    import hashlib

    content = (tmp_path / "x.safetensors").read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (size, digest)
    read = load_file(tmp_path / "x.safetensors")
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert set(read_header(tmp_path / "x.safetensors", "x")) == set(tensors)
