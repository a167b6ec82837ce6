"""The engine's path for GPUs, on a fake one: the same tokens with graphs and without, and no wait that is not meant."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda.device import FakeDevice, Launches
from fake_cuda.install import counted, fake_cuda
from fake_cuda.streams import CudaFault, FakeStream
from replay_proposer import planner_of, replaying

from aiakq import LLM, SamplingParams
from aiakq.kernels.ops import sampling
from aiakq.runtime.executor import runner
from aiakq.runtime.executor.cuda_graphs import DecodeGraphs
from aiakq.runtime.layers.mlp import GatedMLP
from aiakq.runtime.models.decoder import Decoder

#: As small as they can be: a program of a kernel takes milliseconds in Triton's interpreter.
_SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64, "intermediate_size": 64}
DENSE: tuple[str, dict[str, Any]] = ("LlamaForCausalLM", _SMALL)
MIXTURE: tuple[str, dict[str, Any]] = (
    "Qwen3MoeForCausalLM", {**_SMALL, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64}
)  # fmt: skip
RECURRENT: tuple[str, dict[str, Any]] = (
    "Mamba2ForCausalLM", {"hidden_size": 64, "num_heads": 4, "n_groups": 1, "num_hidden_layers": 1}
)  # fmt: skip
PROMPTS = [{"prompt_token_ids": [5, 9, 4]}, {"prompt_token_ids": [40, 41]}]
EAGER: dict[str, Any] = {"enforce_eager": True, "async_scheduling": False}
CAPTURED: dict[str, Any] = {"async_scheduling": False}
ASYNCHRONOUS: dict[str, Any] = {"async_scheduling": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "disable_by_batch_size": 100}
#: What an eager decoding step launches for models of this many layers.
LAYERS = 2
BOTH = Counter(
    {
        "embedding": 1, "norm_kernel": 2 * LAYERS + 1, "rotary_kernel": LAYERS, "split_kernel": 1,
        "decode_kernel": LAYERS, "combine_kernel": LAYERS, "gate_kernel": LAYERS, "index.Tensor": 2, "_to_copy": 2,
        "greedy_parts_kernel": 1, "greedy_kernel": 1,
    }
)  # fmt: skip
EXPERTS = ("_softmax", "topk", "sum.dim_IntList", "clamp", "div.Tensor", "experts_count_kernel", "experts_place_kernel")
STEP = {
    DENSE[0]: BOTH + Counter({"mm": 4 * LAYERS + 1}),
    MIXTURE[0]: BOTH
    + Counter({"mm": 3 * LAYERS + 1, "_to_copy": 2 * LAYERS, "experts_floats_kernel": 2 * LAYERS})
    + Counter(dict.fromkeys((*EXPERTS, "experts_sum_kernel"), LAYERS)),
}
#: A captured one: copies of its inputs, and the sampler; behind a step whose tokens the host does not know, theirs.
REPLAYED = Counter({"copy_": 5, "greedy_parts_kernel": 1, "greedy_kernel": 1})
TOKENS_OF_THE_STEP_BEFORE = Counter({"index_select": 1, "index_copy_": 1})


def loaded(folder, **arguments: Any) -> LLM:
    return LLM(str(folder), dtype="bfloat16", device="cuda", max_model_len=32, max_num_seqs=2, **arguments)


def tokens(llm: LLM, count: int = 3, prompts=PROMPTS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


@contextlib.contextmanager
def steps_of(llm: LLM, device: FakeDevice) -> Iterator[list[Launches]]:
    """What each step of the engine asks of the device."""
    steps: list[Launches] = []
    step = llm.engine.step

    def run(*args):
        with counted(device) as launches:
            steps.append(launches)
            return step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", run)
        yield steps


@pytest.mark.parametrize(
    ("model", "modes"),
    [
        (DENSE, (EAGER, CAPTURED, ASYNCHRONOUS)),
        (MIXTURE, (EAGER, ASYNCHRONOUS)),
        (RECURRENT, (EAGER, CAPTURED, ASYNCHRONOUS)),
    ],
    ids=["dense", "mixture", "recurrent"],
)
def test_graphs_and_asynchronous_steps_change_no_token(model, modes, tiny_model):
    folder, found = tiny_model(model[0], **model[1]), []
    for arguments in modes:
        with fake_cuda() as device:
            llm = loaded(folder, **arguments)
            with counted(device) as launches, steps_of(llm, device) as steps:
                found.append(tokens(llm))
            is_captured = llm.engine.facts["step"].startswith("decoding in CUDA graphs")
            assert is_captured == (arguments is not EAGER)
            assert launches.replays == 2 * is_captured
            # The host waits for the results of each step and, before a capture, for everything; it reads nothing else.
            assert launches.blocked == []
            assert launches.waits == Counter({"Event.synchronize": 3}) + Counter(
                ["torch.cuda.synchronize"] * is_captured
            )
            assert launches.to_host == 3
            if model is not RECURRENT:
                assert launches.to_device == (12 if arguments is ASYNCHRONOUS else 10)
                eager = STEP[model[0]]
                replayed = REPLAYED + TOKENS_OF_THE_STEP_BEFORE if arguments is ASYNCHRONOUS else REPLAYED
                assert steps[2].kernels == (eager if arguments is EAGER else replayed)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["plain", "drafts"])
def test_states_of_graphs_go_on_at_ends_of_pages(speculative_config, tiny_model):
    """With padding, states at the ends of pages, and verifications, which have no graphs, between graphs."""
    folder = tiny_model(RECURRENT[0], **RECURRENT[1])
    common = {"block_size": 4, "speculative_config": speculative_config}
    with fake_cuda():
        wanted = tokens(loaded(folder, block_size=4, **EAGER), 6)
    with fake_cuda() as device:
        llm = loaded(folder, compilation_config={"cudagraph_capture_sizes": [2]}, **common)
        if speculative_config:
            known = [[*one["prompt_token_ids"], *answer] for one, answer in zip(PROMPTS, wanted, strict=True)]
            replaying(llm, known, 0.4)
        with counted(device) as launches:
            assert tokens(llm, 6) == wanted
            assert tokens(llm, 6, PROMPTS[:1]) == wanted[:1]
        assert launches.blocked == []
        assert llm.engine.stats.drafts.accepted if speculative_config else launches.replays


def test_draft_tokens_change_no_token(tiny_model):
    folder = tiny_model(DENSE[0], **DENSE[1])
    with fake_cuda():
        wanted = tokens(loaded(folder, **EAGER), 5)
    with fake_cuda() as device:
        llm = loaded(folder, speculative_config=NGRAM)
        known = [[*one["prompt_token_ids"], *answer] for one, answer in zip(PROMPTS, wanted, strict=True)]
        replaying(llm, known, 0.2)
        with counted(device) as launches:
            assert tokens(llm, 5) == wanted
        assert planner_of(llm) and 0 < llm.engine.stats.drafts.accepted
        assert launches.replays and launches.blocked == []


@contextlib.contextmanager
def finds(kind: str) -> Iterator[None]:
    """The block, on a GPU of its own, ends with a fault of this kind."""
    with pytest.raises(CudaFault) as found, fake_cuda():
        yield
    assert found.value.kind == kind, found.value


@pytest.fixture
def small(tiny_model):
    """The dense model."""
    return tiny_model(DENSE[0], **DENSE[1])


def test_results_that_are_read_without_their_event_are_found(small, monkeypatch):
    def copies(*tensors):
        made = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        return lambda: made

    monkeypatch.setattr(sampling, "copies_on_host", copies)
    with finds("host read that no event guards"):
        tokens(loaded(small, **EAGER), 1)


def test_inputs_in_a_buffer_that_is_used_again_are_found(small, monkeypatch):
    """With asynchronous steps; otherwise the copy is over when the next step is built."""
    kept: dict[Any, torch.Tensor] = {}

    def reused(values, device):
        buffer = kept.setdefault((values.shape, values.dtype), values.pin_memory())
        return buffer.copy_(values).to(device, non_blocking=True)

    monkeypatch.setattr(runner, "on_device", reused)
    with fake_cuda():
        tokens(loaded(small, **CAPTURED), 3)
    kept.clear()
    with finds("pinned buffer overwritten while a copy from it was pending"):
        tokens(loaded(small, **ASYNCHRONOUS), 3)


def test_a_synchronization_in_a_captured_step_is_found(small, monkeypatch):
    compute = Decoder.compute

    def waiting(self, *args):
        torch.cuda.synchronize()
        return compute(self, *args)

    monkeypatch.setattr(Decoder, "compute", waiting)
    with finds("synchronization in a capture"):
        tokens(loaded(small, **CAPTURED), 2)


def test_a_value_that_every_layer_reads_is_found(small, monkeypatch):
    call = GatedMLP.__call__

    def reading(self, x):
        x.sum().item()
        return call(self, x)

    monkeypatch.setattr(GatedMLP, "__call__", reading)
    with fake_cuda() as device:
        llm = loaded(small, **EAGER)
        with counted(device) as launches:
            tokens(llm, 2)
        assert [name for name, _ in launches.blocked] == ["_local_scalar_dense"] * 2 * LAYERS
    with finds("synchronization in a capture"):
        tokens(loaded(small, **CAPTURED), 2)


def test_a_graph_that_does_not_wait_for_its_first_run_is_found(small, monkeypatch):
    monkeypatch.setattr(FakeStream, "wait_stream", lambda *_: None)
    with finds("accesses that no event orders"):
        tokens(loaded(small, **CAPTURED), 2)


def test_a_graph_whose_inputs_have_moved_is_found(small):
    with finds("graph uses memory that was freed"):
        llm = loaded(small, **CAPTURED)
        tokens(llm, 2)
        captured = llm.engine.executor.runner.captured
        captured._table = captured._table.clone()
        tokens(llm, 2)


def test_a_replay_beside_the_one_before_is_found(small, monkeypatch):
    call, streams = DecodeGraphs.__call__, []

    def elsewhere(self, step):
        streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[-1]):
            return call(self, step)

    with finds("accesses that no event orders"):
        llm = loaded(small, **CAPTURED)
        tokens(llm, 2)
        monkeypatch.setattr(DecodeGraphs, "__call__", elsewhere)
        tokens(llm, 2)
