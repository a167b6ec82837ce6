"""The engine as a state machine: random arrivals and aborts, few pages, values that are not finite."""

from __future__ import annotations

import random

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.attention import new_cache
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.executor import sampled_step, sampler
from aiakq.runtime.executor.local import LocalExecutor
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.protocol.command import Abort, ResetPrefixCache
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import OUT_OF_MEMORY
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NOTHING_LEFT

VOCAB = 50
PAGE = 4


class CountingModel:
    """A model whose next token is the sum of all tokens in the KV cache, modulo VOCAB.

    It is fast enough for thousands of steps, and every page that is lost, shared wrongly or overwritten changes the
    output.
    """

    row_multiple, short_start = 4, 0
    vocab_size = VOCAB

    def __init__(self) -> None:
        self.poison: int | None = None
        self.sampler = Ops(torch.device("cpu"), torch.float32).sampler()

    def kv_bytes_per_token(self, dtype):
        return 2 * dtype.itemsize

    def state_bytes(self):
        return 0

    def mixture_elements(self):
        return 0

    def new_caches(self, pages, page_size, state_rows=1):
        spec = AttentionSpec(1, 1, 1, 1.0)
        return [new_cache(spec.problem(torch.float32, torch.float32, "cpu"), pages, page_size, torch.device("cpu"))]

    def forward(self, step, caches):
        keys, _ = caches[0]
        context = step.context
        keys.view(-1)[context.slots] = step.token_ids.float()
        starts = context.query_start_list
        logits = torch.zeros(len(step.token_ids), VOCAB)
        for s in range(len(starts) - 1):
            flat = keys[context.page_table[s].long()].view(-1)
            for row in range(starts[s], starts[s + 1]):
                seen = flat[: int(step.positions[row]) + 1]
                logits[row, int(seen.sum()) % VOCAB] = 1.0
                if self.poison is not None and self.poison in seen:
                    logits[row] = float("nan")
        return logits[step.logit_rows]


def make_engine(num_pages=12, max_num_seqs=4, budget=16, chunked=True, caching=True, ahead=False, **rules) -> Engine:
    model = CountingModel()
    runner = Runner(model, num_pages, PAGE, torch.device("cpu"))
    pool = PagePool(num_pages, PAGE, caching)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, enable_chunked_prefill=chunked, **rules
    )
    scheduler = Scheduler(pool, config)
    limits = ModelLimits(VOCAB, max_model_len=64, max_kv_tokens=pool.num_usable * PAGE, by_priority=True)
    executor = LocalExecutor(runner, max_num_seqs + 1, num_pages)
    return Engine(executor, scheduler, limits, {}, 2 if ahead else 1)


def model_of(engine: Engine) -> CountingModel:
    return engine.executor.runner.model


def spec(id: str, prompt: list[int], max_tokens: int, priority: int = 0, **sampling) -> RequestSpec:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
    return RequestSpec(id, prompt, params, max_tokens=max_tokens, seed=0, options=RequestOptions(priority=priority))


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_loses_and_mixes_nothing(seed, ahead):
    draw = random.Random(seed)
    engine = make_engine(
        num_pages=draw.choice([9, 12, 40]),
        max_num_seqs=draw.choice([1, 3, 8]),
        budget=draw.choice([3, 16, 64]),
        caching=draw.random() < 0.7,
        max_num_partial_prefills=draw.choice([1, 1, 3]),
        long_prompt_tokens=draw.choice([0, 6]),
        long_prefill_token_threshold=draw.choice([0, 5]),
        scheduler_delay_factor=draw.choice([0.0, 0.0, 0.5]),
        ahead=ahead,
    )
    by_priority = draw.random() < 0.5
    engine.scheduler.min_columns = draw.choice([1, 1, 3, 16])
    shared = [draw.randrange(VOCAB) for _ in range(12)]
    live: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    specs: dict[str, RequestSpec] = {}
    ended: dict[str, str] = {}
    for now in range(3000):
        inbox: list[RequestSpec | Abort] = []
        if now < 150 and draw.random() < 0.5:
            own = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 9))]
            prompt = shared + own if draw.random() < 0.5 else own
            request = spec(f"r{now}", prompt, draw.randrange(1, 11), draw.randrange(-2, 3) if by_priority else 0)
            inbox.append(request)
            specs[request.request_id], answers[request.request_id] = request, []
            live[request.request_id] = prompt
        if live and draw.random() < 0.08:
            inbox.append(Abort([draw.choice([*live, "unknown"])]))
        out = engine.step(float(now), inbox)
        engine.check()
        for news in out.all_outputs():
            assert news.request_id not in ended, "news after the end"
            answers[news.request_id] += news.token_ids
            if news.finish_reason:
                ended[news.request_id] = news.finish_reason
                del live[news.request_id]
        if now >= 150 and not engine.has_work():
            break
    assert not live, "every request ends"
    for id, request in specs.items():
        full = expected(request.prompt_token_ids, request.max_tokens)
        if ended[id] == "length":
            assert answers[id] == full
        else:
            assert ended[id] == "abort"
            assert answers[id] == full[: len(answers[id])]
    assert engine.stats.num_free_pages == engine.stats.num_pages
    assert engine.stats.generation_tokens == sum(map(len, answers.values()))


def test_same_inbox_gives_the_same_outputs():
    def run():
        engine = make_engine()
        outs = [engine.step(0.0, [spec("a", [1, 2, 3], 5), spec("b", [4] * 9, 3)])]
        while engine.has_work():
            outs.append(engine.step(float(len(outs)), []))
        return outs

    assert run() == run()


def test_only_the_request_that_overflows_fails():
    engine = make_engine()
    model_of(engine).poison = 49
    outs = engine.step(0.0, [spec("good", [1, 2], 6), spec("bad", [49, 2, 3, 4, 5], 6)]).outputs
    news = {}
    for _ in range(10):
        for output in outs:
            news.setdefault(output.request_id, []).append(output)
        outs = engine.step(1.0, []).outputs
    assert news["bad"][-1].finish_reason == "error" and "finite" in news["bad"][-1].error
    assert [t for n in news["good"] for t in n.token_ids] == expected([1, 2], 6)
    assert engine.stats.num_free_pages == engine.stats.num_pages
    # The next request with the same prefix does not get the pages of the failed one.
    model_of(engine).poison = None
    tokens = engine.step(2.0, [spec("again", [49, 2, 3, 4, 5], 1)]).outputs
    assert tokens[0].token_ids == expected([49, 2, 3, 4, 5], 1)
    assert tokens[0].num_cached_tokens == 0


def test_a_score_that_is_not_a_number_fails_its_request():
    """No token is sampled, so no other check would find it."""
    engine = make_engine(num_pages=40, budget=8)
    model_of(engine).poison = 49
    scored = spec("bad", [1] * 10 + [49] + [1] * 9, 0, prompt_logprobs=0)
    news = []
    for now in range(4):
        news += engine.step(float(now), [scored, spec("good", [1, 2], 2)] if now == 0 else []).outputs
    (failure,) = [one for one in news if one.request_id == "bad"]
    assert failure.finish_reason == "error" and "finite" in failure.error
    assert [token for one in news if one.request_id == "good" for token in one.token_ids] == expected([1, 2], 2)


def test_a_request_that_leaves_no_token_does_not_empty_the_cache():
    """Its pages are valid; other requests still find them."""
    engine = make_engine(num_pages=40, budget=32)
    run_all(engine, [spec("a", [1] * 9, 1)])
    nothing = spec("b", [1] * 9, 5, allowed_token_ids=[9], stop_token_ids=[9], min_tokens=3)
    (output,) = run_all(engine, [nothing])["b"]
    assert (output.error, output.num_cached_tokens) == (NOTHING_LEFT, 8)
    assert run_all(engine, [spec("c", [1] * 9, 1)])["c"][0].num_cached_tokens == 8


def run_all(engine: Engine, inbox: list) -> dict[str, list]:
    """Run until there is no more work; return all outputs by request."""
    news: dict[str, list] = {}
    for now in range(200):
        for one in engine.step(float(now), inbox if now == 0 else []).outputs:
            news.setdefault(one.request_id, []).append(one)
        engine.check()
        if not engine.has_work():
            break
    assert engine.stats.num_free_pages == engine.stats.num_pages
    return news


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_a_step_that_does_not_fit_into_memory_is_run_in_halves(ahead, where, monkeypatch):
    engine = make_engine(num_pages=80, max_num_seqs=8, budget=64)
    engine.max_pending_steps = 2 if ahead else 1
    sizes = []

    def limited(inner, size):
        def call(*arguments):
            sizes.append(size(arguments))
            if sizes[-1] > 11:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return inner(*arguments)

        return call

    if where == "forward":
        counted = limited(model_of(engine).forward, lambda arguments: arguments[0].context.query_start_list[-1])
        monkeypatch.setattr(model_of(engine), "forward", counted)
    else:
        counted = limited(sampler.sample, lambda arguments: sum(row.position for row in arguments[2]))
        monkeypatch.setattr(sampled_step, "sample", counted)
    prompts = [[1], [2, 3, 4], [5] * 9, [6] * 12, [7] * 2, [8] * 4]
    news = run_all(engine, [spec(f"r{at}", prompt, 2) for at, prompt in enumerate(prompts)])
    for at, prompt in enumerate(prompts):
        outputs = news[f"r{at}"]
        if len(prompt) > 11:
            assert (outputs[-1].finish_reason, outputs[-1].error) == ("error", OUT_OF_MEMORY)
        else:
            assert [token for one in outputs for token in one.token_ids] == expected(prompt, 2)
    assert max(sizes) > 11 and engine.stats.generation_tokens == 10


def test_memory_that_runs_out_is_recognized():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(failure.value) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_that_computes_nothing_finite_any_more_ends_the_engine(ahead):
    engine = make_engine()
    engine.max_pending_steps = 2 if ahead else 1
    model_of(engine).poison = 0  # the engine's own request has a token 0
    with pytest.raises(AiakqError) as failure:
        for now in range(9):
            engine.step(float(now), [spec(f"r{now}", [0, 1], 3)])
    assert failure.value.id == "model_broken"


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_that_all_overflow_do_not_end_the_engine(ahead):
    engine = make_engine()
    engine.max_pending_steps = 2 if ahead else 1
    model_of(engine).poison = 49
    for now in range(9):
        engine.step(float(now), [spec(f"r{now}", [49, 1], 3), spec(f"s{now}", [49, 2], 3)])
    news = run_all(engine, [spec("good", [1, 2], 4)])["good"]
    assert [token for one in news for token in one.token_ids] == expected([1, 2], 4)


def test_long_prompts_do_not_stall_running_answers():
    engine = make_engine(num_pages=40, budget=8)
    engine.step(0.0, [spec("short", [1], 20)])
    engine.step(1.0, [spec("long", [2] * 30, 1)])
    for now in range(2, 5):
        ids = [news.request_id for news in engine.step(float(now), []).outputs]
        assert "short" in ids, "a running answer gets a token in every step"


def test_preempted_request_goes_first_and_repeats_nothing():
    engine = make_engine(num_pages=6, max_num_seqs=4, budget=32, caching=False)
    outs = engine.step(0.0, [spec("old", [1] * 7, 8), spec("young", [2] * 7, 8)]).outputs
    got: dict[str, list[int]] = {"old": [], "young": []}
    while True:
        for news in outs:
            got[news.request_id] += news.token_ids
        if not engine.has_work():
            break
        outs = engine.step(1.0, []).outputs
        engine.check()
    assert engine.stats.preemptions >= 1
    assert got == {"old": expected([1] * 7, 8), "young": expected([2] * 7, 8)}


def test_times_come_from_the_caller():
    engine = make_engine()
    out = engine.step(10.0, [spec("a", [1] * 20, 2)])
    assert out.outputs == []
    out = engine.step(11.0, [])
    times = out.outputs[0].times
    assert (times.arrived, times.scheduled, times.first_token) == (10.0, 10.0, 11.0)
    assert engine.step(12.0, []).outputs[0].times.last_token == 12.0


def finished(engine: Engine, inbox: list, steps: int = 400) -> list[str]:
    """Return the ids of all requests in ``inbox`` in the order in which they finish."""
    order: list[str] = []
    for now in range(steps):
        for news in engine.step(float(now), inbox if now == 0 else []).outputs:
            if news.finish_reason:
                order.append(news.request_id)
        engine.check()
        if not engine.has_work():
            return order
    raise AssertionError("it does not end")


def test_a_lower_priority_number_is_served_first_then_arrival():
    requests = [("a", 5), ("b", -1), ("c", 5), ("d", 0)]
    inbox = [spec(id, [7, 7], 3, priority) for id, priority in requests]
    assert finished(make_engine(max_num_seqs=1), inbox) == ["b", "d", "a", "c"]
    inbox = [spec(id, [7, 7], 3) for id, _ in requests]
    assert finished(make_engine(max_num_seqs=1), inbox) == ["a", "b", "c", "d"]


def test_what_gives_up_its_pages_has_the_highest_priority_number():
    engine = make_engine(num_pages=6, budget=32, caching=False)
    engine.step(0.0, [spec("last", [1] * 7, 8, priority=9), spec("first", [2] * 7, 8, priority=1)])
    preempted = {}
    while engine.has_work():
        for news in engine.step(1.0, []).outputs:
            preempted[news.request_id] = news.num_preemptions
        engine.check()
    assert preempted["first"] == 0 and preempted["last"] >= 1


def test_a_long_prompt_gets_no_more_than_its_part_of_a_step():
    engine = make_engine(num_pages=40, budget=32, long_prompt_tokens=8, long_prefill_token_threshold=8)
    engine.step(0.0, [spec("long", [2] * 30, 1)])
    assert engine.stats.num_scheduled_tokens == 8
    engine.step(1.0, [spec("short", [1] * 5, 9)])
    assert engine.stats.num_scheduled_tokens == 8 + 5, "what it leaves, others get"


def test_prompts_run_together_and_short_ones_overtake_long_ones():
    def news_after(steps: int, **rules) -> set[str]:
        engine = make_engine(num_pages=60, budget=12, **rules)
        inbox = [spec("long", [2] * 40, 1), spec("longer", [3] * 44, 1), spec("short", [1] * 6, 1)]
        seen = set()
        for now in range(steps):
            seen |= {news.request_id for news in engine.step(float(now), inbox if now == 0 else []).outputs}
        return seen

    assert news_after(3) == set(), "one after the other: the first prompt takes four steps"
    assert news_after(3, max_num_partial_prefills=2, max_long_partial_prefills=1, long_prompt_tokens=8) == {"short"}
    assert news_after(3, max_num_partial_prefills=2, max_long_partial_prefills=2, long_prompt_tokens=8) == set(), (
        "two long ones share every step"
    )


def test_waiting_prompts_gather_for_a_multiple_of_the_last_prompts_time():
    def first_news(factor: float) -> float:
        engine = make_engine(num_pages=40, scheduler_delay_factor=factor)
        engine.step(0.0, [spec("a", [1] * 4, 30)])
        engine.step(10.0, [])  # the step with the prompt took ten seconds
        for now in range(11, 40):
            inbox = [spec("b", [2] * 4, 2)] if now == 11 else []
            if any(news.request_id == "b" for news in engine.step(float(now), inbox).outputs):
                return now
        raise AssertionError

    assert first_news(0.0) == 11
    assert first_news(0.5) == 17, "five seconds after its arrival, and not earlier"
    engine = make_engine(num_pages=40, scheduler_delay_factor=0.5)
    engine.step(0.0, [spec("a", [1] * 4, 1)])
    engine.step(1000.0, [spec("b", [2] * 4, 9)])  # idle meanwhile: no step took a thousand seconds
    engine.step(1001.0, [spec("c", [3] * 4, 9)])
    assert "c" in [news.request_id for news in engine.step(1002.0, []).outputs]
    engine = make_engine(num_pages=40, scheduler_delay_factor=1e9)
    assert engine.step(0.0, [spec("a", [1] * 4, 2)]).outputs, "an idle engine delays a prompt"


def test_a_reset_prefix_cache_has_no_hits_and_does_not_affect_running_sequences():
    engine = make_engine(num_pages=40, budget=32)
    engine.step(0.0, [spec("a", [1] * 9, 20)])
    engine.step(1.0, [ResetPrefixCache(), spec("b", [1] * 9, 1)])
    assert engine.stats.prefix_hits == 0
    got = finished(engine, [spec("c", [1] * 9, 1)])
    assert set(got) == {"a", "c"} and engine.stats.prefix_hits == 8
