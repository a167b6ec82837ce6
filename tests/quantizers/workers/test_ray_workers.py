"""Workers on several nodes, placed by Ray: the bytes of one process, and lost or unlike nodes named."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.quantizers import parallel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.progress import StageProgress
from aiakq.quantizers.workers import other_worker
from aiakq.runtime.distributed import ray_cluster

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'aiakq[ray]'")

pytestmark = pytest.mark.slow

MANY = {"samples": 96, "seqlen": 64}
RAY = {"distributed_executor_backend": "ray"}
NAME = "aiakq.quantizers.worker_process"


@pytest.fixture(autouse=True)
def connected(cluster, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield
    ray.shutdown()


def worker_processes() -> list[int]:
    """Those of every node."""
    return sorted(one.pid for one in psutil.process_iter(["cmdline"]) if NAME in " ".join(one.info["cmdline"] or ()))


def reserved() -> dict[str, Any]:
    """Placement groups that exist."""
    groups = ray.util.placement_group_table().values()
    return {group["placement_group_id"]: group["state"] for group in groups if group["state"] != "REMOVED"}


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("method", "workers", "fields"),
    [
        ("weight_only_int8", 2, {}),
        ("smooth_quant", 3, {"activation_memory": 0.0}),
        ("awq", 2, {}),
        ("gptq", 3, {"gptaq": True}),
    ],
    ids=["int8", "smooth_quant", "awq", "gptq"],
)
def test_the_bytes_are_those_of_one_worker(
    method: str,
    workers: int,
    fields: dict[str, Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
) -> None:
    source = tiny_model("LlamaForCausalLM")
    threads = torch.get_num_threads()
    one = quantize(source, tmp_path / "one", method, **MANY, **fields)
    several = quantize(source, tmp_path / "several", method, workers=workers, **RAY, **MANY, **fields)
    assert torch.get_num_threads() == threads
    assert digest(tmp_path / "one") == digest(tmp_path / "several")
    assert one.layers == several.layers and one.recipe == several.recipe
    assert not worker_processes() and not reserved()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_lost_worker_is_named_and_the_run_can_be_resumed(
    sign: signal.Signals, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sign == signal.SIGSTOP:
        monkeypatch.setattr(other_worker, "TIME_LIMIT", 8.0)
    # More blocks than a worker that is ahead can have sent the results of.
    source = str(tiny_model("LlamaForCausalLM", num_hidden_layers=4))
    options = QuantizeOptions(
        source, str(tmp_path / "out"), "gptq", group_size=32, evaluate=False, device="cpu", resume=True, workers=2,
        **RAY, **MANY,
    )  # fmt: skip
    lost: list[int] = []

    def lose(progress: StageProgress) -> None:
        if progress.stage == "quantize" and progress.done == 1 and not lost:
            lost.extend(worker_processes())
            os.kill(lost[0], sign)

    with pytest.raises(AiakqError) as caught:
        quantize_checkpoint(options, lose)
    if sign == signal.SIGKILL:
        assert caught.value.id == "worker_failed"
        assert "Worker 1 failed: it was ended by SIGKILL on node " in str(caught.value)
    else:
        assert caught.value.id == "worker_late" and "Worker 1 sent no heartbeat for 8 s." in str(caught.value)
    wait_until(lambda: not worker_processes())
    assert not reserved()
    assert quantize_checkpoint(options).resumed_from == 1


def wait_until(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("file_sizes", lambda folder: {"config.json": 1}, "on its node are not those of worker 0"),
        ("aiakq", type("Other", (), {"__version__": "0.0.1"}), "and worker 0 is 0.0.1"),
    ],
    ids=["files", "version"],
)
def test_a_node_with_something_else_is_refused(
    name: str, value: Any, said: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, name, value)
    options = QuantizeOptions(
        str(tiny_model("LlamaForCausalLM")), str(tmp_path / "out"), "weight_only_int8", evaluate=False, device="cpu",
        workers=2, **RAY,
    )  # fmt: skip
    with pytest.raises(AiakqError) as caught:
        quantize_checkpoint(options)
    assert caught.value.id == "worker_failed" and said in str(caught.value)
    assert list(tmp_path.iterdir()) == [] and not worker_processes() and not reserved()


def test_more_than_the_cluster_has_is_refused_with_numbers(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "PLACEMENT_SECONDS", 1.0)
    options = QuantizeOptions(
        str(tiny_model("LlamaForCausalLM")), str(tmp_path / "out"), "weight_only_int8", evaluate=False, device="cpu",
        workers=8, **RAY,
    )  # fmt: skip
    with pytest.raises(AiakqError) as caught:
        quantize_checkpoint(options)
    assert caught.value.id == "ray_resources" and "they need 8 x 1 CPU" in str(caught.value)
    assert list(tmp_path.iterdir()) == [] and not reserved()


def test_the_command_quantizes_over_ray(
    tiny_model: Callable[..., Path], process: Callable[..., Any], tmp_path: Path
) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    words = ["-quant_type", "weight_only_int8", "--no-eval", "--device", "cpu", "--workers", "2"]
    ended = process(
        "quantize", "-i", source, "-o", str(tmp_path / "out"), *words, "--distributed-executor-backend", "ray"
    )
    assert ended.code == 0, ended.err
    assert "worker" not in ended.err.lower()
