"""Videos in the engine: equal to transformers, and the same bits however they are scheduled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import QWEN, random_image, random_video, reference, save_vision_model

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.media import MediaItem

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
#: Nats between log-probabilities and those of transformers, whose gated delta rule has larger rounding errors.
TOLERANCES = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), 3e-5)
#: Kinds that are driven in every way: frames that follow each other, with times in seconds, and with text between them.
SCHEDULED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
IMAGE, VIDEO = (f"<|vision_start|>{token}<|vision_end|>" for token in ("<|image_pad|>", "<|video_pad|>"))
#: How the engine is driven; every mode gives the same tokens and log-probabilities.
MODES: dict[str, dict[str, Any]] = {
    "chunked through a video": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "one step ahead": {"async_scheduling": True},
    "operation by operation": {"enforce_eager": True},
}


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_vision_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def engine(folder: Path, **arguments: Any) -> LLM:
    given = {"dtype": "float32", "max_model_len": 320, "num_gpu_blocks_override": 160, "block_size": 8}
    return LLM(str(folder), **{**given, **arguments})


def prompts_of(kind: str) -> list[dict[str, Any]]:
    """A video, two of them, one with an image on either side, an image, text, one with an equal beginning."""
    one, two = random_video(1), random_video(2, 9, 24, 16)
    timed = {"fps": 4.0, "total_num_frames": 9, "frames_indices": list(range(9)), "do_sample_frames": False}
    image = random_image(3, 16, 16)
    return [
        {"prompt": f"see\n{VIDEO}!", "multi_modal_data": {"video": one}},
        {"prompt": f"{VIDEO} and\n{VIDEO}?", "multi_modal_data": {"video": [(two, timed), one]}},
        {
            "prompt": f"{IMAGE}a\n{VIDEO}b{IMAGE}c",
            "multi_modal_data": {"image": [image, random_image(4, 30, 20)], "video": [(two, timed)]},
        },
        {"prompt": f"{IMAGE}?", "multi_modal_data": {"image": image}},
        {"prompt": "no video at all, but more text"},
        {"prompt": f"see\n{VIDEO}, then", "multi_modal_data": {"video": [one]}},
    ]


def answers(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[Any]:
    """Tokens and log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (each.token_ids, [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)])
        for each in outputs
    ]


def videos_of(llm: LLM, prompt: dict[str, Any]) -> list[MediaItem]:
    """The videos of a prompt as they are preprocessed."""
    if "multi_modal_data" not in prompt:
        return []
    return [item for item in llm._read(prompt, "").media if item.kind == "video"]


def original_positions(ids: torch.Tensor, kinds: torch.Tensor, grids: dict[int, list], times: list) -> torch.Tensor:
    """Positions [3, 1, T] as Qwen's own code computed them: text goes on behind the largest of the three before it.

    transformers 5 lets it go on behind the rows and columns only, so that text may have positions of later frames.
    """
    waiting, timed = {kind: list(each) for kind, each in grids.items()}, list(times)
    runs: list[torch.Tensor] = []
    token = position = 0
    while token < len(ids):
        kind = int(kinds[token])
        if not kind:
            runs.append(torch.full((3, 1), position))
            token, position = token + 1, position + 1
            continue
        frames, rows, columns = waiting[kind].pop(0)
        at = torch.tensor(timed.pop(0) if kind == 2 else list(range(frames)))
        run = torch.cartesian_prod(at, torch.arange(rows), torch.arange(columns)).T + position
        runs.append(run)
        token, position = token + run.shape[1], int(run.max()) + 1
    return torch.cat(runs, dim=1)[:, None]


def expected_logprobs(llm: LLM, folder: Path, kind: str, ids: list[int], prompt: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities [T, V] of transformers for a whole sequence."""
    data = prompt.get("multi_modal_data", {})
    images = data.get("image", [])
    model, given = reference(folder, kind, ids, images if isinstance(images, list) else [images], "eager")
    videos = videos_of(llm, prompt)
    if videos:
        for name in ("pixel_values_videos", "video_grid_thw"):
            records = [video.tensors[name] for video in videos]
            dtypes = {"float32": torch.float32, "int64": torch.int64}
            given[name] = torch.cat(
                [torch.frombuffer(bytearray(r.data), dtype=dtypes[r.dtype]).reshape(r.shape) for r in records]
            )
        kinds = (given["input_ids"] == model.config.image_token_id).int()
        kinds += 2 * (given["input_ids"] == model.config.video_token_id).int()
        given["mm_token_type_ids"] = kinds
    if videos and kind in ("qwen2_vl", "qwen2_5_vl"):
        merged = {1: given.get("image_grid_thw"), 2: given["video_grid_thw"]}
        grids = {
            number: [] if grid is None else [(t, h // 2, w // 2) for t, h, w in grid.tolist()]
            for number, grid in merged.items()
        }
        # Of unknown speed, transformers takes 24 frames in a second; the tiny config has 4 positions in one.
        values = data["video"] if isinstance(data["video"], list) else [data["video"]]
        seconds = [2 / (each[1]["fps"] if isinstance(each, tuple) else 24) for each in values]
        step = [4 * each if kind == "qwen2_5_vl" else 1 for each in seconds]
        times = [[int(t * each) for t in range(grid[0])] for each, grid in zip(step, grids[2], strict=True)]
        given["position_ids"] = original_positions(given["input_ids"][0], kinds[0], grids, times)
    with torch.inference_mode():
        return model(**given).logits[0].log_softmax(-1)


@pytest.mark.parametrize("kind", QWEN)
def test_log_probabilities_equal_those_of_transformers(vision_model, kind):
    folder = vision_model(kind)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts, llm = prompts_of(kind)[:4], engine(folder)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = expected_logprobs(llm, folder, kind, ids, prompt)
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for at, (token, step) in enumerate(zip(ids[1:], steps, strict=True)):
            assert abs(step[token].logprob - float(expected[at, token])) < TOLERANCES.get(kind, 1e-5), (kind, at)


@pytest.fixture(scope="module")
def alone(vision_model) -> Callable[[str], list[Any]]:
    """Each prompt of a kind in a run of its own, nothing cached."""

    @functools.cache
    def computed(kind: str) -> list[Any]:
        llm = engine(vision_model(kind), enable_prefix_caching=False)
        return [answers(llm, [prompt])[0] for prompt in prompts_of(kind)]

    return computed


@pytest.mark.parametrize(("mode", "kind"), [(mode, kind) for kind in SCHEDULED for mode in MODES])
def test_the_same_bits_however_the_engine_is_driven(vision_model, alone, mode, kind):
    assert answers(engine(vision_model(kind), **MODES[mode]), prompts_of(kind)) == alone(kind)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_preempted_sequence_gives_the_same_bits(vision_model, kind):
    prompts = [{"prompt": f"{n}\n{VIDEO}", "multi_modal_data": {"video": random_video(n, 4, 16, 16)}} for n in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    given = {"block_size": 4, "max_model_len": 88, "enable_prefix_caching": False}
    expected = answers(engine(vision_model(kind), **given), prompts, params)
    llm = engine(vision_model(kind), **given, num_gpu_blocks_override=24)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", SCHEDULED)
def test_the_same_bits_from_the_prefix_cache_and_other_videos_miss_it(vision_model, alone, kind):
    llm = engine(vision_model(kind))
    prompts = prompts_of(kind)
    assert [answers(llm, [prompt])[0] for prompt in prompts] == alone(kind)
    [again] = llm.generate([prompts[0]], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 8
    other = {**prompts[0], "multi_modal_data": {"video": random_video(9)}}
    [found] = llm.generate([other], GREEDY, use_tqdm=False)
    assert found.prompt_token_ids == again.prompt_token_ids and found.num_cached_tokens < 24
    assert answers(llm, [other]) == answers(engine(vision_model(kind), enable_prefix_caching=False), [other])


def test_the_same_frames_at_another_speed_are_another_video(vision_model):
    """Their tokens are equal, and their positions are not."""
    llm, frames = engine(vision_model("qwen2_5_vl")), random_video(1, 8, 16, 16)
    fast, slow = ({"prompt": VIDEO, "multi_modal_data": {"video": (frames, {"fps": fps})}} for fps in (8.0, 2.0))
    assert answers(llm, [fast]) != answers(llm, [slow])
    [again] = llm.generate([slow], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens > 0
    assert answers(llm, [slow]) == answers(engine(vision_model("qwen2_5_vl"), enable_prefix_caching=False), [slow])


@pytest.mark.parametrize(
    ("split", "kind"), [({"tensor_parallel_size": 2}, "qwen2_5_vl"), ({"pipeline_parallel_size": 2}, "qwen3_vl")]
)
def test_the_same_bits_on_two_ranks(vision_model, alone, split, kind):
    llm = engine(vision_model(kind), **split, max_num_batched_tokens=32, max_num_seqs=8)
    assert answers(llm, prompts_of(kind)) == alone(kind)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_records_cross_processes(vision_model, alone, behind_bytes, kind):
    assert answers(behind_bytes(engine(vision_model(kind))), prompts_of(kind)) == alone(kind)


def test_frames_are_sampled_as_the_model_says_and_arguments_change_it(vision_model):
    def times(frames: Any, **arguments: Any) -> str:
        llm = engine(vision_model("qwen3_vl"), max_model_len=640, **arguments)
        [output] = llm.generate([{"prompt": VIDEO, "multi_modal_data": {"video": frames}}], GREEDY, use_tqdm=False)
        text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        for token in ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"):
            text = text.replace(token, "")
        return text

    video = random_video(1, 40, 8, 8)  # one token each
    # Two frames in a second: of 40 frames, 24 in a second, int(40 / 24 * 2) = 3, at least 4.
    assert times(video) == "<0.3 seconds><1.4 seconds>"
    assert times((video, {"fps": 10.0})) == "<0.3 seconds><1.4 seconds><2.5 seconds><3.6 seconds>"
    assert times((video, {"fps": 10.0}), mm_processor_kwargs={"fps": 1}) == "<0.7 seconds><3.2 seconds>"
    sampled = {"fps": 10.0, "total_num_frames": 400, "frames_indices": list(range(0, 400, 10))}
    assert times((video, sampled)).startswith("<0.5 seconds><2.5 seconds>")


@pytest.mark.parametrize(
    ("kind", "prompt", "reason"),
    [
        (
            "llava",
            {"video": random_video(1)},
            "videos of LlavaForConditionalGeneration are not computed; those of Qwen2VL",
        ),
        ("qwen2_vl", {"video": [random_video(1)] * 3}, "the number of videos is 3, and --limit-mm-per-prompt allows 2"),
        ("qwen2_vl", {"video": [random_video(1)] * 2}, "there are 2 videos for its 1 placeholders <|video_pad|>"),
        ("qwen2_vl", {"image": random_image(1)}, "there are 1 images for its 0 placeholders"),
        ("qwen2_vl", {"video": "cat.mp4"}, r"an array \[frames, height, width, 3\] of uint8 is expected"),
        ("qwen2_vl", {"video": random_video(1).astype("float32")}, "of uint8 are expected, not .* of float32"),
        ("qwen2_vl", {"video": random_video(1, 0)}, "it has 0 frames"),
        ("qwen2_vl", {"video": random_video(1, 2049, 1, 1)}, "it has 2049 frames, of at least 1 and at most 2048"),
        ("qwen2_vl", {"video": random_video(1, 2, 1, 300)}, "one side is 300 times as long as the other"),
        ("qwen2_vl", {"video": [[random_image(1), random_image(2, 40, 40)]]}, "its frames have different sizes"),
        (
            "qwen2_vl",
            {"video": (random_video(1), {"fps": 0})},
            "fps cannot be read: a number from 1e-06 to 1e.06 is expected",
        ),
        (
            "qwen2_vl",
            {"video": (random_video(1), {"total_num_frames": 3})},
            "an integer of at least 6, the number of its frames",
        ),
        (
            "qwen2_vl",
            {"video": (random_video(1), {"frames_indices": [5, 4, 3, 2, 1, 0]})},
            "6 ascending numbers below 6",
        ),
        ("qwen2_vl", {"video": (random_video(1), {"speed": 2})}, "speed cannot be read: metadata of a video are fps"),
        ("qwen2_5_vl", {"video": (random_video(1), {"fps": 0.1})}, "positions apart in its 18 tokens"),
        (
            "qwen2_5_vl",
            {"video": (random_video(1), {"fps": 1e-6, "total_num_frames": 2**31 - 1, "frames_indices": [*range(6)]})},
            "positions apart in its 18 tokens",
        ),
        ("qwen2_vl", {"video": random_video(1, 2, 20_000, 1)}, r"video\[0\] cannot be read: it has 20000 x 1 pixels"),
        ("qwen3_vl", {"video": random_video(1, 1)}, "it has 1 frames, fewer than the 2 that are encoded together"),
    ],
)
def test_refused_videos(vision_model, kind, prompt, reason):
    llm = engine(vision_model(kind), limit_mm_per_prompt={"video": 2})
    with pytest.raises(AiakqError, match=reason.replace("|", r"\|")):
        llm.generate([{"prompt": VIDEO, "multi_modal_data": prompt}], GREEDY, use_tqdm=False)


def test_text_that_would_be_tokenized_with_a_time_is_refused(vision_model):
    prompt = {"prompt": "see <|video_pad|>", "multi_modal_data": {"video": random_video(1)}}
    with pytest.raises(AiakqError, match="text before a video has to end with a line end or a special token"):
        engine(vision_model("qwen3_vl")).generate([prompt], GREEDY, use_tqdm=False)
    assert engine(vision_model("qwen2_vl")).generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
