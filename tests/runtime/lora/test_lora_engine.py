"""LoRA adapters in the engine: exactness in batches, prefixes, memory, failures, and ranks."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import adapted, save_adapter, store_of
from replay_proposer import replaying
from safetensors.torch import load_file, save_file

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.build.new_runner import fitting_pages
from aiakq.runtime.distributed import child_ranks
from aiakq.runtime.executor import kv_cache
from aiakq.runtime.lora.requests import check_adapter
from aiakq.runtime.lora.resource import AdapterResource
from aiakq.runtime.lora.store import read
from aiakq.runtime.protocol.command import DropAdapter, PrepareAdapter, UnloadAdapter
from aiakq.runtime.protocol.step import StepBatch

NUM_ADAPTERS = 5
#: How the engine is driven; every mode gives the same tokens and log-probabilities.
MODES: dict[str, dict[str, Any]] = {
    "all at once": {"max_loras": 8},
    "two at a time": {"max_loras": 2},
    "one in memory": {"max_loras": 1},
    "chunked": {"max_loras": 3, "max_num_batched_tokens": 13},
    "preempted": {"max_loras": 3, "num_gpu_blocks_override": 30, "block_size": 4},
    "one step ahead": {"max_loras": 3, "async_scheduling": True},
    "operation by operation": {"max_loras": 3, "enforce_eager": True},
    "speculation": {"max_loras": 8, "speculative_model": "[ngram]"},
}


def tiny_llama_with(folder, seed: int, **fields: Any):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return adapted(model, seed=seed, **fields)


@pytest.fixture(scope="module")
def base(tiny_model):
    return tiny_model("LlamaForCausalLM")


@pytest.fixture(scope="module")
def requests(base, tmp_path_factory) -> list[LoRARequest | None]:
    """No adapter, and NUM_ADAPTERS of different ranks and modules."""
    made: list[LoRARequest | None] = [None]
    for number in range(NUM_ADAPTERS):
        targets = "all-linear" if number % 2 else ["q_proj", "up_proj"]
        model = tiny_llama_with(base, number, r=1 + 3 * number, use_dora=number == 3, target_modules=targets)
        path = save_adapter(model, tmp_path_factory.mktemp("adapter"))
        made.append(LoRARequest(f"adapter {number}", number + 1, str(path)))
    return made


def engine(base, **arguments: Any) -> LLM:
    given = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 200, "enable_lora": True}
    return LLM(str(base), **{**given, **arguments})


def prompts(count: int = 18) -> list[list[int]]:
    draw = random.Random(3)
    shared = [draw.randrange(3, 320) for _ in range(35)]
    own = [[draw.randrange(3, 320) for _ in range(draw.choice([1, 5, 16, 40]))] for _ in range(count)]
    return [shared + each if index % 3 == 0 else each for index, each in enumerate(own)]


def answers(llm: LLM, given: list[list[int]], adapters: list[LoRARequest | None], tokens: int = 10) -> list[Any]:
    """Tokens and log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": each} for each in given], params, False, lora_request=adapters)
    return [
        [(token, each[token].logprob) for token, each in zip(out.token_ids, out.logprobs, strict=True)]
        for out in (result.outputs[0] for result in results)
    ]


@pytest.fixture(scope="module")
def chosen(requests) -> list[LoRARequest | None]:
    return [requests[index % len(requests)] for index in range(len(prompts()))]


@pytest.fixture(scope="module")
def alone(base, chosen) -> list[Any]:
    """Every prompt by itself, in an engine that has seen no other adapter."""
    found = []
    for prompt, adapter in zip(prompts(), chosen, strict=True):
        llm = engine(base) if adapter is not None else engine(base, enable_lora=False)
        found += answers(llm, [prompt], [adapter])
    return found


@pytest.mark.parametrize("mode", MODES)
def test_outputs_in_a_batch_of_adapters_equal_requests_run_alone(mode, base, chosen, alone, behind_bytes):
    llm = behind_bytes(engine(base, **MODES[mode]))
    for _ in range(2):  # the second time from the prefix cache, and with adapters that were evicted
        assert answers(llm, prompts(), chosen) == alone
    llm.engine.check()
    assert mode != "preempted" or llm.engine.stats.preemptions > 0


@pytest.mark.parametrize("mistakes", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["all at once", "two at a time", "chunked", "preempted", "one step ahead"])
def test_draft_tokens_change_nothing_with_adapters(mode, mistakes, base, chosen, alone):
    """Steps mix rows of several adapters and of none, with draft tokens of every length."""
    config = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 1000}
    llm = engine(base, speculative_config=config, **MODES[mode])
    pairs = zip(prompts(), alone, strict=True)
    replaying(llm, [prompt + [token for token, _ in answer] for prompt, answer in pairs], mistakes)
    for _ in range(2):
        assert answers(llm, prompts(), chosen) == alone
    drafts = llm.engine.stats.drafts
    assert drafts.accepted > 40 and (drafts.accepted < drafts.drafts or not mistakes)
    assert mode != "preempted" or llm.engine.stats.preemptions > 0


def test_sixteen_adapters_and_base_rows_share_steps(base, tmp_path):
    """Each of 16 adapters, two rows of every one, and base rows between them: all as alone."""
    chosen: list[LoRARequest | None] = []
    for number in range(16):
        model = tiny_llama_with(base, 100 + number, r=1 + number, target_modules="all-linear")
        request = LoRARequest(f"a{number}", number + 1, str(save_adapter(model, tmp_path / str(number))))
        chosen += [request, None, request]
    given = [[3 + (7 * index + at) % 300 for at in range(1 + index % 20)] for index in range(len(chosen))]
    llm = engine(base, max_loras=16, max_num_seqs=64, enable_prefix_caching=False)
    together = answers(llm, given, chosen, 4)
    assert llm.engine.scheduler.resource(AdapterResource).pool.num_resident == 16
    for index in (*range(0, 48, 3), 47):
        assert answers(llm, [given[index]], [chosen[index]], 4) == [together[index]]
    rows = [index for index, adapter in enumerate(chosen) if adapter is None]
    plain = answers(engine(base, enable_lora=False), [given[index] for index in rows], [None] * len(rows), 4)
    assert plain == [together[index] for index in rows]


def test_grammars_are_enforced_with_adapters(base, requests):
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=1, structured_outputs={"regex": "[0-9]{6}"}),
        SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True),
    ]
    chosen = [requests[index % 4] for index in range(8)]
    given = [{"prompt_token_ids": [5 + index] * 20} for index in range(8)]

    def run(llm: LLM, indices: list[int]) -> list[Any]:
        own = [params[index % 2] for index in indices]
        results = llm.generate(
            [given[index] for index in indices], own, False, lora_request=[chosen[index] for index in indices]
        )
        return [(result.outputs[0].text, result.outputs[0].cumulative_logprob) for result in results]

    llm = engine(base, max_loras=2)
    together = run(llm, list(range(8)))
    assert all(text.isdigit() and len(text) == 6 for text, _ in together[::2])
    assert together == [run(llm, [index])[0] for index in range(8)]


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["two ranks", "two stages"]
)
def test_ranks_give_the_same_bits(ranks, base, chosen, alone):
    llm = engine(base, max_loras=3, **ranks)
    assert answers(llm, prompts(), chosen) == alone


#: In another rank, an adapter that a step has to read fails the rank.
READS_AHEAD = """
import threading
from aiakq.runtime.lora import store
read = store.read
def ahead(adapter):
    assert threading.current_thread().name.startswith("staging"), "a step reads an adapter"
    return read(adapter)
store.read = ahead
from aiakq.runtime.build.rank_process import main; main()
"""


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["two ranks", "two stages"]
)
def test_no_rank_reads_adapters_in_a_step(ranks, base, requests, monkeypatch):
    monkeypatch.setattr(child_ranks, "_CODE", READS_AHEAD)
    llm, single = engine(base, max_loras=1, max_num_seqs=2, **ranks), engine(base)
    given, chosen = [[5 + index] * 20 for index in range(9)], [requests[1 + index % 3] for index in range(9)]
    assert answers(llm, given, chosen) == answers(single, given, chosen)
    assert store_of(llm).staging.keys == []
    dropped = llm._adapters.of(requests[4])
    llm.engine.executor.prepare(PrepareAdapter(dropped)).result(120)
    llm.engine.executor.submit(StepBatch(commands=[DropAdapter(dropped)]))
    assert answers(llm, given[:1], [requests[4]]) == answers(single, given[:1], [requests[4]])


def test_a_folder_that_a_link_has_replaced_since_the_check_is_not_read(base, requests, tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    path = shutil.copytree(requests[1].lora_path, root / "mine")
    llm = engine(base, max_loras=2)
    ref = check_adapter("mine", path, llm.engine.limits.adapters, root)
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(AiakqError) as caught:
        read(ref)
    assert caught.value.id == "adapter_changed"
    with pytest.raises(AiakqError) as caught:
        check_adapter("mine", path, llm.engine.limits.adapters, root)
    assert caught.value.id == "adapter_outside_root"


def test_prefixes_are_shared_by_requests_of_the_same_adapter_only(base, requests):
    prompt = [7] * 40
    llm = engine(base, max_loras=3)
    params = SamplingParams(temperature=0, max_tokens=2)
    cached = []
    for adapter in (requests[1], requests[2], None, requests[1], None):
        (result,) = llm.generate({"prompt_token_ids": prompt}, params, False, lora_request=adapter)
        cached.append(result.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32]


def test_the_same_adapter_under_two_names_is_one(base, requests, tmp_path):
    shutil.copytree(requests[1].lora_path, tmp_path / "copy")
    copy = LoRARequest("another name", 99, str(tmp_path / "copy"))
    llm = engine(base)
    first, second = answers(llm, [[5] * 20] * 2, [requests[1], copy])
    assert first == second and llm.engine.scheduler.resource(AdapterResource).pool.num_resident == 1


def test_a_folder_with_new_contents_is_another_adapter(base, requests, tmp_path):
    path = shutil.copytree(requests[1].lora_path, tmp_path / "adapter")
    request = LoRARequest("mine", 1, str(path))
    llm, prompt = engine(base, max_cpu_loras=3), [9] * 40
    first = answers(llm, [prompt], [request])
    shutil.copytree(requests[2].lora_path, path, dirs_exist_ok=True)
    second = answers(llm, [prompt], [request])
    assert first == answers(llm, [prompt], [requests[1]]) and second == answers(llm, [prompt], [requests[2]])
    assert first != second


def test_files_that_change_after_the_check_fail_their_requests_only(base, requests, tmp_path):
    path = shutil.copytree(requests[1].lora_path, tmp_path / "adapter")
    llm = engine(base, max_loras=2)
    ref = llm._adapters.of(LoRARequest("mine", 1, str(path)))
    shutil.rmtree(path)
    llm._adapters._checked[("mine", str(path))] = ([None, None], ref)
    params = SamplingParams(temperature=0, max_tokens=3)
    given = [{"prompt_token_ids": [5] * 40}] * 3
    mine = LoRARequest("mine", 1, str(path))
    lost, kept, plain = llm.generate(given, params, False, lora_request=[mine, requests[2], None])
    assert lost.error.startswith("its adapter cannot be loaded: There is no adapter at")
    assert not kept.error and not plain.error and len(kept.outputs[0].token_ids) == 3
    llm.engine.check()


def test_numbers_that_are_not_finite_fail_their_requests_only(base, requests, tmp_path):
    path = shutil.copytree(requests[1].lora_path, tmp_path / "adapter")
    tensors = load_file(path / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, path / "adapter_model.safetensors")
    llm, params = engine(base, max_loras=2), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    given = [{"prompt_token_ids": [5] * 40}] * 3
    chosen = [LoRARequest("planted", 1, str(path)), requests[2], None]
    lost, *others = llm.generate(given, params, False, lora_request=chosen)
    assert "not finite" in lost.error and not lost.outputs[0].token_ids
    assert all(not other.error and len(other.outputs[0].token_ids) == 3 for other in others)


def test_unloading_gives_the_memory_back(base, requests):
    llm = engine(base, max_cpu_loras=4)
    answers(llm, [[5] * 9] * 2, [requests[1], requests[2]])
    store = store_of(llm)
    assert len(store.nbytes) == 2 and min(store.nbytes.values()) > 1000
    for request in requests[1:3]:
        llm.engine.step(0.0, [UnloadAdapter(llm._adapters.of(request).key)])
    answers(llm, [[5] * 9], [None])
    assert not store.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_may_be_stored_in_fewer_bits(dtype, base, requests):
    whole, fewer = engine(base), engine(base, lora_dtype=dtype)
    first, second = (answers(llm, [[5] * 30], [requests[2]])[0] for llm in (whole, fewer))
    assert first[0][1] == pytest.approx(second[0][1], abs=0.05) and first != second
    bytes_of = [next(iter(store_of(llm).nbytes.values())) for llm in (whole, fewer)]
    assert bytes_of[1] < 0.6 * bytes_of[0]


def test_numbers_that_do_not_fit_into_the_dtype_fail_their_requests_only(base, requests, tmp_path):
    path = shutil.copytree(requests[1].lora_path, tmp_path / "adapter")
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({name: tensor * 1e7 for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    llm, params = engine(base, max_loras=2, lora_dtype="float16"), SamplingParams(temperature=0, max_tokens=2)
    given = [{"prompt_token_ids": [5] * 9}] * 2
    lost, kept = llm.generate(given, params, False, lora_request=[LoRARequest("large", 1, str(path)), requests[2]])
    assert "too large for float16" in lost.error and not kept.error


def refusal(llm: LLM, request: LoRARequest) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        llm.generate({"prompt_token_ids": [5]}, use_tqdm=False, lora_request=request)
    return caught.value


def test_an_adapter_that_does_not_fit_is_refused_before_anything_runs(base, requests, tiny_model, tmp_path):
    llm = engine(base, max_lora_rank=8, max_lora_bytes=100_000)
    assert refusal(llm, requests[5]).id == "adapter_rank"
    assert refusal(llm, LoRARequest("nowhere", 1, "/no/such/folder")).id == "adapter_missing"
    other = tiny_llama_with(tiny_model("OPTForCausalLM"), 0, r=2, target_modules=["fc1"])
    problem = refusal(llm, LoRARequest("opt", 1, str(save_adapter(other, tmp_path / "opt"))))
    assert problem.id == "adapter_mismatch" and "fc1" in str(problem) and "similar names" in str(problem)
    wide = tiny_llama_with(tiny_model("LlamaForCausalLM", hidden_size=64), 0, r=2, target_modules=["q_proj"])
    problem = refusal(llm, LoRARequest("wide", 1, str(save_adapter(wide, tmp_path / "wide"))))
    assert problem.id == "adapter_mismatch" and "64 inputs" in str(problem)
    assert refusal(engine(base, max_lora_bytes=50), requests[1]).id == "adapter_size"
    assert refusal(engine(base, enable_lora=False), requests[1]).id == "lora_disabled"
    assert answers(llm, [[5]], [requests[1]])


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_loras": 3, "max_cpu_loras": 2},
        {"model_impl": "transformers"},
        {"tensor_parallel_size": 2, "tensor_parallel_math": "fast"},
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, base):
    with pytest.raises(AiakqError) as caught:
        engine(base, **arguments)
    assert caught.value.id == "option_conflict"


def test_memory_for_adapters_is_kept_free(base, monkeypatch):
    llm = engine(base, max_cpu_loras=3)
    model, config = llm.engine.executor.runner.model, llm.config
    config = replace(config, cache=replace(config.cache, num_gpu_blocks_override=None))
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 6 << 20)
    inputs_and_outputs = 2 * (128 * 4 + 128 + 64 * 2 + 128 + 256 * 3 + 128 * 3) + 128 + 320
    outputs = 2 * (128 + 64 * 2 + 128 + 256 * 2 + 128) + 320
    largest = 4 * 16 * inputs_and_outputs + 8 * outputs
    scheduler = config.scheduler
    assert scheduler.lora.max_staged == 2
    # Three that are loaded, two that are staged, and the file that is being read.
    adapters = model.adapters
    assert adapters.reserved_bytes(torch.device("cpu"), 1) == (3 + 2 + 1) * largest
    assert adapters.reserved_bytes(torch.device("cuda"), 1) == 3 * largest
    assert fitting_pages(config, model) < kv_cache.count_pages(config, model)
    fixed = replace(adapters, config=replace(scheduler.lora, max_bytes=1000))
    assert fixed.reserved_bytes(torch.device("cpu"), 1) == 3 * 1000
    assert replace(scheduler.lora, max_loras=9).max_staged == 4


def test_the_reserve_covers_what_adapters_take(base, requests):
    """An adapter with DoRA and one of the largest rank."""
    chosen = [requests[4], requests[5]]
    for dtype in ("auto", "float32", "float16"):
        llm = engine(base, max_loras=2, max_lora_rank=13, lora_dtype=dtype)
        answers(llm, [[5] * 9] * 2, chosen, 1)
        store = store_of(llm)
        assert len(store.nbytes) == 2
        assert max(store.nbytes.values()) <= llm.engine.executor.runner.model.adapters.largest_bytes
        files = [llm._adapters.of(each).nbytes for each in chosen]
        assert sum(store.nbytes.values()) <= 1.1 * sum(files) * (0.5 if dtype == "float16" else 1)


def test_models_whose_layers_were_scaled_by_unknown_factors_are_refused(base, tmp_path):
    raw = json.loads((Path(base) / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for file in Path(base).glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    with pytest.raises(AiakqError, match="quantized by awq.* scaled inputs.*do not say.*merge"):
        engine(tmp_path)


def test_adapters_that_torch_computes_are_not_recorded(base, requests, monkeypatch):
    monkeypatch.setenv("AIAKQ_KERNELS", "cpu,lora=torch")
    llm = engine(base)
    assert llm.engine.facts["step"].startswith("operation by operation (lora is implemented by torch")
    first, second = answers(llm, [[5] * 20] * 2, [requests[1], None])
    monkeypatch.undo()
    wanted, without = answers(engine(base), [[5] * 20] * 2, [requests[1], None])
    assert [token for token, _ in first] == [token for token, _ in wanted] and second == without


def test_the_start_up_table_names_the_limits(base):
    assert engine(base).engine.facts["LoRA adapters"] == "up to 1 in a step, 1 in memory, of rank up to 16"


@pytest.mark.parametrize("method", ["weight_only_int8", "gptq"])
def test_a_quantized_base_gives_what_its_dequantized_weights_give(method, base, requests, tmp_path):
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    calibration = {} if method == "weight_only_int8" else {"calibration": str(text), "samples": 4, "seqlen": 64}
    quantize_checkpoint(
        QuantizeOptions(input=str(base), output=str(tmp_path / "q"), method=method, evaluate=False, **calibration)
    )
    chosen: list[LoRARequest | None] = [requests[1], requests[4], None]
    found, dense = (
        answers(engine(tmp_path / "q", max_loras=2, cpu_math="exact", dequantize=how), [[5] * 20] * 3, chosen, 1)
        for how in ("never", "always")
    )
    for one, other in zip(found, dense, strict=True):
        assert one[0][0] == other[0][0] and one[0][1] == pytest.approx(other[0][1], abs=1e-3)
    assert len({answer[0][1] for answer in found}) == 3
