"""Audio in the engine: equal to transformers, and the same bits however it is scheduled."""

from __future__ import annotations

import base64
import functools
import inspect
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from audio_models import MARKS, PLACEHOLDERS, RATE, reference_logprobs, save_audio_model, save_with_tekken, sound
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.multimodal import encoder_files
from aiakq.runtime.multimodal.encoding import MediaEncoding

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
MODES: dict[str, dict[str, Any]] = {
    "chunked through an audio": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "one step ahead": {"async_scheduling": True},
    "prompt lookup": {"speculative_model": "[ngram]", "num_speculative_tokens": 3, "ngram_prompt_lookup_max": 2},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 32, "max_num_seqs": 8},
}


@pytest.fixture(scope="session")
def hearing_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(kind: str) -> Path:
        return save_audio_model(kind, tmp_path_factory.mktemp(kind))

    return make


def engine(folder: Path, **arguments: Any) -> LLM:
    given = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 100, "block_size": 8}
    return LLM(str(folder), device="cpu", **{**given, **arguments})


def prompts_of(kind: str) -> list[dict[str, Any]]:
    """Two audios, none, one, one with an equal beginning."""
    mark = MARKS[kind]
    one, two, three = sound(0.6, 1), sound(0.213, 2), sound(1.0, 3)
    return [
        {"prompt": f"hear {mark} and {mark}?", "multi_modal_data": {"audio": [one, (two, RATE)]}},
        {"prompt": "no audio at all, but more text"},
        {"prompt": f"{mark}", "multi_modal_data": {"audio": (three, RATE)}},
        {"prompt": f"hear {mark} and", "multi_modal_data": {"audio": one}},
    ]


def audios_in(prompt: dict[str, Any]) -> list[Any]:
    given = prompt.get("multi_modal_data", {}).get("audio", [])
    listed = given if isinstance(given, list) else [given]
    return [each[0] if isinstance(each, tuple) else each for each in listed]


def answers(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[Any]:
    """Tokens and log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (each.token_ids, [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)])
        for each in outputs
    ]


def check_log_probabilities(folder: Path, kind: str, prompts: list[dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    for prompt, output in zip(prompts, engine(folder).generate(prompts, params, use_tqdm=False), strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = reference_logprobs(folder, kind, ids, audios_in(prompt))
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for at, (token, step) in enumerate(zip(ids[1:], steps, strict=True)):
            assert abs(step[token].logprob - float(expected[at, token])) < 1e-5, (kind, at)


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_log_probabilities_equal_those_of_transformers(hearing_model, kind):
    check_log_probabilities(hearing_model(kind), kind, prompts_of(kind))


def test_audio_of_several_windows(hearing_model):
    prompts = [{"prompt": f"a{MARKS['voxtral']}b", "multi_modal_data": {"audio": sound(2.3, 4)}}]
    check_log_probabilities(hearing_model("voxtral"), "voxtral", prompts)


@pytest.fixture(scope="module")
def alone(hearing_model) -> Callable[[str], list[Any]]:
    """Each prompt of a kind in a run of its own, nothing cached."""

    @functools.cache
    def computed(kind: str) -> list[Any]:
        llm = engine(hearing_model(kind), enable_prefix_caching=False)
        return [answers(llm, [prompt])[0] for prompt in prompts_of(kind)]

    return computed


@pytest.mark.parametrize("kind", PLACEHOLDERS)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_however_the_engine_is_driven(hearing_model, alone, mode, kind):
    llm = engine(hearing_model(kind), **MODES[mode])
    assert answers(llm, prompts_of(kind)) == alone(kind)


def test_a_preempted_sequence_gives_the_same_bits(hearing_model):
    mark = MARKS["qwen2_audio"]
    prompts = [{"prompt": f"{n}{mark}", "multi_modal_data": {"audio": sound(0.5, n)}} for n in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    given = {"block_size": 4, "max_model_len": 80, "enable_prefix_caching": False}
    expected = answers(engine(hearing_model("qwen2_audio"), **given), prompts, params)
    llm = engine(hearing_model("qwen2_audio"), **given, num_gpu_blocks_override=18)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_the_same_bits_from_the_prefix_cache_and_other_audios_miss_it(hearing_model, alone, kind):
    llm = engine(hearing_model(kind))
    prompts = prompts_of(kind)
    assert [answers(llm, [prompt])[0] for prompt in prompts] == alone(kind)
    first = prompts[0]
    [again] = llm.generate([first], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 8
    changed = {**first, "multi_modal_data": {"audio": [sound(0.6, 1), sound(0.213, 9)]}}  # the second, of the same size
    [other] = llm.generate([changed], GREEDY, use_tqdm=False)
    assert other.prompt_token_ids == again.prompt_token_ids
    assert other.num_cached_tokens < again.num_cached_tokens
    assert answers(llm, [changed]) == answers(engine(hearing_model(kind), enable_prefix_caching=False), [changed])


def test_records_cross_processes(hearing_model, alone, behind_bytes):
    llm = behind_bytes(engine(hearing_model("qwen2_audio")))
    assert answers(llm, prompts_of("qwen2_audio")) == alone("qwen2_audio")


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_conversations_have_their_audio_where_the_template_puts_it(hearing_model, kind):
    llm, params = engine(hearing_model(kind)), SamplingParams(temperature=0.0, max_tokens=3)
    parts = [{"type": "text", "text": "hear "}, {"type": "audio", "audio": (sound(0.6, 1), RATE)}]
    [output] = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    text = f"<s>user: hear Audio 1: {MARKS[kind]}\nassistant: "
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"audio": sound(0.6, 1)}}
    [expected] = llm.generate([prompt], params, use_tqdm=False)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_conversations_of_voxtral_are_those_of_mistral_common(tmp_path):
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    folder = save_with_tekken(tmp_path)
    file = io.BytesIO()
    soundfile.write(file, sound(1.3, 1), RATE, format="WAV")
    data = base64.b64encode(file.getvalue()).decode()
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    content = [audio, {"type": "text", "text": "[AUDIO] or hello?"}, audio, audio]
    messages = [{"role": "user", "content": content}]
    [output] = engine(folder).chat(messages, SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
    common = MistralTokenizer.from_file(folder / "tekken.json")
    expected = common.encode_chat_completion(ChatCompletionRequest.from_openai(messages)).tokens
    assert output.prompt_token_ids == expected and expected.count(24) == 3 * 20
    [text] = engine(folder).chat([{"role": "user", "content": "hello"}], use_tqdm=False)
    assert 24 not in text.prompt_token_ids
    system = {"role": "system", "content": "a"}
    with pytest.raises(AiakqError, match="System messages are not yet allowed when audio is present"):
        engine(folder).chat([system, *messages], use_tqdm=False)


def test_files_with_the_names_of_modules_give_the_same_bits(hearing_model, alone, tmp_path):
    """Transformers writes tensors under the names of the published files, which are those of earlier versions."""
    for kind in PLACEHOLDERS:
        source, folder = hearing_model(kind), tmp_path / kind
        shutil.copytree(source, folder)
        tensors = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            inner = name.replace("language_model.model.", "language_model.").replace(
                "language_model.lm_head", "lm_head"
            )
            tensors[inner if inner.startswith("lm_head") else f"model.{inner}"] = tensor
        assert "lm_head.weight" in tensors and "model.language_model.norm.weight" in tensors
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert answers(engine(folder), prompts_of(kind)) == alone(kind)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": "none", "multi_modal_data": {"audio": sound(0.3)}}, "1 audios for its 0 placeholders"),
        (
            {"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": [sound(0.3)] * 3}},
            "the number of audios is 3, and --limit-mm-per-prompt allows 2",
        ),
        ({"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": {"samples": 1}}}, "samples or .samples, rate. is"),
        ({"prompt": "<|AUDIO|>", "multi_modal_data": {"image": [1]}}, "the model reads text and audios only"),
        ({"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": sound(1.01)}}, "is 1.0 s long, and the model reads 1 s"),
        ({"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": sound(0.01)[:160]}}, "160 samples are too few"),
        ({"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": b"no audio"}}, "no audio that can be read"),
    ],
)
def test_refused_audios(hearing_model, prompt, reason):
    llm = engine(hearing_model("qwen2_audio"), limit_mm_per_prompt={"audio": 2})
    with pytest.raises(AiakqError, match=reason):
        llm.generate([prompt], GREEDY, use_tqdm=False)


def test_without_the_encoder_audio_is_refused_and_text_is_not(hearing_model):
    llm = engine(hearing_model("qwen2_audio"), language_model_only=True)
    assert llm.generate(["text"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(AiakqError, match="--language-model-only leaves out the encoder of audios"):
        llm.generate([prompts_of("qwen2_audio")[2]], GREEDY, use_tqdm=False)


def test_processor_arguments_are_refused(hearing_model):
    with pytest.raises(AiakqError, match="--mm-processor-kwargs"):
        engine(hearing_model("voxtral"), mm_processor_kwargs={"size": 3})
    with pytest.raises(AiakqError, match="--media-io-kwargs"):
        engine(hearing_model("voxtral"), media_io_kwargs={"video": {"fps": 1}})


def test_images_are_refused_by_a_model_that_hears(hearing_model):
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(AiakqError, match="image_url: the model reads text and audios only"):
        engine(hearing_model("voxtral")).chat([{"role": "user", "content": parts}], use_tqdm=False)


def test_other_media_of_models_that_read_none_are_refused_as_such(tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), device="cpu")
    parts = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
    with pytest.raises(AiakqError, match="input_audio: only text is read"):
        llm.chat([{"role": "user", "content": parts}], use_tqdm=False)
    with pytest.raises(AiakqError, match="only text is read"):
        llm.generate({"prompt": "a", "multi_modal_data": {"audio": sound(0.1)}}, use_tqdm=False)


def test_the_start_up_table_says_that_audio_is_read(hearing_model):
    facts = engine(hearing_model("qwen2_audio")).engine.facts
    assert facts["model part"] == "text and audios: 39 tensors of audio_tower, multi_modal_projector encode audios"


def test_positions_of_voxtral_are_added_in_float32(hearing_model, monkeypatch):
    """As its authors do, whatever the dtype."""
    monkeypatch.setattr(encoder_files, "_multiplies", lambda dtype: True)
    llm = engine(hearing_model("voxtral"), dtype="bfloat16")
    [part] = [part for part in llm.engine.executor.runner.parts if isinstance(part, MediaEncoding)]
    tower = inspect.getclosurevars(part._encoder._functions["audio"][0]).nonlocals["hf"].model.audio_tower
    stored = load_file(hearing_model("voxtral") / "model.safetensors")["audio_tower.embed_positions.weight"]
    assert torch.equal(tower.embed_positions.weight, stored) and tower.conv1.weight.dtype == torch.bfloat16
