"""The scheduler alone: which chunks a step has, and which sequences are preempted. Sequences are advanced by hand."""

from __future__ import annotations

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.protocol.media import MediaItem
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams

PAGE = 4


def make_scheduler(num_pages=40, max_num_seqs=4, budget=16, caching=True, **config) -> Scheduler:
    pool = PagePool(num_pages, PAGE, caching)
    return Scheduler(pool, SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config))


def add(scheduler: Scheduler, prompt: list[int], max_tokens: int = 9, arrived: float = 0.0, **more) -> Sequence:
    name = f"r{len(scheduler.waiting) + len(scheduler.running)}"
    sampling = more.pop("sampling", SamplingParams(max_tokens=max_tokens))
    media = more.pop("media", ())
    spec = RequestSpec(name, prompt, sampling, max_tokens, 0, options=RequestOptions(**more), media=media)
    sequence = Sequence(spec, RequestTimes(arrived))
    scheduler.add(sequence)
    return sequence


def finish(scheduler: Scheduler, chunks: list[ScheduledChunk], token: int = 7) -> None:
    """Advance the sequences of a step as the engine does: every sampled token is ``token``, and none finishes."""
    for chunk in chunks:
        chunk.sequence.collected(chunk)
        scheduler.insert_pages(chunk)
        if chunk.samples:
            chunk.sequence.token_ids.append(token)
    scheduler.check()


def run(scheduler: Scheduler, now: float = 0.0) -> list[tuple[Sequence, int, int]]:
    """Run one step; return the sequence, first token and number of tokens of each chunk."""
    chunks = scheduler.schedule(now)
    finish(scheduler, chunks)
    return [(chunk.sequence, chunk.first, chunk.count) for chunk in chunks]


def test_a_prompt_is_split_into_chunks_of_the_budget_and_samples_with_its_last():
    scheduler = make_scheduler(budget=8)
    sequence = add(scheduler, [1] * 18)
    samples = []
    for first, count in [(0, 8), (8, 8), (16, 2)]:
        (chunk,) = scheduler.schedule()
        assert (chunk.first, chunk.count) == (first, count)
        samples.append(chunk.samples)
        finish(scheduler, [chunk])
    assert samples == [False, False, True]
    assert run(scheduler) == [(sequence, 18, 1)]


def test_decodes_come_first_and_get_their_token_with_a_long_prompt():
    scheduler = make_scheduler(budget=8)
    short = add(scheduler, [1] * 3)
    run(scheduler)
    long = add(scheduler, [2] * 20)
    assert run(scheduler) == [(short, 3, 1), (long, 0, 7)]
    assert run(scheduler) == [(short, 4, 1), (long, 7, 7)]


def test_a_prompt_that_must_not_be_split_waits_for_a_step_with_room():
    scheduler = make_scheduler(budget=8, enable_chunked_prefill=False)
    first, second = add(scheduler, [1] * 5), add(scheduler, [2] * 6)
    assert run(scheduler) == [(first, 0, 5)]
    assert run(scheduler) == [(first, 5, 1), (second, 0, 6)]


def test_no_more_sequences_run_than_there_are_slots():
    scheduler = make_scheduler(max_num_seqs=2)
    sequences = [add(scheduler, [n] * 3) for n in range(3)]
    run(scheduler)
    assert sorted(one.slot for one in sequences[:2]) == [0, 1] and sequences[2].slot is None
    sequences[0].introduction()
    scheduler.remove(sequences[0])
    assert scheduler.freed_slots == [0]
    run(scheduler)
    assert sequences[2].slot == 0, "a slot is used again"


def test_only_slots_that_the_executor_knows_are_freed():
    scheduler = make_scheduler()
    known, unknown = add(scheduler, [1] * 3), add(scheduler, [2] * 3)
    run(scheduler)
    known.introduction()
    scheduler.remove(known)
    scheduler.remove(unknown)
    assert scheduler.freed_slots == [0]
    scheduler.check()


def test_the_last_in_order_is_preempted_and_starts_over_when_there_are_pages():
    scheduler = make_scheduler(num_pages=6, caching=False)
    old, young = add(scheduler, [1] * 7), add(scheduler, [2] * 7)
    run(scheduler)
    assert run(scheduler) == [(old, 7, 1), (young, 7, 1)]
    assert scheduler.may_preempt()
    assert run(scheduler) == [(old, 8, 1)]
    assert young in scheduler.waiting and young.slot is None and not young.pages
    assert scheduler.num_preemptions == young.num_preemptions == 1
    scheduler.remove(old)
    assert run(scheduler) == [(young, 0, 9)], "with the tokens it had generated"


def test_a_lower_priority_number_is_served_first_and_keeps_its_pages():
    scheduler = make_scheduler(num_pages=6, caching=False)
    low, high = add(scheduler, [1] * 7, priority=5), add(scheduler, [2] * 7, priority=1)
    assert [one for one, _, _ in run(scheduler)] == [high, low]
    run(scheduler)
    run(scheduler)
    assert scheduler.running == [high] and scheduler.waiting == [low]


def test_a_prompt_starts_only_if_its_pages_fit():
    scheduler = make_scheduler(num_pages=6, budget=64, caching=False)
    first, second = add(scheduler, [1] * 10), add(scheduler, [2] * 12)
    assert run(scheduler) == [(first, 0, 10)]
    assert second in scheduler.waiting and scheduler.num_preemptions == 0


def test_an_equal_beginning_is_taken_from_the_cache_but_for_the_last_token():
    scheduler = make_scheduler()
    first = add(scheduler, [1] * 8)
    run(scheduler)
    second = add(scheduler, [1] * 8)
    assert (second, 4, 4) in run(scheduler)
    assert second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (16, 4)


def test_nothing_is_shared_before_a_step_is_committed_nor_across_salts():
    scheduler = make_scheduler()
    add(scheduler, [1] * 9)
    chunks = scheduler.schedule()
    add(scheduler, [1] * 9)
    chunks += scheduler.schedule()
    assert [chunk.first for chunk in chunks if chunk.count > 1] == [0, 0]
    finish(scheduler, chunks)
    other = add(scheduler, [1] * 9, cache_salt="another")
    assert (other, 0, 9) in run(scheduler)


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt():
    scheduler = make_scheduler()
    add(scheduler, [1] * 9)
    run(scheduler)
    scored = add(scheduler, [1] * 9, sampling=SamplingParams(prompt_logprobs=1))
    assert (scored, 0, 9) in run(scheduler)


def test_a_reset_cache_forgets_pages_of_pending_steps_too():
    scheduler = make_scheduler()
    add(scheduler, [1] * 9)
    chunks = scheduler.schedule()
    scheduler.reset_prefix_cache()
    finish(scheduler, chunks)
    again = add(scheduler, [1] * 9)
    assert (again, 0, 9) in run(scheduler)


def test_a_step_may_be_scheduled_while_the_token_before_is_pending():
    scheduler = make_scheduler()
    sequence = add(scheduler, [1] * 3, max_tokens=3)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [(chunk.first, chunk.count, chunk.samples) for chunk in first + second] == [(0, 3, True), (3, 1, True)]
    assert sequence.num_pending_tokens == 2
    third = scheduler.schedule()
    assert [(chunk.first, chunk.samples) for chunk in third] == [(4, True)]
    assert scheduler.schedule() == [], "the last token is pending, and needs no computation"
    finish(scheduler, first)
    finish(scheduler, second)
    finish(scheduler, third)
    assert sequence.num_outputs == 3


def test_a_sequence_that_resamples_goes_back_to_its_last_token():
    scheduler = make_scheduler()
    sequence = add(scheduler, [1] * 3)
    run(scheduler)
    (sampled,) = scheduler.schedule()
    (behind,) = scheduler.schedule()
    sequence.collected(sampled)
    sequence.resample()
    assert behind.dropped and sequence.num_pending_tokens == 0
    (again,) = scheduler.schedule()
    assert (again.first, again.count) == (3, 1) and sequence.resamples


def test_a_finished_sequence_gives_back_pages_and_drops_its_pending_chunks():
    scheduler = make_scheduler(caching=False)
    sequence = add(scheduler, [1] * 9)
    (chunk,) = scheduler.schedule()
    sequence.drop_pending()
    scheduler.remove(sequence)
    assert chunk.dropped and scheduler.pool.num_free == scheduler.pool.num_usable
    scheduler.check()


def test_prompts_share_a_step_if_several_may_be_split():
    scheduler = make_scheduler(budget=12, max_num_partial_prefills=2, max_long_partial_prefills=2)
    long, longer = add(scheduler, [1] * 40), add(scheduler, [2] * 44)
    assert run(scheduler) == [(long, 0, 6), (longer, 0, 6)]


def test_short_prompts_overtake_long_ones_beyond_their_limit():
    scheduler = make_scheduler(budget=12, max_num_partial_prefills=2, max_long_partial_prefills=1, long_prompt_tokens=8)
    long, longer, short = add(scheduler, [1] * 40), add(scheduler, [2] * 44), add(scheduler, [3] * 5)
    assert run(scheduler) == [(long, 0, 7), (short, 0, 5)]
    assert longer in scheduler.waiting


def test_a_long_prompt_takes_no_more_than_its_threshold():
    scheduler = make_scheduler(budget=32, long_prompt_tokens=8, long_prefill_token_threshold=8)
    long = add(scheduler, [1] * 30)
    assert run(scheduler) == [(long, 0, 8)]


def test_waiting_prompts_are_delayed_by_a_multiple_of_the_last_prompt_step():
    scheduler = make_scheduler(scheduler_delay_factor=0.5)
    running = add(scheduler, [1] * 4, max_tokens=30)
    run(scheduler, 0.0)
    run(scheduler, 10.0)  # the step with the prompt took ten seconds
    waiting = add(scheduler, [2] * 4, arrived=11.0)
    assert run(scheduler, 15.0) == [(running, 5, 1)]
    assert (waiting, 0, 4) in run(scheduler, 16.5)


def image(*places: tuple[int, int]) -> tuple[MediaItem]:
    """An image whose runs of tokens are computed in one step each."""
    return (MediaItem("image", "key", list(places), {}, is_whole=True),)


def chunks_of(scheduler: Scheduler, sequence: Sequence) -> list[tuple[int, int]]:
    """First token and number of tokens of the chunks of the prompt of ``sequence``."""
    chunks = []
    while sequence.num_computed_tokens < sequence.num_prompt:
        chunks += [(first, count) for one, first, count in run(scheduler) if one is sequence]
    return chunks


def test_no_chunk_ends_within_an_image_that_is_whole():
    scheduler = make_scheduler(budget=16)
    sequence = add(scheduler, [1] * 50, media=image((10, 8), (19, 8), (27, 12)))
    assert chunks_of(scheduler, sequence) == [(0, 10), (10, 9), (19, 8), (27, 16), (43, 7)]


def test_clients_that_share_steps_do_not_split_an_image():
    scheduler = make_scheduler(budget=128, num_pages=80)
    sequence = add(scheduler, [1] * 90, media=image((3, 80)), client="a")
    other = add(scheduler, [2] * 90, client="b")
    assert chunks_of(scheduler, sequence)[0] == (0, 83)
    chunks_of(scheduler, other)


def test_an_image_that_is_whole_waits_for_a_step_with_room():
    scheduler = make_scheduler(budget=16)
    others = [add(scheduler, [n] * 4) for n in (1, 2)]
    assert [count for _, _, count in run(scheduler)] == [4, 4]
    sequence = add(scheduler, [3] * 24, media=image((4, 13)))
    assert run(scheduler) == [(others[0], 4, 1), (others[1], 4, 1), (sequence, 0, 4)]
    assert run(scheduler) == [(others[0], 5, 1), (others[1], 5, 1), (sequence, 4, 14)]


def test_a_beginning_in_the_cache_may_end_within_an_image_that_is_whole():
    scheduler = make_scheduler(budget=16)
    media = image((3, 8))
    first = add(scheduler, [1] * 12, max_tokens=1, media=media)
    assert chunks_of(scheduler, first) == [(0, 12)]
    scheduler.remove(first)
    second = add(scheduler, [1] * 8 + [1] * 3 + [2] * 9, media=media)
    assert chunks_of(scheduler, second) == [(8, 12)]
