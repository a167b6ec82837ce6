"""Ranks placed by Ray on several nodes: equal to one process, and every kind of failure is named."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.kernels.cpu.gather_sockets import SocketCollective
from aiakq.runtime.distributed import ray_cluster, ray_processes, rendezvous
from aiakq.runtime.distributed.connections import Listener

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'aiakq[ray]'")

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt_token_ids": [5 + number, 17, 300, 41]} for number in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 65, "dtype": "float32"}


def generate(llm: LLM) -> list[tuple[list[int], list]]:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def pids_of(llm: LLM) -> list[tuple[int, int]]:
    """Process ids of the actor and of the rank, for ranks 1 and up."""
    return [rank.process.pids for rank in llm.engine.executor._group._ranks]


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def ranks(cluster, example_model, monkeypatch) -> Iterator[Callable[..., LLM]]:
    """``ranks(**arguments)`` -> an LLM whose ranks Ray has placed on the nodes of ``cluster``."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield lambda **arguments: LLM(
        str(example_model), **{**SMALL, "distributed_executor_backend": "ray", "tensor_parallel_size": 2, **arguments}
    )
    gc.collect()  # closes groups of earlier tests
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(example_model) -> list[tuple[list[int], list]]:
    return generate(LLM(str(example_model), **SMALL))


@pytest.mark.parametrize("size, stages", [(2, 1), (1, 2), (2, 2)])
def test_ranks_on_several_nodes_give_the_answers_of_one_process(ranks, alone, size, stages):
    llm = ranks(tensor_parallel_size=size, pipeline_parallel_size=stages)
    assert generate(llm) == alone
    assert generate(llm) == alone


def test_settings_of_rank_0_reach_the_others_and_addresses_do_not(ranks, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://models.example")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    llm = ranks()
    (pids,) = pids_of(llm)
    found = psutil.Process(pids[1]).environ()
    assert found["HF_ENDPOINT"] == "https://models.example" and "GLOO_SOCKET_IFNAME" not in found


def test_ranks_that_share_no_memory_give_the_answers_of_one_process(ranks, alone, monkeypatch):
    monkeypatch.setattr(rendezvous, "offer_memory", offer_nothing)
    llm = ranks()
    assert isinstance(llm.engine.executor._group.collective, SocketCollective)
    assert generate(llm) == alone


def offer_nothing(others, size, secret) -> None:
    for other in others:
        other.sendall(bytes(39))
    rendezvous._agree(others)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_that_exhausts_the_memory_of_rank_0_runs_in_parts_over_sockets(ranks, alone, monkeypatch, stages):
    monkeypatch.setattr(rendezvous, "offer_memory", offer_nothing)
    llm = ranks(pipeline_parallel_size=stages)
    original, count = type(llm.engine.executor.runner).forward, [0]

    def forward(self, step):
        count[0] += 1
        if count[0] % 3 == 0 and len(step.token_ids) > 1:
            raise MemoryError
        return original(self, step)

    monkeypatch.setattr(type(llm.engine.executor.runner), "forward", forward)
    assert generate(llm) == alone


@pytest.mark.process_failures
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize("which", [0, 1], ids=["actor", "rank"])
def test_a_process_that_is_killed_is_named_at_once(ranks, monkeypatch, which, shared):
    if not shared:
        monkeypatch.setattr(rendezvous, "offer_memory", offer_nothing)
    llm = ranks()
    generate(llm)
    (pids,) = pids_of(llm)
    os.kill(pids[which], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(AiakqError, match="Rank 1 failed: ") as failure:
        while time.monotonic() - began < 10:  # a rank may compute an answer before it learns that its actor has ended
            generate(llm)
    assert time.monotonic() - began < 20 and failure.value.id == "rank_failed"
    if which == 1:
        assert "it was ended by SIGKILL on node" in failure.value.message
    wait_for_end(pids[1])


def test_a_rank_that_hangs_is_named_and_killed(ranks):
    llm = ranks(distributed_timeout_seconds=1.5)
    generate(llm)
    ((_, pid),) = pids_of(llm)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(AiakqError, match=r"Rank 1 timed out after 1.5 s: gather \d+"):
        generate(llm)
    wait_for_end(pid)


@pytest.mark.process_failures
def test_a_lost_node_is_named_and_another_takes_its_place(ranks, cluster, alone, monkeypatch):
    monkeypatch.setenv("AIAKQ_RAY_CPUS_PER_RANK", "3")
    nodes = [cluster.add_node(num_cpus=3, object_store_memory=80 << 20)]
    try:
        llm = ranks()
        assert generate(llm) == alone
        ((_, pid),) = pids_of(llm)
        assert psutil.Process(pid).environ()["OMP_NUM_THREADS"] == "3"
        nodes.append(cluster.add_node(num_cpus=3, object_store_memory=80 << 20))
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
        with pytest.raises(AiakqError, match="Rank 1 failed: .* node "):
            generate_until_it_fails(llm)
        del llm
        again = ranks()
        assert generate(again) == alone
    finally:
        for node in nodes:
            cluster.remove_node(node)


def generate_until_it_fails(llm: LLM) -> None:
    """The processes of a node end within a second or so."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        generate(llm)


def test_more_than_the_cluster_has_is_refused_with_numbers(ranks, monkeypatch):
    monkeypatch.setattr(ray_cluster, "PLACEMENT_SECONDS", 1.0)
    with pytest.raises(AiakqError) as failure:
        ranks(tensor_parallel_size=9)
    assert failure.value.id == "ray_resources"
    expected = r"did not place 9 processes within 1 s: they need 9 x 1 CPU; free: \d+ of \d+ CPU on \d nodes\."
    assert re.search(expected, failure.value.message)


class ElsewhereListener(Listener):
    """Rank 0 announces an address without a listener."""

    def __init__(self, host: str, secret: bytes) -> None:
        super().__init__(host, secret)
        self.address = ("127.0.0.2", 9)


def test_a_rank_that_cannot_reach_rank_0_says_from_where_to_where(ranks, monkeypatch):
    monkeypatch.setattr(ray_processes, "Listener", ElsewhereListener)
    monkeypatch.setattr(ray_processes, "CONNECT_SECONDS", 0.5)
    with pytest.raises(AiakqError) as failure:
        ranks()
    assert failure.value.id == "rank_unreachable"
    expected = (
        r"Rank 1, at 127\.0\.0\.\d, could not connect to rank 0, at 127\.0\.0\.2:9, within 0\.5 s: Connection refused"
    )
    assert re.search(expected, failure.value.message), failure.value.message


def test_ranks_use_the_placement_group_that_this_process_was_given(ranks, cluster, alone, monkeypatch):
    """As in Ray Serve, where the engine is not in the placement group of the replica that has started it."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    ray.init(address=cluster.address, logging_level="ERROR")
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    assert group.wait(30)
    monkeypatch.setenv("AIAKQ_RAY_PLACEMENT_GROUP", group.id.hex())
    llm = ranks()
    assert generate(llm) == alone
    ((_, pid),) = pids_of(llm)
    assert psutil.Process(pid).environ()["HF_ENDPOINT"] == "http://127.0.0.1:9", "a setting of rank 0"
    assert count_groups() == 1, "it takes no other"
    del llm
    gc.collect()
    wait_for_end(pid)
    assert ray.util.placement_group_table(group)["state"] == "CREATED", "it is not ours to remove"
    with pytest.raises(AiakqError, match="they need 3 bundles; free: 2 bundles in the placement group"):
        ranks(tensor_parallel_size=3)
    monkeypatch.setenv("AIAKQ_RAY_PLACEMENT_GROUP", "no group")
    with pytest.raises(AiakqError, match="AIAKQ_RAY_PLACEMENT_GROUP=no group names no placement group"):
        ranks()


def test_an_actor_in_a_placement_group_starts_its_ranks_in_it(cluster, example_model, alone):
    ray.init(address=cluster.address, logging_level="ERROR")
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0)
    task = ray.remote(answers_of_two_ranks).options(num_cpus=1, scheduling_strategy=strategy)
    answers, groups = ray.get(task.remote(str(example_model), PROMPTS, SMALL), timeout=60)
    ray.shutdown()
    assert answers == [token_ids for token_ids, _ in alone] and groups == 1


def answers_of_two_ranks(model: str, prompts: list, small: dict) -> tuple[list[list[int]], int]:
    from aiakq import LLM, SamplingParams

    llm = LLM(model, tensor_parallel_size=2, distributed_executor_backend="ray", **small)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    results = llm.generate(prompts, params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results], count_groups()


def count_groups() -> int:
    """Placement groups of the cluster."""
    return sum(one["state"] == "CREATED" for one in ray.util.placement_group_table().values())


def test_a_missing_ray_installation_or_cluster_is_named(ranks, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(AiakqError, match="Ray cannot be used: 127.0.0.1:9: no listener"):
        ranks()
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:9")
    with pytest.raises(AiakqError, match="is not the address of a node"):
        ranks()


def refuse(**arguments: Any) -> None:
    raise ConnectionError("no listener.")


@pytest.mark.process_failures
def test_the_server_restarts_lost_ranks(cluster, example_model, tmp_path):
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [
        sys.executable, "-P", "-m", "aiakq", "serve", "--model", str(example_model), "--port", "0", "-tp", "2",
        "--distributed-executor-backend", "ray", "--max-model-len", "128", "--served-model-name", "m",
    ]  # fmt: skip
    log = (tmp_path / "log").open("wb")
    with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server:
        try:
            url = url_in(tmp_path / "log")
            body = {"model": "m", "prompt": "The", "max_tokens": 8, "temperature": 0}
            first = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            for process in psutil.process_iter(["cmdline"]):
                if "remote_rank" in " ".join(process.info["cmdline"] or []):
                    process.kill()
            deadline = time.monotonic() + 60
            while True:
                try:
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                except httpx.HTTPError:
                    answer = None
                if answer is not None and answer.status_code == 200:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert answer.json()["choices"] == first["choices"]
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
    text = (tmp_path / "log").read_text()
    assert "Rank 1 failed" in text and "Traceback" not in text


def url_in(log: Path) -> str:
    deadline = time.monotonic() + 90
    while True:
        found = re.search(r"http://127\.0\.0\.1:[0-9]+", log.read_text())
        if found:
            return found[0]
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
