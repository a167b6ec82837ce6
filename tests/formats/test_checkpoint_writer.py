"""Publishing a checkpoint: complete or absent after any failure."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aiakq.errors import AiakqError
from aiakq.formats import checkpoint_writer, output_folder, safetensors_file, steps
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.model_folder import MANIFEST
from aiakq.formats.output_folder import check_output


def fill(writer: CheckpointWriter, value: float = 1.0) -> None:
    writer.add("a.weight", torch.full((4, 8), value))
    writer.add("b.weight", torch.full((16,), value).half())
    writer.add_json("config.json", {"model_type": "llama", "aiakq": {}})


def make(output: Path, value: float = 1.0, **options: Any) -> Path:
    with CheckpointWriter(output, **options) as writer:
        fill(writer, value)
        return writer.publish()


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_small_checkpoint_is_written_as_one_file(tmp_path: Path) -> None:
    output = make(tmp_path / "deep" / "er" / "out")
    assert listing(output) == [MANIFEST, "config.json", "model.safetensors"]
    assert listing(output.parent) == ["out"]
    assert torch.equal(Checkpoint.open(output).tensor("a.weight"), torch.ones(4, 8))
    manifest = json.loads((output / MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"]["size"] == (output / "model.safetensors").stat().st_size
    mask = os.umask(0)
    os.umask(mask)
    assert (output / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


def test_many_shards_have_an_index(tmp_path: Path) -> None:
    output = make(tmp_path / "out", max_shard_bytes=64)
    assert "model-00002-of-00002.safetensors" in listing(output)
    assert set(Checkpoint.open(output).inventory) == {"a.weight", "b.weight"}
    from transformers.utils.hub import get_checkpoint_shard_files

    files, _ = get_checkpoint_shard_files(str(output), str(output / "model.safetensors.index.json"))
    assert len(files) == 2


def test_additional_tensors_are_in_a_separate_file(tmp_path: Path) -> None:
    beside = "aiakq/folded_scales.safetensors"

    def write(output: Path, stop: bool = False) -> Path:
        with CheckpointWriter(output, fingerprint="same", resume=True, beside=beside) as writer:
            if not writer.steps:
                writer.add("c.weight", torch.ones(4))
                writer.add_beside("a.columns", torch.full((4,), 2.0))
                assert writer.commit("first").beside == ("a.columns",)
                assert set(writer.read(writer.steps[0])) == {"c.weight"}
            if stop:
                raise KeyboardInterrupt
            fill(writer)
            return writer.publish()

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", stop=True)
    output, whole = write(tmp_path / "out"), write(tmp_path / "whole")
    assert listing(output) == ["aiakq", MANIFEST, "config.json", "model.safetensors"]
    assert load_file(output / beside).keys() == {"a.columns"}
    assert set(Checkpoint.open(output).inventory) == {"a.weight", "b.weight", "c.weight"}
    for name in (beside, "model.safetensors", MANIFEST):
        assert (output / name).read_bytes() == (whole / name).read_bytes()
    assert make(output, overwrite=True) == output and not (output / "aiakq").exists()


def test_a_file_of_additional_tensors_may_be_empty(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", beside="aiakq/other.safetensors") as writer:
        fill(writer)
        writer.publish()
    assert load_file(tmp_path / "out" / "aiakq" / "other.safetensors") == {}


def test_same_tensors_same_bytes(tmp_path: Path) -> None:
    first, second = make(tmp_path / "one"), make(tmp_path / "two")
    for name in listing(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_sealed_folder_is_a_checkpoint_and_accepts_more_files(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        fill(writer)
        assert len(Checkpoint.open(writer.seal()).inventory) == 2
        writer.add_json("report.json", {"perplexity": 1.0})
        output = writer.publish()
    assert "report.json" in json.loads((output / MANIFEST).read_text())["files"]
    Checkpoint.open(output)


@pytest.mark.parametrize("problem", [ValueError("boom"), KeyboardInterrupt(), SystemExit(143)])
def test_an_exception_leaves_no_files(tmp_path: Path, problem: BaseException) -> None:
    with pytest.raises(type(problem)), CheckpointWriter(tmp_path / "new" / "out", max_shard_bytes=64) as writer:
        fill(writer)
        writer.seal()
        raise problem
    assert listing(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
def test_a_full_disk_leaves_nothing_and_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    old = make(tmp_path / "out", 1.0)
    before = {name: (old / name).read_bytes() for name in listing(old)}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target: Any = {"write": checkpoint_writer, "fsync": os, "rename": os, "mkdir": Path}[call]
    monkeypatch.setattr(target, {"write": "write_file"}.get(call, call), fail)
    with pytest.raises(AiakqError) as caught:
        make(tmp_path / "out", 2.0, overwrite=True)
    assert caught.value.id == "output_failed"
    assert "No space left" in str(caught.value)
    monkeypatch.undo()
    assert listing(tmp_path) == ["out"]
    assert {name: (old / name).read_bytes() for name in listing(old)} == before


class _Disk:
    """Counts writes, fsyncs and renames, and fails the one with the number ``broken``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: int = -1) -> None:
        self.calls = 0
        self.broken = broken
        for name in ("fsync", "rename"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        for module in (checkpoint_writer, output_folder, steps, safetensors_file):
            monkeypatch.setattr(module, "open", self._open, raising=False)

    def _counted(self, real: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            if self.calls == self.broken:
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments, **keywords)

        return call

    def _open(self, *arguments: Any) -> Any:
        stream = open(*arguments)
        if "r" in arguments[1]:
            return stream
        # Attributes of a real file cannot be set, so a stand-in passes everything on but ``write``.
        disk = self

        class Stream:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                stream.close()

            def __getattr__(self, name: str) -> Any:
                found = getattr(stream, name)
                return disk._counted(found) if name == "write" else found

        return Stream()


def _in_two_steps(output: Path, value: float, **options: Any) -> None:
    with CheckpointWriter(output, max_shard_bytes=200, **options) as writer:
        fill(writer, value)
        writer.commit("first", {"a": 1})
        writer.add("c.weight", torch.full((64,), value))
        writer.commit("second")
        writer.seal()
        writer.add_json("report.json", {})
        writer.publish()


def test_an_error_at_each_write_fsync_and_rename(tmp_path: Path) -> None:
    """Whichever fails, the old output stays whole and nothing stays beside it; or the new one is there."""
    with pytest.MonkeyPatch.context() as patch:
        disk = _Disk(patch)
        _in_two_steps(tmp_path / "out", 1.0)
        total = disk.calls
    old = {name: (tmp_path / "out" / name).read_bytes() for name in listing(tmp_path / "out")}
    assert total > 40
    for number in range(1, total + 2):
        with pytest.MonkeyPatch.context() as patch:
            _Disk(patch, broken=number)
            try:
                _in_two_steps(tmp_path / "out", 2.0, overwrite=True)
            except AiakqError as problem:
                assert problem.id == "output_failed" and "Input/output error" in str(problem), number
        assert listing(tmp_path) == ["out"], number
        found = {name: (tmp_path / "out" / name).read_bytes() for name in listing(tmp_path / "out")}
        if found != old:
            assert float(Checkpoint.open(tmp_path / "out").tensor("a.weight")[0, 0]) == 2.0, number
            assert number > total - 4, "only what comes after the exchange may fail with the new output in place"
            _in_two_steps(tmp_path / "out", 1.0, overwrite=True)


def test_steps_are_reused_only_by_an_identical_run(tmp_path: Path) -> None:
    def start(fingerprint: str, resume: bool = True) -> list[str]:
        with (
            pytest.raises(RuntimeError),
            CheckpointWriter(tmp_path / "out", fingerprint=fingerprint, resume=resume) as writer,
        ):
            known = [step.name for step in writer.steps]
            if not known:
                fill(writer)
                writer.commit("first", {"a": 1})
            raise RuntimeError
        return known

    assert start("x") == []
    assert start("x") == ["first"]
    assert start("y") == []
    assert start("x") == []
    assert start("x", resume=False) == []
    assert listing(tmp_path) == []


def test_steps_become_the_same_shards_however_often_interrupted(tmp_path: Path) -> None:
    _in_two_steps(tmp_path / "once", 1.0)
    with (
        pytest.raises(RuntimeError),
        CheckpointWriter(tmp_path / "out", max_shard_bytes=200, fingerprint="x", resume=True) as writer,
    ):
        fill(writer)
        writer.commit("first", {"a": 1})
        writer.add("c.weight", torch.ones(64))
        raise RuntimeError
    with CheckpointWriter(tmp_path / "out", max_shard_bytes=200, fingerprint="x", resume=True) as writer:
        assert [(step.name, step.note) for step in writer.steps] == [("first", {"a": 1})]
        assert set(writer.read(writer.steps[0])) == {"a.weight", "b.weight"}
        writer.add("c.weight", torch.ones(64))
        writer.add_json("config.json", {"model_type": "llama", "aiakq": {}})
        writer.add_json("report.json", {})
        writer.publish()
    assert listing(tmp_path / "out") == listing(tmp_path / "once")
    for name in listing(tmp_path / "out"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "once" / name).read_bytes(), name


def test_a_replaced_tensor_takes_the_place_of_the_first(tmp_path: Path) -> None:
    make(tmp_path / "whole", value=1.0)
    with CheckpointWriter(tmp_path / "replaced") as writer:
        fill(writer, value=3.0)
        writer.commit("first")
        writer.replace("a.weight", torch.ones(4, 8))
        writer.commit("second")
        writer.replace("b.weight", torch.ones(16).half())
        writer.commit("third")
        assert writer.total_bytes == 4 * 8 * 4 + 16 * 2
        writer.publish()
    whole, replaced = (tmp_path / name / "model.safetensors" for name in ("whole", "replaced"))
    assert whole.read_bytes() == replaced.read_bytes()


def test_a_layer_that_fails_read_back_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(AiakqError, match="read back") as caught, CheckpointWriter(tmp_path / "out") as writer:
        fill(writer)
        path = writer.seal() / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        writer.publish()
    assert caught.value.id == "output_failed"
    assert listing(tmp_path) == []


def test_existing_output(tmp_path: Path) -> None:
    output = make(tmp_path / "out", 1.0)
    with pytest.raises(AiakqError) as caught:
        make(output, 2.0)
    assert caught.value.id == "output_exists"
    make(output, 2.0, overwrite=True)
    assert float(Checkpoint.open(output).tensor("a.weight")[0, 0]) == 2.0
    assert listing(tmp_path) == ["out"]
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(AiakqError) as caught:
        make(tmp_path / "file", overwrite=True)
    assert caught.value.id == "output_not_folder"


@pytest.mark.parametrize("name", ["n" * 5000, "n" * 300, "file/below", "zero\0byte"])
def test_invalid_output_names_are_output_failed(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(AiakqError) as caught:
        make(tmp_path / name)
    assert caught.value.id == "output_failed"
    assert listing(tmp_path) == ["file"]


def test_overwrite_keeps_folders_that_hold_no_model(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "diary.txt").write_text("dear")
    with pytest.raises(AiakqError) as caught:
        make(home, overwrite=True)
    assert caught.value.id == "output_not_model"
    assert listing(home) == ["diary.txt"]


def test_overwrite_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = make(tmp_path / "out", 1.0)
    monkeypatch.setattr(output_folder.ctypes, "CDLL", lambda *_, **__: object())
    make(output, 2.0, overwrite=True)
    assert float(Checkpoint.open(output).tensor("a.weight")[0, 0]) == 2.0
    assert listing(tmp_path) == ["out"]


def test_output_and_input_must_differ(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "inner").symlink_to(source / "sub")
    for output in (
        source,
        tmp_path / "link",
        source / "sub",
        tmp_path / "inner",
        tmp_path,
        tmp_path / "x" / ".." / "source",
    ):
        for given in (source, tmp_path / "link"):
            with pytest.raises(AiakqError) as caught:
                check_output(output, [given], overwrite=True)
            assert caught.value.id == "output_is_input", output
    assert check_output(tmp_path / "source2", [source]) == tmp_path / "source2"


def test_a_second_writer_is_refused_at_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        with pytest.raises(AiakqError) as caught, CheckpointWriter(tmp_path / "out"):
            pass
        assert caught.value.id == "output_locked"
        fill(writer)
        writer.publish()
    assert listing(tmp_path) == ["out"]


def test_too_little_disk_space_is_detected_before_quantization_starts(tmp_path: Path) -> None:
    with pytest.raises(AiakqError) as caught, CheckpointWriter(tmp_path / "out", expected_bytes=10**18):
        pass
    assert caught.value.id == "no_space"
    assert listing(tmp_path) == []


@pytest.mark.parametrize("moment", ["entered", "sealed", "published"])
def test_kill_minus_nine(tmp_path: Path, moment: str) -> None:
    """After SIGKILL the output is absent or whole, and the next run cleans up."""
    script = textwrap.dedent(
        """
        import os, signal, sys, torch
        from aiakq.formats.checkpoint_writer import CheckpointWriter
        def die(now):
            if now == sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL)
        with CheckpointWriter(sys.argv[1], max_shard_bytes=64) as writer:
            writer.add("a.weight", torch.ones(4, 8))
            writer.add("b.weight", torch.ones(4, 8))
            die("entered")
            writer.add_json("config.json", {"aiakq": {}})
            writer.seal()
            die("sealed")
            writer.publish()
            die("published")
        """
    )
    output = tmp_path / "out"
    ended = subprocess.run([sys.executable, "-c", script, str(output), moment], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert output.exists() == (moment == "published")
    if moment == "published":
        Checkpoint.open(output)
    else:
        remains = [path for path in tmp_path.iterdir() if path.is_dir()]
        assert len(remains) == 1
        if moment == "entered":
            with pytest.raises(AiakqError, match="unfinished"):
                Checkpoint.open(remains[0])
    make(output, 3.0, overwrite=True)
    assert listing(tmp_path) == ["out"]
    assert float(Checkpoint.open(output).tensor("a.weight")[0, 0]) == 3.0


def test_an_old_output_moved_aside_is_put_back(tmp_path: Path) -> None:
    """A crash between the two renames of the fallback must not lose the old output."""
    make(tmp_path / "out", 1.0)
    (tmp_path / "out").rename(tmp_path / f".out{output_folder._OLD_MARK}0123")
    with pytest.raises(AiakqError) as caught:
        make(tmp_path / "out", 2.0)
    assert caught.value.id == "output_exists"
    assert listing(tmp_path) == ["out"]
    assert float(Checkpoint.open(tmp_path / "out").tensor("a.weight")[0, 0]) == 1.0


def test_files_of_the_source_are_copied_verbatim(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"\xff{ not json")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "real")
    with CheckpointWriter(tmp_path / "out") as writer:
        fill(writer)
        writer.copy_file(tmp_path, "tokenizer.json")
        output = writer.publish()
    assert (output / "tokenizer.json").read_bytes() == b"\xff{ not json"
    assert not (output / "tokenizer.json").is_symlink()
