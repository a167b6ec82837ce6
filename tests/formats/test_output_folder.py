"""What --overwrite may delete; failures of the system leave no files and have the right exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq.errors import CONFLICT, RESOURCES, AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.output_folder import check_output
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint

CONFIG = '{"architectures": ["LlamaForCausalLM"]}'


def write(output: Path, **options: Any) -> Path:
    with CheckpointWriter(output, **options) as writer:
        writer.add("a.weight", torch.ones(4, 8))
        writer.add_json("config.json", {"aiakq": {}})
        return writer.publish()


def model(folder: Path, config: str = CONFIG) -> Path:
    """A model as other tools leave it."""
    folder.mkdir()
    (folder / "config.json").write_text(config)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(AiakqError) as caught:
        check_output(folder, overwrite=True)
    assert (caught.value.id, caught.value.exit_code) == ("output_not_model", CONFLICT)
    return str(caught.value)


@pytest.mark.parametrize("config", ["{}", "[]", '{"theme": "dark"}'])
def test_a_config_alone_makes_no_model(config: str, tmp_path: Path) -> None:
    refused(model(tmp_path / "settings", config))
    (tmp_path / "settings" / "config.json").write_text(CONFIG)
    assert check_output(tmp_path / "settings", overwrite=True)
    (tmp_path / "settings" / "model.safetensors").unlink()
    assert "no model" in refused(tmp_path / "settings")


@pytest.mark.parametrize("stranger", ["thesis.docx", "notes.txt", ".git/", "photos/", "model.py"])
@pytest.mark.parametrize("ours", [False, True])
def test_other_files_in_a_model_folder_are_kept(stranger: str, ours: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "out") if ours else model(tmp_path / "out")
    assert check_output(folder, overwrite=True)
    if stranger.endswith("/"):
        (folder / stranger).mkdir()
    else:
        (folder / stranger).write_text("years of work")
    assert stranger.rstrip("/") in refused(folder)
    with pytest.raises(AiakqError):
        write(folder, overwrite=True)
    assert (folder / stranger).exists()


def test_what_the_hub_adds_to_a_model_goes_with_it(tmp_path: Path) -> None:
    folder = model(tmp_path / "out")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    for name in ("README.md", ".gitattributes", "LICENSE", "modeling_x.py", "tokenizer.json", "generation_config.json"):
        (folder / name).write_text("")
    write(folder, overwrite=True)
    assert not (folder / "README.md").exists()


@contextlib.contextmanager
def no_open_files() -> Iterator[None]:
    """Every further open fails with EMFILE while it lasts."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("stage", ["quantize", "publish"])
def test_no_more_open_files_is_a_resource_that_ran_out(stage: str, example_model: Path, tmp_path: Path) -> None:
    """Whatever needs one first fails, with the exit code for resources, and the partial folder is removed."""
    options = QuantizeOptions(str(example_model), str(tmp_path / "out"), "weight_only_int8", evaluate=False)
    with contextlib.ExitStack() as until_the_end:

        def exhaust(progress: Any) -> None:
            if progress.stage == stage and progress.done == 0:
                until_the_end.enter_context(no_open_files())

        with pytest.raises(AiakqError) as caught:
            quantize_checkpoint(options, exhaust)
    assert caught.value.exit_code == RESOURCES
    assert "open" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_more_open_files_does_not_make_a_model_damaged(example_model: Path) -> None:
    with no_open_files(), pytest.raises(AiakqError) as caught:
        Checkpoint.open(example_model)
    assert caught.value.id == "open_files"
    checkpoint = Checkpoint.open(example_model)
    with no_open_files(), pytest.raises(AiakqError) as caught:
        checkpoint.tensor(next(iter(checkpoint.inventory)))
    assert caught.value.id == "open_files"


def test_an_error_while_files_are_removed_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails to unlink: a published output stays published, a failure keeps its own error."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    monkeypatch.setattr(CheckpointWriter, "_adopt", lambda *_: False)
    with CheckpointWriter(tmp_path / "new") as writer:
        assert writer.folder
    with pytest.raises(AiakqError) as caught, CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a.weight", torch.ones(4, 8))
        writer.publish()
    assert (caught.value.id, caught.value.exit_code) == ("output_failed", RESOURCES)
    assert not (tmp_path / "out").exists()
