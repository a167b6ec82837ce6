"""Every reader of a model folder's files checks that they are regular, inside it, and of bounded size."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from aiakq.errors import BAD_INPUT, UNSAFE, AiakqError
from aiakq.formats import model_folder
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.hub import resolve_model
from aiakq.formats.model_folder import check_files, open_file, read_file, read_json
from aiakq.formats.safetensors_file import read_header
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.text.tokenizer import Tokenizer


def link_outside(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text('{"secret": 1}')
    path.symlink_to(secret)


def link_to_process(path: Path) -> None:
    path.symlink_to("/proc/self/environ")


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_in_a_circle(path: Path) -> None:
    path.symlink_to(path.name)


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has to be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


#: What may lie where a file should, and the error for it.
IN_PLACE_OF_A_FILE: dict[Callable[[Path], None], str] = {
    link_outside: "path_outside_model",
    link_to_process: "path_outside_model",
    link_to_zeros: "path_outside_model",
    link_in_a_circle: "broken_link",
    os.mkfifo: "model_malformed",
    Path.mkdir: "model_malformed",
    unix_socket: "model_malformed",
}
READ_OR_COPIED = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE", "vocab.json"]


@pytest.fixture
def folder(example_model: Path, tmp_path: Path) -> Path:
    """A copy of the example model."""
    return Path(shutil.copytree(example_model, tmp_path / "model"))


def put(make: Callable[[Path], None], path: Path) -> None:
    path.unlink(missing_ok=True)
    make(path)


def refused(call: Callable[[], object]) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("file", [*READ_OR_COPIED, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("make", IN_PLACE_OF_A_FILE, ids=lambda make: make.__name__)
def test_only_regular_files_inside_the_folder_are_read(make: Callable[[Path], None], file: str, folder: Path) -> None:
    put(make, folder / file)
    for call in (lambda: check_files(folder), lambda: read_file(folder, file)):
        problem = refused(call)
        assert problem.id == IN_PLACE_OF_A_FILE[make]
        assert file in str(problem)


@pytest.mark.parametrize("make", IN_PLACE_OF_A_FILE, ids=lambda make: make.__name__)
def test_tokenizers_and_engines_start_with_the_check(make: Callable[[Path], None], folder: Path) -> None:
    """transformers must not open the file: it would block on a pipe and read a device endlessly."""
    put(make, folder / "tokenizer_config.json")
    for call in (lambda: Tokenizer.load(folder), lambda: EngineConfig.from_args({"model": str(folder)})):
        assert refused(call).id == IN_PLACE_OF_A_FILE[make]


@pytest.mark.parametrize("file", READ_OR_COPIED)
@pytest.mark.parametrize("make", [link_outside, link_to_process, os.mkfifo], ids=lambda make: make.__name__)
def test_quantize_publishes_no_file_from_elsewhere(make: Callable[[Path], None], file: str, folder: Path) -> None:
    put(make, folder / file)
    output = folder.parent / "out"
    options = QuantizeOptions(str(folder), str(output), "weight_only_int8", evaluate=False, device="cpu")
    problem = refused(lambda: quantize_checkpoint(options))
    assert problem.id == IN_PLACE_OF_A_FILE[make]
    assert problem.exit_code in (BAD_INPUT, UNSAFE)
    assert not output.exists()


def test_a_link_that_appears_later_is_not_copied(folder: Path, tmp_path: Path) -> None:
    from aiakq.formats.checkpoint_writer import CheckpointWriter

    link_outside(folder / "NOTICE")
    with CheckpointWriter(tmp_path / "out") as writer:
        problem = refused(lambda: writer.copy_file(folder, "NOTICE"))
    assert problem.id == "path_outside_model"
    assert "'NOTICE -> /" in problem.message and f"cp -rL {folder} COPY" in str(problem)


def test_a_hub_cache_is_read_through_its_links(example_model: Path, tmp_path: Path) -> None:
    """snapshots/<revision>/<file> -> ../../blobs/<hash>, of this repository only."""
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(example_model.iterdir())):
        shutil.copy(path, blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{number}")
    templates = snapshot / "additional_chat_templates"
    templates.mkdir()
    (blobs / "template").write_text("{{ messages }}")
    (templates / "tool.jinja").symlink_to("../../../blobs/template")
    assert resolve_model(str(snapshot)) == snapshot
    check_files(snapshot)
    Tokenizer.load(snapshot)
    options = QuantizeOptions(str(snapshot), str(tmp_path / "out"), "weight_only_int8", evaluate=False, device="cpu")
    quantize_checkpoint(options)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (example_model / name).read_bytes()

    old = tmp_path / "local"  # as ``hf download --local-dir`` made it before huggingface_hub 0.23
    old.mkdir()
    elsewhere = tmp_path / "hub" / "models--a--b" / "blobs"
    elsewhere.mkdir(parents=True)
    for number, path in enumerate(sorted(each for each in example_model.iterdir() if each.is_file())):
        blob = elsewhere / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        (old / path.name).symlink_to(blob)
    check_files(old)
    Tokenizer.load(old)
    assert Checkpoint.open(old).inventory

    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("{}")
    (snapshot / "added_tokens.json").symlink_to(other / "x")
    assert refused(lambda: check_files(snapshot)).id == "path_outside_model"


def test_a_template_folder_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "templates")
    assert refused(lambda: check_files(folder)).id == "path_outside_model"
    (folder / "additional_chat_templates").unlink()
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "default.jinja")
    assert refused(lambda: check_files(folder)).id == "model_malformed"


def test_a_tokenizer_config_cannot_name_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text((folder / "tokenizer.json").read_text())
    path = folder / "tokenizer_config.json"
    for value, allowed in ((tmp_path / "other.json", False), ("/never/there", True), (folder / "tokenizer.json", True)):
        path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "tokenizer_file": str(value)}))
        if allowed:
            check_files(folder)
        else:
            assert refused(lambda: Tokenizer.load(folder)).id == "path_outside_model"


def test_files_that_are_read_whole_have_a_bounded_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "MAX_FILE_BYTES", 1 << 20)
    check_files(folder)
    for name in ("trainer_state.json", "tokenizer.json"):
        with open(folder / name, "wb") as stream:
            stream.truncate((1 << 20) + 1)
        if name == "trainer_state.json":  # which nothing opens
            check_files(folder)
            with open_file(folder, name) as stream:
                assert stream.read(1) == b"\0"
        else:
            assert "larger than 1 MiB" in str(refused(lambda: check_files(folder)))
        assert "larger than 1 MiB" in str(refused(lambda name=name: read_json(folder / name, name)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named_alike_in_every_file(tmp_path, name):
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    read = read_json if name.endswith("json") else read_header
    with pytest.raises(AiakqError, match=r"it is a git-lfs pointer, not the file \(run git lfs pull\)"):
        read(tmp_path / name, name)
