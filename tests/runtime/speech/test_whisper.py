"""Whisper computes what transformers does, the same bits in any batch, and writes the same transcripts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speech_models import DE, EN, NO_TIMESTAMPS, RATE, START, TRANSCRIBE, sound

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError

PROMPT = [START, EN, TRANSCRIBE, NO_TIMESTAMPS]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_whisper) -> LLM:
    return LLM(str(tiny_whisper), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(tiny_whisper) -> tuple[Any, Any]:
    """Transformers' model and its feature extractor."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(tiny_whisper, dtype=torch.float32)
    return model.eval(), WhisperFeatureExtractor.from_pretrained(tiny_whisper)


def prompts() -> list[dict[str, Any]]:
    """Prompts of different lengths with different audio; the last two share theirs."""
    audio = [sound(0.3 + 0.2 * seed, seed) for seed in (0, 1, 2, 2)]
    return [
        {"prompt_token_ids": PROMPT + 7 * number * [40 + number], "multi_modal_data": {"audio": (each, RATE)}}
        for number, each in enumerate(audio)
    ]


def generated(llm: LLM, asked: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """The tokens of each prompt and their log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(asked, GREEDY, use_tqdm=False)]
    return [
        (each.token_ids, [row[token].logprob for row, token in zip(each.logprobs, each.token_ids, strict=True)])
        for each in outputs
    ]


def test_log_probabilities_are_those_of_transformers(llm, reference):
    model, extractor = reference
    for asked, (token_ids, logprobs) in zip(prompts(), generated(llm, prompts()), strict=True):
        samples, ids = asked["multi_modal_data"]["audio"][0], asked["prompt_token_ids"]
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.no_grad():
            given = torch.tensor([ids + token_ids])
            rows = model(input_features=features, decoder_input_ids=given).logits[0].log_softmax(-1)
        expected = [rows[len(ids) - 1 + at, token].item() for at, token in enumerate(token_ids)]
        assert np.abs(np.subtract(expected, logprobs)).max() < 1e-5


def test_every_batching_gives_the_same_bits(tiny_whisper, llm):
    expected = generated(llm, prompts())
    assert [generated(llm, [each])[0] for each in prompts()] == expected
    assert generated(llm, prompts()) == expected  # from the prefix cache
    limits = {"max_num_batched_tokens": 5, "max_num_seqs": 3, "block_size": 16, "num_gpu_blocks_override": 5}
    small = LLM(str(tiny_whisper), device="cpu", dtype="float32", **limits)
    assert generated(small, prompts()) == expected


def test_the_prefix_cache_tells_audio_apart(llm):
    ids = PROMPT + 30 * [50]
    asked = [{"prompt_token_ids": ids, "multi_modal_data": {"audio": (sound(0.9, seed), RATE)}} for seed in (5, 6)]
    first, second = (generated(llm, [each])[0] for each in asked)
    assert first[1] != second[1]


@pytest.mark.parametrize("language", [None, "en"])
def test_transcripts_are_those_of_transformers(llm, reference, language):
    model, extractor = reference
    for seed in range(3):
        samples = sound(0.8, seed)
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        asked = {"return_timestamps": False, "language": language, "task": "transcribe", "return_segments": True}
        # All of the window: a random model writes times although it is asked for none, and transformers splits there.
        ids = model.generate(features, **asked)["segments"][0][0]["result"].tolist()
        text = llm.tokenizer.decode([token for token in ids if token < START])
        [output] = llm.transcribe([samples], language=language)
        assert output.text == text.strip() and output.duration == 0.8
        assert output.language in ("en", "de") and language in (None, output.language)


@pytest.mark.parametrize("seed", range(3))
def test_long_audio_is_read_as_transformers_does(llm, reference, seed):
    model, extractor = reference
    samples, said = sound(3.3, seed), {"language": "de", "task": "translate"}
    read = extractor(samples, sampling_rate=RATE, truncation=False, padding="longest", return_tensors="pt")
    segments = model.generate(read.input_features, return_timestamps=True, return_segments=True, **said)["segments"][0]
    expected = [
        (each["start"].item(), min(each["end"].item(), 3.3), [t for t in each["tokens"].tolist() if t < NO_TIMESTAMPS])
        for each in segments
    ]
    expected = [(start, end, llm.tokenizer.decode(ids)) for start, end, ids in expected]
    [output] = llm.transcribe(samples, timestamps=True, **said)
    found = [(each.start, each.end, each.text) for each in output.segments]
    assert [each[2] for each in found] == [each[2] for each in expected if each[2].strip()]
    times = [each[:2] for each in expected if each[2].strip()]
    assert np.allclose([each[:2] for each in found], times)


@pytest.mark.parametrize(
    ("changes", "config", "said"),
    [
        ({"language": "german"}, {}, {"task": "transcribe"}),
        ({"forced_decoder_ids": [[1, DE], [2, TRANSCRIBE]]}, {"scale_embedding": True}, {}),
        ({"is_multilingual": False, "forced_decoder_ids": [[1, NO_TIMESTAMPS]]}, {}, {}),
        ({"repetition_penalty": 1.3}, {}, {"task": "transcribe"}),
    ],
)
def test_files_of_fine_tuned_models_are_read_as_transformers_does(tiny_whisper, tmp_path, changes, config, said):
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    folder = Path(shutil.copytree(tiny_whisper, tmp_path / "other"))
    for name, values in {"generation_config.json": changes, "config.json": config}.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    samples = sound(0.8, 2)
    read = WhisperFeatureExtractor.from_pretrained(folder)(samples, sampling_rate=RATE, return_tensors="pt")
    asked = {"return_timestamps": False, "return_segments": True, **said}
    ids = model.generate(read.input_features, **asked)["segments"][0][0]["result"].tolist()
    llm = LLM(str(folder), device="cpu", dtype="float32")
    assert llm.transcribe(samples)[0].text == llm.tokenizer.decode([token for token in ids if token < START]).strip()


def test_several_audios_and_a_prompt(llm):
    audios = [sound(2.5, 1), (sound(0.5, 2, rate=8000), 8000), sound(1.4, 3)]
    together = llm.transcribe(audios, prompt="Names: Ann")
    assert together == [llm.transcribe(each, prompt="Names: Ann")[0] for each in audios]
    assert together != llm.transcribe(audios)
    assert [round(each.duration, 3) for each in together] == [2.5, 0.5, 1.4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"language": "xx"}, "'xx' is none of de, en"),
        ({"task": "sing"}, "does not sing"),
        ({"prompt": "<|de|><|translate|>"}, "special tokens"),
        ({"sampling_params": SamplingParams(n=2, temperature=1)}, "one transcript"),
        ({"sampling_params": SamplingParams(stop=["."])}, "ends with its audio"),
        ({"language": 5}, "language has the wrong type"),
        ({"task": None}, "task has the wrong type"),
    ],
)
def test_what_the_model_does_not_have_is_refused(llm, arguments, words):
    with pytest.raises(AiakqError, match=words):
        llm.transcribe(sound(0.5), **arguments)


def test_prompts_have_one_audio(llm):
    for prompt in ([START], {"prompt": "<|startoftranscript|>"}):
        with pytest.raises(AiakqError, match="audio"):
            llm.generate(prompt, use_tqdm=False)
    long = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": sound(1.5)}}
    with pytest.raises(AiakqError, match=r"longer than the 1 s of a window; see LLM\.transcribe"):
        llm.generate(long, use_tqdm=False)
    with pytest.raises(AiakqError, match="finite floats"):
        llm.generate({**long, "multi_modal_data": {"audio": [sound(0.1), sound(0.2)]}}, use_tqdm=False)
    with pytest.raises(AiakqError, match="--task transcription"):
        llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)


def test_other_models_do_not_transcribe(tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), device="cpu")
    with pytest.raises(AiakqError, match="does not transcribe audio"):
        llm.transcribe(sound(0.1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 2}, "-tp 2"),
        ({"pipeline_parallel_size": 2}, "-pp 2"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
        ({"task": "generate"}, "--task generate"),
        ({"task": "embed"}, "--task embed"),
        ({"runner": "pooling"}, "--runner pooling"),
        ({"convert": "embed"}, "--convert embed"),
    ],
)
def test_options_that_do_not_go_together_with_it_are_refused(tiny_whisper, arguments, words):
    with pytest.raises(AiakqError, match=words):
        LLM(str(tiny_whisper), device="cpu", **arguments)


def test_a_gpu_is_refused(tiny_whisper):
    from aiakq.arguments.server import engine_arguments
    from aiakq.runtime.config.speech import SpeechConfig

    args, raw = engine_arguments({"model": str(tiny_whisper)}), {"architectures": ["WhisperForConditionalGeneration"]}
    with pytest.raises(AiakqError, match="on a GPU"):
        SpeechConfig.from_args(args, Path(tiny_whisper), raw, 320, "cuda")


def test_task_transcription_needs_such_a_model(tiny_model):
    with pytest.raises(AiakqError, match="does not transcribe audio"):
        LLM(str(tiny_model("LlamaForCausalLM")), device="cpu", task="transcription")


def test_an_unknown_key_is_refused(tiny_whisper, tmp_path):
    folder = Path(shutil.copytree(tiny_whisper, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "encoder_window": 8}))
    with pytest.raises(AiakqError, match="encoder_window"):
        LLM(str(folder), device="cpu")
    (folder / "config.json").write_text(json.dumps({**config, "encoder_ffn_dim": 64}))
    with pytest.raises(AiakqError, match="tensors of its encoder"):
        LLM(str(folder), device="cpu")


def test_quantize_refuses_it_by_name(tiny_whisper, aiakq, tmp_path):
    ended = aiakq(
        "quantize", "-i", tiny_whisper, "-o", tmp_path / "out", "-quant_type", "weight_only_int8", "--no-eval"
    )
    assert ended.code != 0 and "Quantizing a model that transcribes audio is not supported" in ended.last
