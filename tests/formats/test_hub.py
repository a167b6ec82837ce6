"""What is fetched from the hub, with a client that serves a local repository."""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.formats.hub import check_model_name, resolve_model

COMMIT = "0123456789" * 4


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A repository at the hub; its files are fetched to the folder ``snapshots``."""
    import huggingface_hub

    source = tmp_path / "repository"
    source.mkdir()

    def download(name: str, *, revision: str | None, allow_patterns: list[str], **options: Any) -> str:
        folder = tmp_path / "snapshots" / COMMIT
        assert revision in (None, COMMIT)
        for path in source.rglob("*"):
            file = str(path.relative_to(source))
            wanted = any(fnmatchcase(file, pattern) for pattern in allow_patterns)
            if (
                path.is_file()
                and wanted
                and not any(fnmatchcase(file, p) for p in options.get("ignore_patterns") or ())
            ):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / file)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return source


def _fetched(repository: Path, files: list[str]) -> list[str]:
    for file in files:
        (repository / file).parent.mkdir(exist_ok=True)
        (repository / file).write_text("{}")
    folder = resolve_model("org/name", weights="safetensors")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_modules_of_sentence_transformers_come_with_their_model(repository):
    wanted = [
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "config.json"),
        *("model.safetensors", "modules.json"),
    ]
    assert _fetched(repository, [*wanted, "onnx/config.json", "onnx/model.onnx", "openvino/model.bin"]) == wanted


def test_other_models_have_no_folders(repository):
    assert _fetched(repository, ["config.json", "model.safetensors", "1_Pooling/config.json"]) == [
        *("config.json", "model.safetensors"),
    ]


def test_a_separate_file_of_scales_comes_with_a_model_that_names_it(repository):
    (repository / "config.json").write_text('{"aiakq": {"folded_scales": "aiakq/folded_scales.safetensors"}}')
    (repository / "aiakq").mkdir()
    for name in ("aiakq/folded_scales.safetensors", "aiakq/other.bin", "model.safetensors"):
        (repository / name).write_text("")
    folder = resolve_model("org/name", weights="safetensors")
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["aiakq/folded_scales.safetensors", "config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"", "is a file of safetensors"),
        ("pytorch_model.bin", b"PK", "is a file of torch"),
        ("config.json", b"{}", "Give the folder that it is in"),
        ("notes.txt", b"text", "is a file, not a model's folder"),
    ],
)
def test_a_single_file_is_called_what_it_is(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    for check in (check_model_name, resolve_model):
        with pytest.raises(AiakqError) as caught:
            check(str(tmp_path / name))
        assert caught.value.id == "model_is_file" and said in str(caught.value)
