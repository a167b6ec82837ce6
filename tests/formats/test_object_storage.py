"""Models in object storage, with fsspec's file system in memory in the place of a client."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from aiakq.errors import AiakqError
from aiakq.formats import object_storage
from aiakq.formats.hub import check_model_name, resolve_model

URL = "s3://bucket/models/tiny"


class Storage(MemoryFileSystem):
    """Objects with entity tags, and a list of the reads."""

    protocol = "s3"
    store: dict = {}
    pseudo_dirs = [""]
    reads: list[str] = []
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("s3://").strip("/")

    def ls(self, path, detail=True, **options):
        entries = super().ls(path, detail=True, **options)
        for entry in entries:
            if entry["type"] == "file":
                entry["ETag"] = str(hash(self.store[entry["name"]].getvalue()))
        return entries if detail else [entry["name"] for entry in entries]

    def cat_file(self, path, start=None, end=None, **options):
        self.reads.append(path.rpartition("/")[2])
        return super().cat_file(path, start=start, end=end, **options)


@pytest.fixture
def storage(monkeypatch) -> Storage:
    Storage.store, Storage.pseudo_dirs, Storage.reads = {}, [""], []
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", Storage)
    return Storage()


@pytest.fixture
def model(storage: Storage, tiny_model) -> Path:
    folder = tiny_model("LlamaForCausalLM")
    for path in folder.iterdir():
        storage.pipe_file(f"/bucket/models/tiny/{path.name}", path.read_bytes())
    storage.pipe_file("/bucket/models/tiny/original/config.json", b"{}")
    storage.pipe_file("/bucket/models/tiny/notes.pdf", b"0")
    return folder


def test_a_model_is_fetched_once(model, storage, tmp_path, monkeypatch):
    monkeypatch.setattr(object_storage, "_PART", 1000)
    folder = resolve_model(URL, cache=str(tmp_path))
    assert tmp_path in folder.parents
    kept = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert "notes.pdf" not in kept and kept <= {path.name for path in model.iterdir()}
    assert {"config.json", "model.safetensors"} <= kept
    assert all((folder / name).read_bytes() == (model / name).read_bytes() for name in kept)
    assert storage.reads.count("model.safetensors") > 1, "it is fetched in parts"
    storage.reads.clear()
    assert resolve_model(URL + "/", cache=str(tmp_path)) == folder and not storage.reads


def test_only_what_has_changed_is_fetched_again(model, storage, tmp_path):
    folder = resolve_model(URL, cache=str(tmp_path))
    storage.reads.clear()
    storage.pipe_file("/bucket/models/tiny/config.json", b"{}")
    storage.rm("/bucket/models/tiny/generation_config.json")
    (folder / "model.safetensors").write_bytes(b"cut off")
    assert resolve_model(URL, cache=str(tmp_path)) == folder
    assert set(storage.reads) == {"config.json", "model.safetensors"}
    assert (folder / "config.json").read_bytes() == b"{}" and not (folder / "generation_config.json").exists()


def test_it_is_served(model, tmp_path):
    from aiakq import LLM, SamplingParams

    params, prompt = SamplingParams(temperature=0, max_tokens=4), {"prompt_token_ids": [5, 6, 7]}
    first, second = (
        LLM(model=name, dtype="float32", download_dir=str(tmp_path)).generate(prompt, params, use_tqdm=False)
        for name in (URL, str(model))
    )
    assert first[0].outputs[0].token_ids == second[0].outputs[0].token_ids


@pytest.mark.parametrize("weights", ["none", "pt"])
def test_other_weights_are_left_where_they_are(model, tmp_path, weights):
    folder = resolve_model(URL, cache=str(tmp_path), weights=weights)
    assert not (folder / "model.safetensors").exists()


def refusal(url: str, cache: Path, **options) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        resolve_model(url, cache=str(cache), **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_is_not_there_is_reported(model, storage, tmp_path, monkeypatch):
    assert "nothing" in str(refusal("s3://bucket/nothing", tmp_path))
    assert refusal(URL, tmp_path, revision="main").id == "option_conflict"
    storage.pipe_file("/bucket/empty/readme.md", b"0")
    assert "config.json" in str(refusal("s3://bucket/empty", tmp_path))
    monkeypatch.setattr(Storage, "cat_file", lambda *_, **__: b"short")
    assert "changed while it was fetched" in str(refusal(URL, tmp_path))
    with pytest.raises(AiakqError, match="There is no model"):
        check_model_name("ftp://host/model")


def test_a_full_disk_is_reported_before_anything_is_fetched(model, storage, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    assert refusal(URL, tmp_path).id == "no_space" and not storage.reads


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    def import_error(*_: object) -> None:
        raise ImportError("Install gcsfs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", import_error)
    assert "pip install gcsfs" in str(refusal("gs://bucket/model", tmp_path))


def test_names_that_are_no_plain_files_are_left_out(storage, tmp_path):
    for name in ("config.json", ".hidden.json", "a b.json"):
        storage.pipe_file(f"/bucket/odd/{name}", b"{}")
    folder = resolve_model("s3://bucket/odd", cache=str(tmp_path), weights="none")
    assert {path.name for path in folder.iterdir()} - {".lock", ".fetched.json"} == {"config.json"}


def test_a_scheme_alone_names_no_folder():
    for name in ("s3://", "gs:///"):
        with pytest.raises(AiakqError, match="it names no folder"):
            check_model_name(name)
