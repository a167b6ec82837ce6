"""The correctness checks of ``make gpu``, each of which runs in a process of its own; see gpu.py."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "tinybooks")
PROMPTS = ["It was a dark night", "Alice was", "The old man said , `` I", "In the morning the sea"]
#: Nats between the two best tokens up to which devices may choose differently, because they sum in another order.
NEAR_TIE = 0.02


class NeedsGpuError(Exception):
    """The check needs a GPU; a rehearsal reports that."""


@dataclass(frozen=True)
class Machine:
    """The machine that a step runs on.

    device  cuda, or in a rehearsal cpu.
    """

    device: str

    @property
    def rehearsed(self) -> bool:
        return self.device != "cuda"

    def needs_gpu(self) -> None:
        """Raises NeedsGpuError in a rehearsal."""
        if self.rehearsed:
            raise NeedsGpuError


def describe(machine: Machine) -> dict:
    """Return the GPU and the versions of its software."""
    import torch
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    if machine.rehearsed:
        return {"gpu": "none: a rehearsal on the CPU"} | found
    return found | {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def family(name: str, machine: Machine) -> dict:
    """Check one family of Triton kernels against torch, as every load does."""
    import torch

    from aiakq.kernels.triton import self_test

    torch.manual_seed(0)
    verdict = self_test.examine(name, torch.device(machine.device))
    if verdict.failure is not None:
        raise AssertionError(f"{verdict.details}{verdict.failure}")
    return {"error": verdict.error}


def plain_kernels_agree(machine: Machine) -> dict:
    """Check that kernels with inline assembly equal their plain versions bit for bit."""
    from dataclasses import replace

    import torch

    from aiakq.kernels.tables import TABLES
    from aiakq.kernels.triton import configs, linear, linear_floats
    from aiakq.kernels.types import QWeight

    machine.needs_gpu()
    device, compared = torch.device("cuda"), 0
    small = [
        QWeight(
            "fp8a16",
            torch.randn(512, 2048).to(kind).view(torch.uint8),
            torch.rand(512, 16),
            group_size=128,
            code_type=kind,
        )
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2)
    ]
    codes, table = torch.randint(0, 16, (512, 2048), dtype=torch.uint8), torch.tensor(TABLES["e2m1"])
    powers, numbers = (
        torch.randint(-9, -4, (512, 64)).float().exp2(),
        torch.rand(512, 128).to(torch.float8_e4m3fn).float(),
    )
    small += [
        QWeight("lut4a16", codes, scales, group_size=2048 // scales.shape[1], table=table)
        for scales in (powers, numbers)
    ]
    for weight in (each.to(device) for each in small):
        for dtype in (torch.float16, torch.bfloat16):
            floats = linear_floats.pack(weight, weight.problem(dtype, device.type))
            for m in (1, 8, 16, 33, 64, 300):
                x = torch.randn(m, 2048, dtype=dtype, device=device)
                chosen = linear_floats.choose(floats, m)
                fast, plain = (linear_floats.run(x, floats, replace(chosen, plain=p)) for p in (False, True))
                assert torch.equal(fast, plain), (weight.scheme, weight.group_size, dtype, m)
                compared += 1
    for scheme, bits in (("w2a16", 2), ("w4a16", 4), ("w8a16", 8)):
        codes = torch.randint(0, 2**bits, (512, 2048), dtype=torch.uint8)
        weight = QWeight(scheme, codes, torch.rand(512, 16).half(), group_size=128).to(device)
        for dtype in (torch.float16, torch.bfloat16):
            state = linear.prepare(weight, weight.problem(dtype, device.type))
            for m in (1, 8, 16, 33, 64, 300):
                x = torch.randn(m, 2048, dtype=dtype, device=device)
                chosen = configs.choose("grouped", device, bits, 512, state.steps, m)
                fast, plain = (linear.run(x, state, replace(chosen, plain=p)) for p in (False, True))
                assert torch.equal(fast, plain), (scheme, dtype, m)
                compared += 1
    return {"equal": compared}


def reference_matches_the_cpu(machine: Machine) -> dict:
    """The reference of every scheme on the device against the same on the CPU."""
    import torch

    from aiakq.kernels.ops import linear_reference as reference
    from aiakq.kernels.types import QWeight

    worst = {}
    for scheme, bits in (("w4a16", 4), ("w8a16", 8), ("w8a8", 8)):
        group = 256 if scheme == "w8a8" else 64
        codes = torch.randint(0, 1 << bits, (96, 256), dtype=torch.uint8)
        scales = torch.rand(96, 256 // group) * 0.02
        x = torch.randn(5, 256)
        answers = []
        for device in ("cpu", machine.device):
            weight = QWeight(scheme, codes.to(device), scales.to(device), group_size=group)
            problem = weight.problem(torch.float32, device)
            answers.append(reference.prepare(weight, problem)(x.to(device)).cpu())
        worst[scheme] = ((answers[0] - answers[1]).norm() / answers[0].norm()).item()
    assert all(value < 1e-4 for value in worst.values()), worst
    return worst


def graphs_replay(machine: Machine) -> dict:
    """Products and decoding attention, also over latents, captured once and replayed on other inputs."""
    import torch

    from aiakq.kernels.triton import linear
    from aiakq.kernels.triton.attention import TritonAttention
    from aiakq.kernels.types import AttentionContext, AttentionSpec, QWeight

    machine.needs_gpu()
    device = torch.device("cuda")
    weight = QWeight("w4a16", torch.randint(0, 16, (1024, 1024), dtype=torch.uint8), torch.rand(1024, 8).half() / 32)
    weight.group_size = 128
    state = linear.prepare(weight.to(device), weight.problem(torch.bfloat16, device.type))
    attention = TritonAttention(AttentionSpec(8, 2, 128, 0.1))
    latent = TritonAttention(AttentionSpec(8, 1, 128, 0.1, value_dim=96, latent=True))
    latents = [torch.randn(64, 16, 1, 128, dtype=torch.bfloat16, device=device)]
    cache = [torch.randn(64, 16, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
    table = torch.arange(1, 33, dtype=torch.int32, device=device).view(4, 8)
    lengths = torch.tensor([5, 60, 100, 128], dtype=torch.int32, device=device)
    starts = torch.arange(5, dtype=torch.int32, device=device)
    context = AttentionContext(starts, lengths, lengths, table, 4, list(range(5)), lengths.tolist())
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=device)

    def compute() -> torch.Tensor:
        query = state(x).view(4, 8, 128)
        found = attention.attend(query, cache, context), latent.attend(query, latents, context)
        return torch.cat(found, dim=-1)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for seed in range(3):
        x.copy_(torch.randn(4, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, compute())
    return {"replays": 3}


def tokens_match_the_cpu(machine: Machine) -> dict:
    """Greedy fp32 tokens of the example model on both devices; they may differ only after a near tie."""
    import torch

    from aiakq import LLM, SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = False
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=2)
    answers: dict[str, list] = {}
    for device in ("cpu", machine.device):
        llm = LLM(model=MODEL, device=device, dtype="float32", gpu_memory_utilization=0.2)
        answers[device] = [r.outputs[0] for r in llm.generate(PROMPTS * 8, params, use_tqdm=False)]
        llm.engine.check()
    ties = sum(parts_at_a_tie(*pair) for pair in zip(answers["cpu"], answers[machine.device], strict=True))
    return {"equal": len(PROMPTS) * 8 - ties, "near_ties": ties}


def parts_at_a_tie(expected: Any, found: Any, near: float = NEAR_TIE) -> bool:
    """False if the answers are equal; raises AssertionError where they differ and it was no near tie."""
    for at, (ours, theirs) in enumerate(zip(expected.token_ids, found.token_ids, strict=False)):
        if ours != theirs:
            best, other = (expected.logprobs[at].get(token) for token in (ours, theirs))
            gap = None if best is None or other is None else best.logprob - other.logprob
            assert gap is not None and gap < near, f"token {at}: {ours} expected, {theirs} found, {gap} nats apart"
            return True
    assert len(expected.token_ids) == len(found.token_ids)
    return False


def asynchronous_scheduling_changes_no_token(machine: Machine) -> dict:
    """Answers of the example model, sampled in many ways, with asynchronous scheduling and without."""
    from aiakq import LLM, SamplingParams

    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.5},
        {"temperature": 0.7, "stop": ["the", "."], "min_tokens": 4},
    ]
    params = [SamplingParams(max_tokens=8 + n, seed=n, logprobs=1, **options[n % 4]) for n in range(32)]
    answers = []
    for ahead in (True, False):
        llm = LLM(
            model=MODEL, async_scheduling=ahead, device=machine.device, dtype="float32", gpu_memory_utilization=0.2
        )
        outputs = llm.generate(PROMPTS * 8, params, use_tqdm=False)
        llm.engine.check()
        answers.append([(r.outputs[0].token_ids, r.outputs[0].text, r.outputs[0].finish_reason) for r in outputs])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same == len(params), f"{same} of {len(params)} answers are equal"
    return {"equal": same}


def draft_tokens_change_no_answer(machine: Machine) -> dict:
    """Greedy fp32 answers of the example model with draft tokens, verified in CUDA graphs, and without; where they
    part, it must be at a near tie.
    """
    import torch

    from aiakq import LLM, SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = ["It was the best of times , it was the worst of times , it was the", *PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=96, logprobs=2, ignore_eos=True)
    arguments: dict[str, Any] = {"device": machine.device, "dtype": "float32", "gpu_memory_utilization": 0.2}
    plain = [r.outputs[0] for r in LLM(model=MODEL, **arguments).generate(prompts, params, use_tqdm=False)]
    found: dict[str, Any] = {}
    for method in ("ngram", "suffix"):
        config = {"method": method, "num_speculative_tokens": 4, "disable_by_batch_size": 1000}
        llm = LLM(model=MODEL, speculative_config=config, **arguments)
        drafted = [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.check()
        drafts = llm.engine.stats.drafts
        assert drafts.accepted, f"no draft token of {drafts.drafts} was accepted"
        ties = sum(parts_at_a_tie(*pair) for pair in zip(plain, drafted, strict=True))
        found[method] = {"equal": len(prompts) - ties, "near_ties": ties, "accepted": drafts.accepted}
    return found


def quantized_tokens(machine: Machine) -> dict:
    """The example model in 8 bits, by the kernels that serve it: how many greedy answers are those of the CPU."""
    import tempfile

    from aiakq import LLM, SamplingParams
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    params = SamplingParams(temperature=0, max_tokens=24)
    answers: dict[str, list[list[int]]] = {}
    facts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/out"
        quantize_checkpoint(QuantizeOptions(input=MODEL, output=output, method="weight_only_int8"))
        for device in ("cpu", machine.device):
            llm = LLM(model=output, device=device, dtype="bfloat16", gpu_memory_utilization=0.2)
            answers[device] = [r.outputs[0].token_ids for r in llm.generate(PROMPTS * 4, params, use_tqdm=False)]
            llm.engine.check()
            facts[device] = llm.engine.facts["linear layers"]
    # In 16 bits devices differ early and often: only most first tokens must be equal.
    pairs = list(zip(answers["cpu"], answers[machine.device], strict=True))
    same_start = sum(ours[:4] == theirs[:4] for ours, theirs in pairs)
    assert same_start >= len(pairs) / 2, f"{same_start} of {len(pairs)} answers begin alike"
    return {"equal": sum(ours == theirs for ours, theirs in pairs), "begin alike": same_start, "notes": facts}


def small_problems(machine: Machine) -> dict:
    """Run every kernel once on small shapes, for compute-sanitizer."""
    import gpu_speed
    import torch

    from aiakq.kernels.triton import self_test
    from aiakq.kernels.triton.attention import TritonAttention
    from aiakq.kernels.types import AttentionSpec, RotaryTables

    device = torch.device("cuda")
    for name in self_test.FAMILIES:
        assert self_test.examine(name, device).failure is None, name
    rotary = RotaryTables(*torch.randn(2, 9, 64, device=device))
    attention = TritonAttention(AttentionSpec(32, 8, 128, 0.1, 20, rotary))
    for stored in (torch.bfloat16, torch.int8, torch.float8_e5m2):
        for lengths, new in (([5, 40, 200], 1), ([33, 70], 7)):
            query, cache, context = gpu_speed.sequences(lengths, new, device, torch.bfloat16, stored)
            attention.attend(query, cache, context)
        query, cache, context = gpu_speed.sequences([3], 3, device, torch.bfloat16, stored)
        context.slots = torch.arange(16, 19, device=device)
        attention(torch.randn(3, 48 * 128, dtype=torch.bfloat16, device=device), context.slots - 16, cache, context)
    torch.cuda.synchronize()
    return {"kernels": "done"}
