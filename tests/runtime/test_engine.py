"""The engine as a state machine: random arrivals and aborts, page famine, numeric failures; invariants every step."""

from __future__ import annotations

import random

import pytest
import torch

from aiakq.runtime.engine import Engine
from aiakq.runtime.messages import Abort, ModelLimits, RequestSpec
from aiakq.runtime.pages import PagePool
from aiakq.runtime.runner import Runner
from aiakq.runtime.scheduler import Scheduler

VOCAB = 50
PAGE = 4


class CountingModel:
    """Logits that say: the next token is the sum of all tokens so far, modulo VOCAB - read back from the KV cache.

    A real part would be slow for thousands of steps; what is under test is the engine, and this model notices every
    page that was lost, shared wrongly or overwritten, because its answer depends on what the cache holds.
    """

    kv_shape = (1, 1, 1)
    row_multiple = 4
    vocab_size = VOCAB

    def __init__(self) -> None:
        self.poison: int | None = None

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


def make_engine(num_pages=12, max_num_seqs=4, budget=16, chunked=True, caching=True) -> Engine:
    model = CountingModel()
    runner = Runner(model, num_pages, PAGE, torch.float32, torch.device("cpu"))
    pool = PagePool(num_pages, PAGE, caching)
    scheduler = Scheduler(pool, max_num_seqs, budget, chunked)
    limits = ModelLimits(VOCAB, max_model_len=32, max_kv_tokens=pool.num_usable * PAGE)
    return Engine(runner, scheduler, limits, {})


def spec(id: str, prompt: list[int], max_tokens: int) -> RequestSpec:
    return RequestSpec(request_id=id, prompt_token_ids=prompt, max_tokens=max_tokens, seed=0, temperature=0.0)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_loses_and_mixes_nothing(seed):
    draw = random.Random(seed)
    engine = make_engine(
        num_pages=draw.choice([9, 12, 40]),
        max_num_seqs=draw.choice([1, 3, 8]),
        budget=draw.choice([3, 16, 64]),
        caching=draw.random() < 0.7,
    )
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
            request = spec(f"r{now}", prompt, draw.randrange(1, 11))
            inbox.append(request)
            specs[request.request_id], answers[request.request_id] = request, []
            live[request.request_id] = prompt
        if live and draw.random() < 0.08:
            inbox.append(Abort(draw.choice([*live, "unknown"])))
        out = engine.step(float(now), inbox)
        engine.check()
        for news in out.outputs:
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
    engine.runner.model.poison = 49
    outs = engine.step(0.0, [spec("good", [1, 2], 6), spec("bad", [49, 2, 3, 4, 5], 6)]).outputs
    news = {}
    for _ in range(10):
        for output in outs:
            news.setdefault(output.request_id, []).append(output)
        outs = engine.step(1.0, []).outputs
    assert news["bad"][-1].finish_reason == "error" and "finite" in news["bad"][-1].error
    assert [t for n in news["good"] for t in n.token_ids] == expected([1, 2], 6)
    assert engine.stats.num_free_pages == engine.stats.num_pages
    # What the failed request computed is not handed to the next one with the same beginning.
    engine.runner.model.poison = None
    tokens = engine.step(2.0, [spec("again", [49, 2, 3, 4, 5], 1)]).outputs
    assert tokens[0].token_ids == expected([49, 2, 3, 4, 5], 1)
    assert tokens[0].num_cached_tokens == 0


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
