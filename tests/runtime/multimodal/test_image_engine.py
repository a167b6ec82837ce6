"""Images in the engine: equal to transformers, and the same bits however they are scheduled."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vision_models import PLACEHOLDERS, random_image, reference_logprobs, save_vision_model

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.multimodal.encoding import MediaEncoding
from aiakq.runtime.multimodal.preprocessor import MediaInput
from aiakq.runtime.multimodal.resource import EncoderCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
#: Kinds that are driven in every way: plain, with M-RoPE and additions to outputs of layers, with recurrent layers, and
#: with images whose tokens attend to each other in both directions.
SCHEDULED = ("idefics3", "qwen3_vl", "qwen3_5", "gemma3")
#: Nats between log-probabilities and those of transformers, whose gated delta rule has larger rounding errors.
TOLERANCES = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), 3e-5)
#: How the engine is driven; every mode gives the same tokens and log-probabilities.
MODES: dict[str, dict[str, Any]] = {
    "chunked through an image": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "one step ahead": {"async_scheduling": True},
    "operation by operation": {"enforce_eager": True},
    "prompt lookup": {"speculative_model": "[ngram]", "num_speculative_tokens": 3, "ngram_prompt_lookup_max": 2},
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
    given = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 100, "block_size": 8}
    return LLM(str(folder), **{**given, **arguments})


def prompts_of(kind: str) -> list[dict[str, Any]]:
    """Two images, none, one, one with an equal beginning."""
    mark = PLACEHOLDERS[kind]
    one, two, three = random_image(1), random_image(2, 24, 40), random_image(3, 16, 16)
    return [
        {"prompt": f"see {mark} and {mark}?", "multi_modal_data": {"image": [one, two]}},
        {"prompt": "no image at all, but more text"},
        {"prompt": f"{mark}", "multi_modal_data": {"image": three}},
        {"prompt": f"see {mark} and", "multi_modal_data": {"image": [one]}},
    ]


def images_in(prompt: dict[str, Any]) -> list[Any]:
    given = prompt.get("multi_modal_data", {}).get("image", [])
    return given if isinstance(given, list) else [given]


def answers(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[Any]:
    """Tokens and log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (each.token_ids, [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)])
        for each in outputs
    ]


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_log_probabilities_equal_those_of_transformers(vision_model, kind):
    folder = vision_model(kind)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts = prompts_of(kind)
    for prompt, output in zip(prompts, engine(folder).generate(prompts, params, use_tqdm=False), strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = reference_logprobs(folder, kind, ids, images_in(prompt))
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for at, (token, step) in enumerate(zip(ids[1:], steps, strict=True)):
            assert abs(step[token].logprob - float(expected[at, token])) < TOLERANCES.get(kind, 1e-5), (kind, at)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_files_of_earlier_versions_give_the_same_bits(vision_model, tmp_path, kind):
    """Published files of Qwen2-VL have no text_config, and other names of tensors."""
    source = vision_model(kind)
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((source / "config.json").read_text())
    text = raw.pop("text_config")
    text["rope_theta"], text["rope_scaling"] = 10000.0, {"type": "mrope", "mrope_section": [2, 3, 3]}
    del text["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**text, **raw}))
    tensors = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = prompts_of(kind)
    assert answers(engine(tmp_path), prompts) == answers(engine(source), prompts)


def test_experts_that_are_stored_the_other_way_around_give_the_same_bits(vision_model, tmp_path):
    source = vision_model("qwen3_vl_moe")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = prompts_of("qwen3_vl_moe")
    assert answers(engine(tmp_path), prompts) == answers(engine(source), prompts)


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
    llm = engine(vision_model(kind), **MODES[mode])
    assert answers(llm, prompts_of(kind)) == alone(kind)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_preempted_sequence_gives_the_same_bits(vision_model, kind):
    mark, size = PLACEHOLDERS[kind], (32, 32) if kind == "qwen2_5_vl" else (30, 20)
    prompts = [{"prompt": f"{n}{mark}", "multi_modal_data": {"image": random_image(n, *size)}} for n in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    given = {"block_size": 4, "max_model_len": 80, "enable_prefix_caching": False}
    expected = answers(engine(vision_model(kind), **given), prompts, params)
    llm = engine(vision_model(kind), **given, num_gpu_blocks_override=22)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", SCHEDULED)
def test_the_same_bits_from_the_prefix_cache_and_other_images_miss_it(vision_model, alone, kind):
    llm = engine(vision_model(kind))
    prompts = prompts_of(kind)
    assert [answers(llm, [prompt])[0] for prompt in prompts] == alone(kind)
    first = prompts[0]
    [again] = llm.generate([first], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 8
    images = [random_image(1), random_image(9, 24, 40)]  # the second differs, of the same size
    [other] = llm.generate([{**first, "multi_modal_data": {"image": images}}], GREEDY, use_tqdm=False)
    assert other.prompt_token_ids == again.prompt_token_ids
    ids = llm.tokenizer.encode(first["prompt"])
    _, (_, second) = llm._media.loaded().default.expanded(ids, [MediaInput("image", image, "") for image in images])
    assert second.first - 8 < other.num_cached_tokens <= second.first
    uncached = engine(vision_model(kind), enable_prefix_caching=False)
    assert answers(llm, [{**first, "multi_modal_data": {"image": images}}]) == answers(
        uncached, [{**first, "multi_modal_data": {"image": images}}]
    )
    assert other.outputs[0].cumulative_logprob != again.outputs[0].cumulative_logprob


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl", "gemma3"])
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_the_same_bits_on_two_ranks(vision_model, alone, split, kind):
    llm = engine(vision_model(kind), **split, max_num_batched_tokens=32, max_num_seqs=8)
    assert answers(llm, prompts_of(kind)) == alone(kind)


@pytest.mark.parametrize("kind", SCHEDULED)
def test_records_cross_processes(vision_model, alone, behind_bytes, kind):
    llm = behind_bytes(engine(vision_model(kind)))
    assert answers(llm, prompts_of(kind)) == alone(kind)


def encoding_of(llm: LLM) -> MediaEncoding:
    [part] = [part for part in llm.engine.executor.runner.parts if isinstance(part, MediaEncoding)]
    return part


def test_an_image_is_encoded_once_and_dropped_when_others_need_its_place(vision_model):
    llm = engine(vision_model("llava"))
    cache, encoding = llm.engine.scheduler.resource(EncoderCache), encoding_of(llm)
    cache.max_embeddings = 40  # of 16 each
    calls = []
    encoder = encoding._encoder
    encoding._encoder = lambda item: calls.append(item.key) or encoder(item)
    prompts = [{"prompt": f"{n}<image>", "multi_modal_data": {"image": random_image(n)}} for n in (1, 2, 1, 3)]
    for prompt in prompts[:3]:
        answers(llm, [prompt])
    assert len(calls) == len(encoding) == 2
    answers(llm, [prompts[3]])
    assert len(calls) == 3 and len(encoding) == 2
    cache.check()
    assert calls[1] not in encoding._embeddings and calls[0] in encoding._embeddings


def test_a_sequence_waits_for_the_encoder_cache(vision_model):
    llm = engine(vision_model("llava"))
    llm.engine.scheduler.resource(EncoderCache).max_embeddings = 16
    prompts = [{"prompt": f"{n}<image>", "multi_modal_data": {"image": random_image(n)}} for n in range(4)]
    assert answers(llm, prompts) == [answers(engine(vision_model("llava")), [prompt])[0] for prompt in prompts]
    assert len(encoding_of(llm)) == 1


def test_an_image_that_cannot_be_encoded_fails_its_request_only(vision_model):
    llm = engine(vision_model("llava"))
    encoding = encoding_of(llm)
    encoder = encoding._encoder

    class Failing:
        zeros = staticmethod(encoder.zeros)

        def __call__(self, item):
            raise ValueError("no such image")

    encoding._encoder = Failing()
    prompts = [{"prompt": "a<image>b", "multi_modal_data": {"image": random_image(1)}}, {"prompt": "text"}]
    failed, fine = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert (
        failed.error == "its image cannot be encoded: ValueError: no such image"
        and fine.outputs[0].finish_reason == "length"
    )


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "none", "multi_modal_data": {"image": random_image(1)}}, "1 images for its 0 placeholders"),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": [random_image(1)] * 3}},
            "the number of images is 3, and --limit-mm-per-prompt allows 2",
        ),
        ({"prompt": "<image>", "multi_modal_data": {"image": "cat.png"}}, "an image of Pillow is expected"),
        ({"prompt": "<image>", "multi_modal_data": {"video": [1]}}, "videos of LlavaForConditionalGeneration are not"),
        ({"prompt": "<image>", "multi_modal_data": {"image": random_image(1, 60000, 1)}}, "60000 x 1 pixels"),
    ],
)
def test_refused_images(vision_model, prompt, reason):
    llm = engine(vision_model("llava"), limit_mm_per_prompt={"image": 2})
    with pytest.raises(AiakqError, match=reason):
        llm.generate([prompt], GREEDY, use_tqdm=False)


def test_processor_arguments_change_the_image(vision_model):
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": random_image(1, 32, 32)}}
    whole = engine(vision_model("idefics3"), mm_processor_kwargs={"do_image_splitting": False})
    [output] = whole.generate([prompt], GREEDY, use_tqdm=False)
    [split] = engine(vision_model("idefics3")).generate([prompt], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids.count(4) == 4 < split.prompt_token_ids.count(4)


def test_prompts_have_processor_arguments_of_their_own(vision_model):
    llm = engine(vision_model("idefics3"))
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": random_image(1)}}
    changed = {**prompt, "mm_processor_kwargs": {"do_image_splitting": False}}
    whole = engine(vision_model("idefics3"), mm_processor_kwargs={"do_image_splitting": False})
    assert answers(llm, [prompt, changed]) == answers(llm, [prompt]) + answers(whole, [prompt])
    part = {"type": "image_pil", "image_pil": random_image(1)}
    messages: list[dict[str, object]] = [{"role": "user", "content": [part]}]
    [split], [kept] = (
        llm.chat(messages, GREEDY, use_tqdm=False, mm_processor_kwargs=each)
        for each in (None, {"do_image_splitting": False})
    )
    assert len(kept.prompt_token_ids) < len(split.prompt_token_ids)
    with pytest.raises(AiakqError, match="mm_processor_kwargs is .* 'do_image_split' is no argument"):
        llm.generate([{**prompt, "mm_processor_kwargs": {"do_image_split": False}}], GREEDY, use_tqdm=False)


def test_wrong_processor_arguments_are_refused_before_the_first_image(vision_model):
    with pytest.raises(AiakqError, match="'do_image_split' is no argument of Idefics3ImageProcessor"):
        engine(vision_model("idefics3"), mm_processor_kwargs={"do_image_split": False})
    with pytest.raises(AiakqError, match="--media-io-kwargs .* nothing for a model that reads no videos"):
        engine(vision_model("idefics3"), media_io_kwargs={"video": {"fps": 1}})


def test_without_the_encoder_images_are_refused_and_text_is_not(vision_model):
    llm = engine(vision_model("llava"), language_model_only=True)
    assert not any(isinstance(part, MediaEncoding) for part in llm.engine.executor.runner.parts)
    assert llm.generate(["text"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(AiakqError, match="--language-model-only leaves out the encoder"):
        llm.generate([{"prompt": "<image>", "multi_modal_data": {"image": random_image(1)}}], GREEDY, use_tqdm=False)


def test_a_checkpoint_without_an_encoder_is_served_as_text(vision_model, tmp_path):
    source = vision_model("llava")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = engine(tmp_path)
    assert answers(llm, [{"prompt": "text"}]) == answers(engine(source), [{"prompt": "text"}])
    with pytest.raises(AiakqError, match="the checkpoint has no encoder of images"):
        llm.generate([{"prompt": "<image>", "multi_modal_data": {"image": random_image(1)}}], GREEDY, use_tqdm=False)


def test_the_start_up_table_says_whether_images_are_read(vision_model):
    folder = vision_model("llava")
    assert engine(folder).engine.facts["model part"] == (
        "text and images: 43 tensors of multi_modal_projector, vision_tower encode images"
    )
    assert engine(folder, language_model_only=True).engine.facts["model part"].startswith("text only: 43 tensors of")


def test_an_image_of_one_token_of_mistral_3_is_refused(vision_model):
    llm = engine(vision_model("mistral3"))
    with pytest.raises(AiakqError, match=r"too small: .* it has 1 x 1 pixels"):
        llm.generate([{"prompt": "[IMG]", "multi_modal_data": {"image": random_image(1, 1, 1)}}], GREEDY)


class FailsOnce:
    """An encoder that fails for the first image."""

    def __init__(self, encoder: Any) -> None:
        self._encoder, self.zeros, self._failed = encoder, encoder.zeros, False

    def __call__(self, item: Any) -> Any:
        if self._failed:
            return self._encoder(item)
        self._failed = True
        raise ValueError("no such image")


@pytest.mark.parametrize("split", [{}, {"pipeline_parallel_size": 2}], ids=["one stage", "two stages"])
def test_what_was_computed_without_an_image_is_not_reused(vision_model, alone, split):
    llm = engine(vision_model("idefics3"), **split, max_num_batched_tokens=16)
    encoding, prompt = encoding_of(llm), prompts_of("idefics3")[0]
    encoding._encoder = FailsOnce(encoding._encoder)
    [failed] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert failed.error == "its image cannot be encoded: ValueError: no such image"
    assert answers(llm, [prompt]) == [alone("idefics3")[0]]


def test_images_of_as_many_tokens_in_other_rows_miss_the_prefix_cache(vision_model):
    """Positions behind an image depend on its rows and columns, and so do cached keys."""
    llm = engine(vision_model("qwen3_vl"))
    uncached = engine(vision_model("qwen3_vl"), enable_prefix_caching=False)
    sizes = ((24, 16), (16, 24), (48, 8))
    text = f"<|vision_start|>{PLACEHOLDERS['qwen3_vl']}<|vision_end|> what is in this image?"
    prompts = [{"prompt": text, "multi_modal_data": {"image": random_image(1, *size)}} for size in sizes]
    outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    for prompt in prompts:
        assert answers(llm, [prompt]) == answers(uncached, [prompt])


def test_images_whose_tokens_do_not_fit_into_a_step_are_refused(vision_model):
    llm = engine(vision_model("gemma3"), max_num_batched_tokens=16, max_num_seqs=13)
    reason = "room for the 4 tokens of an image beside 13 sequences, .* is 16; raise it to 17, or lower --max-num-seqs"
    with pytest.raises(AiakqError, match=reason):
        llm.generate([prompts_of("gemma3")[2]], GREEDY, use_tqdm=False)
    assert llm.generate(["text"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_the_reference_of_attention_computes_images_whose_tokens_attend_to_each_other(vision_model, alone, monkeypatch):
    monkeypatch.setenv("AIAKQ_KERNELS", "attention=torch")
    for (tokens, logprobs), (expected, wanted) in zip(
        answers(engine(vision_model("gemma3")), prompts_of("gemma3")), alone("gemma3"), strict=True
    ):
        assert tokens == expected
        assert logprobs == pytest.approx(wanted, abs=1e-5)
