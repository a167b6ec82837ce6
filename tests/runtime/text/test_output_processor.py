"""From engine outputs to text: stop strings wherever they fall, held-back text, log-probabilities, requests that end.

Tokens are single bytes, so every character of a stop string arrives in a step of its own unless steps are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_examples import examples

from aiakq import SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import TokenOutput
from aiakq.runtime.protocol.request import Prompt, RequestSpec
from aiakq.runtime.protocol.request import Request as Asked
from aiakq.runtime.protocol.step import TokenLogprobs
from aiakq.runtime.text.output_processor import Delta, OutputProcessor, bad_word_ids, truncated
from aiakq.runtime.text.tokenizer import NoTokenizer, Tokenizer

LIMITS = ModelLimits(vocab_size=320, max_model_len=512, max_kv_tokens=512, max_logprobs=5, eos_token_ids=(1,))
PROMPT = [40, 41, 42]


def added(processor: OutputProcessor, params: SamplingParams, id: str = "r", **fields: Any) -> list[RequestSpec]:
    """The sequences of a request with one prompt."""
    prompt = Prompt(None, PROMPT)
    return processor.add(id, prompt, Asked(id, [prompt], params, **fields))


class Request:
    """One request with one sequence, and what its reader has got so far."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.processor = OutputProcessor(tokenizer, LIMITS)
        (self.spec,) = added(self.processor, params, "r")
        self.deltas: list[Delta] = []
        self.aborts: list[str] = []

    def feed(self, ids: Sequence[int], **fields: Any) -> None:
        """One engine step."""
        output = TokenOutput(self.spec.request_id, list(ids), [-0.5] * len(ids), **fields)
        deltas, aborts = self.processor.process(output)
        self.deltas += deltas
        self.aborts += aborts

    def feed_all(self, ids: Sequence[int], sizes: Sequence[int] = ()) -> None:
        """Steps of so many tokens, then of one each; the last ends by length."""
        at = 0
        for size in [*sizes, *[1] * len(ids)]:
            step, at = ids[at : at + size], at + size
            if step:
                self.feed(step, finish_reason="length" if at >= len(ids) else None)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def end(self) -> tuple[str | None, int | str | None]:
        return self.deltas[-1].finish_reason, self.deltas[-1].stop_reason


@pytest.fixture(scope="module")
def bytewise(byte_tokenizer: Any) -> Tokenizer:
    return Tokenizer(byte_tokenizer)


@pytest.fixture
def request_for(bytewise: Tokenizer) -> Callable[..., Request]:
    return lambda **params: Request(bytewise, SamplingParams(**{"max_tokens": 64, **params}))


# --- text and stop strings --------------------------------------------------------------------------------------------


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    """The text before the stop string that is complete first, the longest of several, and that string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return None


@settings(max_examples=examples(300))
@given(
    text=st.text("aé🙂", max_size=20),
    stops=st.lists(st.text("aé🙂", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
@example(text="aé🙂", stops=["🙂", "é🙂"], include=False)
def test_text_ends_before_the_first_stop_string(
    bytewise: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    ids = bytewise.encode(text) or [3]
    text = bytewise.decode(ids)
    params = SamplingParams(max_tokens=100, stop=stops or None, include_stop_str_in_output=include)
    request = Request(bytewise, params)
    for number, token in enumerate(ids):
        request.feed([token], finish_reason="length" if number == len(ids) - 1 else None)
        if request.deltas[-1].finish_reason is not None:
            break
    stopped = first_stop(text, stops)
    if stopped is None:
        assert (request.text, request.end) == (text, ("length", None))
    else:
        before, stop = stopped
        assert (request.text, request.end) == (before + stop if include else before, ("stop", stop))
        assert request.token_ids == bytewise.encode(before + stop)


@given(text=st.text("ab🙂", min_size=1, max_size=15), sizes=st.lists(st.integers(1, 5), max_size=6))
def test_text_does_not_depend_on_how_tokens_are_spread_over_steps(
    bytewise: Tokenizer, text: str, sizes: list[int]
) -> None:
    ids = bytewise.encode(text)
    found = []
    for steps in ([], sizes):
        request = Request(bytewise, SamplingParams(max_tokens=100, stop=["ba", "🙂🙂"]))
        request.feed_all(ids, steps)
        found.append((request.text, request.token_ids, next(d for d in request.deltas if d.finish_reason).stop_reason))
    assert found[0] == found[1]


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not(request_for: Callable[..., Request]) -> None:
    request = request_for(stop="</end>")
    for token in request.processor.tokenizer.encode("a</en<b"):
        request.feed([token])
    assert [delta.text for delta in request.deltas] == ["a", "", "", "", "", "</en", "<b"]


def test_held_back_text_comes_out_when_the_sequence_ends(request_for: Callable[..., Request]) -> None:
    request = request_for(stop="</end>")
    request.feed_all(request.processor.tokenizer.encode("a</en"))
    assert (request.text, request.end, request.aborts) == ("a</en", ("length", None), [])


def test_a_stop_string_of_one_split_character(request_for: Callable[..., Request]) -> None:
    request = request_for(stop="🙂")
    ids = request.processor.tokenizer.encode("a🙂b")
    for token in ids[:5]:
        request.feed([token])
    assert (request.text, request.end) == ("a", ("stop", "🙂"))
    assert request.aborts == [request.spec.request_id], "the engine would go on"


def test_a_stop_string_in_bytes_that_never_became_a_character(request_for: Callable[..., Request]) -> None:
    request = request_for(stop="\ufffd")
    request.feed_all(request.processor.tokenizer.encode("a🙂")[:3])
    assert (request.text, request.end) == ("a", ("stop", "\ufffd"))


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped(request_for: Callable[..., Request]) -> None:
    request = request_for(stop="bc", logprobs=0)
    ids = request.processor.tokenizer.encode("abcdef")
    chosen = [TokenLogprobs([token], [-0.5], 1) for token in ids]
    request.feed(ids, logprobs=chosen)
    assert (request.text, request.token_ids, request.end) == ("a", ids[:3], ("stop", "bc"))
    assert len(request.deltas[0].logprobs or []) == 3
    assert request.deltas[0].cumulative_logprob == pytest.approx(-1.5)
    request.feed(ids)
    assert len(request.deltas) == 1, "what the engine computed meanwhile has no reader"


def test_stop_strings_within_the_least_number_of_tokens_do_not_end_the_text(
    request_for: Callable[..., Request],
) -> None:
    request = request_for(stop="ab", min_tokens=4)
    request.feed_all(request.processor.tokenizer.encode("ababcabc"))
    assert (request.text, [d.stop_reason for d in request.deltas if d.finish_reason]) == ("ababc", ["ab"])


@pytest.mark.parametrize("stops", [["bc"], ["abcdX", "bc"]])
def test_a_stop_string_complete_before_min_tokens_never_ends_the_text(
    stops: list[str], request_for: Callable[..., Request]
) -> None:
    request = request_for(stop=stops, min_tokens=4)  # "abcd" is held back: "abcdX" may follow
    request.feed_all(request.processor.tokenizer.encode("abcd?abce"))
    assert (request.text, request.end) == ("abcd?a", ("stop", "bc"))


SPECIAL = {"<s>": 0, "<pad>": 2}


@given(
    atoms=st.lists(st.sampled_from(["x", "y", "<s>", "<pad>"]), max_size=8),
    stops=st.lists(
        st.lists(st.sampled_from(["x", "y", "<s>", "<pad>"]), min_size=1, max_size=3), min_size=1, max_size=2
    ),
    skip=st.booleans(),
    include=st.booleans(),
    sizes=st.lists(st.integers(1, 4), max_size=3),
)
@example(atoms=["x", "<s>"], stops=[["<s>"]], skip=True, include=False, sizes=[])
@example(atoms=["x", "<s>", "y"], stops=[["x", "<s>", "y"]], skip=True, include=True, sizes=[])
@example(atoms=["x", "<pad>", "y"], stops=[["x", "y"]], skip=True, include=False, sizes=[])
@example(atoms=["x", "<s>", "y"], stops=[["x", "y"], ["<s>", "x"]], skip=True, include=False, sizes=[3])
def test_special_tokens_that_are_left_out_are_part_of_stop_strings(
    bytewise: Tokenizer, atoms: list[str], stops: list[list[str]], skip: bool, include: bool, sizes: list[int]
) -> None:
    texts = ["".join(stop) for stop in stops]
    params = SamplingParams(max_tokens=100, stop=texts, include_stop_str_in_output=include, skip_special_tokens=skip)
    request = Request(bytewise, params)
    ids = [SPECIAL[atom] if atom in SPECIAL else bytewise.encode(atom, add_special_tokens=False)[0] for atom in atoms]
    request.feed_all(ids, sizes)

    def shown(parts: list[str]) -> str:
        return "".join(part for part in parts if not (skip and part in SPECIAL))

    def completed(parts: list[str]) -> list[tuple[str, str]]:
        """The text before each stop string at the end of ``parts``, and the stop string."""
        names = [part for part in parts if not (skip and part in SPECIAL) or any(part in text for text in texts)]
        found = [(shown(parts).removesuffix(text), text) for text in texts if shown(parts).endswith(text)]
        ended = [stop for stop in stops if names[-len(stop) :] == stop]
        return found + [(shown(names[: -len(stop)]), "".join(stop)) for stop in ended]

    for end in range(1, len(atoms) + 1):
        if atoms[end - 1] in SPECIAL and skip and not any(atoms[end - 1] in text for text in texts):
            continue
        if found := completed(atoms[:end]):
            before = min((text for text, _ in found), key=len)
            assert request.end[0] == "stop" and request.token_ids == ids[:end]
            assert request.text in [text + stop if include else text for text, stop in found if text == before]
            return
    assert request.text == shown(atoms) and (not atoms or request.end == ("length", None))


def test_a_special_token_that_is_kept_is_text_like_any_other(bytewise: Tokenizer) -> None:
    for kept in (frozenset(), frozenset([0])):
        processor = OutputProcessor(bytewise, LIMITS)
        params = SamplingParams(max_tokens=9, stop=["<s>"], min_tokens=2)
        [spec] = added(processor, params, "r", kept_special_tokens=kept)
        first, _ = processor.process(TokenOutput(spec.request_id, [0], [-0.5]))
        assert (first[0].text, first[0].finish_reason) == ("<s>" if kept else "", None), "within min_tokens"
        second, aborts = processor.process(TokenOutput(spec.request_id, [70, 0], [-0.5, -0.5]))
        assert second[0].text == bytewise.decode([70]) and second[0].stop_reason == "<s>" and aborts


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_part_of_the_text_only_on_request(include: bool, request_for: Callable[..., Request]) -> None:
    request = request_for(stop_token_ids=[70], include_stop_str_in_output=include)
    decode = request.processor.tokenizer.decode
    request.feed([80, 81])
    request.feed([70], finish_reason="stop", stop_reason=70)
    assert request.token_ids == [80, 81, 70] and request.end == ("stop", 70)
    assert request.text == decode([80, 81, 70] if include else [80, 81])


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_for_several_sequences_keeps_them_apart(bytewise: Tokenizer) -> None:
    processor = OutputProcessor(bytewise, LIMITS)
    specs = added(processor, SamplingParams(n=3, seed=7, max_tokens=8), "r")
    assert [spec.seed for spec in specs] == [7, 8, 9]
    assert len({spec.request_id for spec in specs}) == 3
    for index in (2, 0, 1):
        (delta,), _ = processor.process(TokenOutput(specs[index].request_id, [80 + index], [-1.0]))
        assert (delta.request_id, delta.index, delta.text) == ("r", index, bytewise.decode([80 + index]))


def test_a_cancelled_request_is_dropped_with_all_its_sequences(bytewise: Tokenizer) -> None:
    processor = OutputProcessor(bytewise, LIMITS)
    specs = added(processor, SamplingParams(n=2, max_tokens=8), "r")
    (other,) = added(processor, SamplingParams(max_tokens=8), "other")
    assert processor.cancel("r") == [spec.request_id for spec in specs]
    assert processor.cancel("r") == []
    assert processor.process(TokenOutput(specs[0].request_id, [80], [-1.0])) == ([], [])
    assert processor.process(TokenOutput(other.request_id, [80], [-1.0]))[0][0].text == bytewise.decode([80])


def test_a_failed_sequence_says_why(request_for: Callable[..., Request]) -> None:
    request = request_for()
    request.feed([80])
    request.feed([], finish_reason="error", error="the model's output is not finite")
    assert request.end == ("error", None) and request.deltas[-1].error == "the model's output is not finite"
    assert request.aborts == []


def test_counters_are_passed_on(request_for: Callable[..., Request]) -> None:
    request = request_for()
    request.feed([80], num_cached_tokens=2, num_preemptions=1)
    assert (request.deltas[0].num_cached_tokens, request.deltas[0].num_preemptions) == (2, 1)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_the_chosen_token_comes_first_with_its_own_rank(request_for: Callable[..., Request]) -> None:
    request = request_for(logprobs=2, prompt_logprobs=1)
    prompt = [None, TokenLogprobs([41, 50], [-3.0, -0.1], 9), TokenLogprobs([42, 42], [-0.2, -0.2], 1)]
    chosen = TokenLogprobs([81, 80, 81], [-1.0, -0.5, -1.0], 2)
    request.feed([81], logprobs=[chosen], prompt_logprobs=prompt)
    (position,) = request.deltas[0].logprobs or []
    decode = request.processor.tokenizer.decode
    assert [(token, entry.logprob, entry.rank) for token, entry in position.items()] == [(81, -1.0, 2), (80, -0.5, 1)]
    assert [entry.decoded_token for entry in position.values()] == [decode([81]), decode([80])]
    first, second, third = request.deltas[0].prompt_logprobs or []
    assert first is None
    assert second is not None and [(token, each.rank) for token, each in second.items()] == [(41, 9), (50, 1)]
    assert third is not None and [(token, each.rank) for token, each in third.items()] == [(42, 1)]


def test_special_tokens_have_a_text_among_log_probabilities(request_for: Callable[..., Request]) -> None:
    request = request_for(logprobs=0)
    request.feed([1], logprobs=[TokenLogprobs([1], [-0.1], 1)], finish_reason="stop")
    (position,) = request.deltas[0].logprobs or []
    assert (request.text, position[1].decoded_token) == ("", "</s>")


def test_without_detokenizing_ids_have_no_text(request_for: Callable[..., Request]) -> None:
    request = request_for(detokenize=False, logprobs=0)
    request.feed([80], logprobs=[TokenLogprobs([80], [-0.1], 1)], finish_reason="length")
    (position,) = request.deltas[0].logprobs or []
    assert (request.text, request.token_ids, position[80].decoded_token) == ("", [80], None)


# --- without a tokenizer, bad words, long prompts ---------------------------------------------------------------------


def test_without_a_tokenizer_what_needs_text_is_refused() -> None:
    processor = OutputProcessor(NoTokenizer(), LIMITS)
    for params in (SamplingParams(bad_words=["a"]), SamplingParams(stop="a")):
        with pytest.raises(AiakqError) as caught:
            added(processor, params, "r")
        assert caught.value.param in ("bad_words", "stop")
    (spec,) = added(processor, SamplingParams(max_tokens=8), "r")
    (delta,), aborts = processor.process(TokenOutput(spec.request_id, [80], [-1.0], finish_reason="length"))
    assert (delta.text, delta.token_ids, aborts) == ("", [80], [])


def test_bad_words_are_forbidden_at_the_beginning_and_after_a_space(bytewise: Tokenizer) -> None:
    encode = bytewise.encode
    assert bad_word_ids(bytewise, ["ab", " ab"]) == [encode("ab"), encode(" ab")]
    (spec,) = added(OutputProcessor(bytewise, LIMITS), SamplingParams(bad_words=["b"], max_tokens=8))
    assert spec.bad_word_ids == [encode("b"), encode(" b")]


@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"), [(None, 8, 600), (4, 8, 4), (512, 8, 512), (-1, 8, 504), (-1, None, 511)]
)
def test_the_end_of_a_long_prompt_is_kept(keep: int | None, max_tokens: int | None, expected: int) -> None:
    ids = list(range(600))
    found = truncated(ids, SamplingParams(truncate_prompt_tokens=keep, max_tokens=max_tokens), LIMITS)
    assert found == ids[-expected:]


def test_the_sequences_of_a_request_have_a_group_in_common(bytewise):
    """It tells the engine which waiting sequences belong to an answer of which a part may have been read."""
    processor = OutputProcessor(bytewise, LIMITS)
    for id, params, groups in (
        ("a", SamplingParams(), [""]),
        ("b", SamplingParams(n=2), ["b"] * 2),
        ("c", SamplingParams(best_of=3), ["c"] * 3),
    ):
        assert [spec.group for spec in added(processor, params, id)] == groups
    prompts = [Prompt(None, PROMPT)] * 2
    asked = Asked("d", prompts, SamplingParams())
    specs = [spec for at, prompt in enumerate(prompts) for spec in processor.add(f"d-{at}", prompt, asked, "d")]
    assert [spec.group for spec in specs] == ["d", "d"]
