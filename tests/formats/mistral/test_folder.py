"""Models in Mistral's format: their log-probabilities are those of their author's code."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from mistral_files import Reference, write_mistral

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.hub import resolve_model
from aiakq.formats.made_folder import MISTRAL, model_path, source_of
from aiakq.runtime.config.engine import EngineConfig

IDS = [5, 250, 17, 33, 9, 100, 201, 3, 77, 64, 8, 300, 41, 150, 2, 90, 91, 92, 6, 7]
YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "beta": 32.0, "alpha": 1.0}
VARIANTS = {
    "plain": {},
    "narrow-heads": {"head_dim": 16, "dim": 96},
    "tied": {"tied_embeddings": True},
    "window": {"sliding_window": 4},
    "mixture": {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    "yarn": {"yarn": YARN},
    "yarn-unscaled": {"yarn": {**YARN, "apply_scale": False}},
    "fp8": {"fp8": True},
    "window-in-some-layers": {"sliding_window": [None, 4]},
    "scaled-queries": {
        "yarn": {**YARN, "apply_scale": False},
        "llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.1},
    },
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def log_probabilities(folder, **arguments):
    """Return those of the tokens IDS[1:], given what precedes each."""
    llm = LLM(model=str(folder), skip_tokenizer_init=True, cpu_math="exact", enable_prefix_caching=False, **arguments)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    [out] = llm.generate([{"prompt_token_ids": IDS}], params)
    return [each[id].logprob for each, id in zip(out.prompt_logprobs[1:], IDS[1:], strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_those_of_the_authors_code(variant, tmp_path):
    folder = write_mistral(tmp_path / "model", **VARIANTS[variant])
    expected = Reference(folder).log_probabilities(IDS)[torch.arange(len(IDS) - 1), IDS[1:]]
    found = torch.tensor(log_probabilities(folder))
    assert (found - expected).abs().max() < 1e-5


def test_a_folder_in_both_formats_is_read_in_the_one_that_is_asked_for(tmp_path):
    folder = write_mistral(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    assert resolve_model(folder) == folder
    made = resolve_model(folder, weights="mistral")
    assert source_of(made, MISTRAL) == folder and model_path(made) == folder
    assert resolve_model(folder, weights="mistral") == made


def test_the_format_of_the_config_is_the_one_that_is_asked_for(tmp_path):
    def path(**arguments):
        return EngineConfig.from_args({"model": str(folder), "skip_tokenizer_init": True, **arguments}).load.path

    def refusal(**arguments):
        with pytest.raises(AiakqError) as caught:
            path(**arguments)
        return caught.value

    folder = write_mistral(tmp_path / "model")
    made = path()
    assert source_of(made, MISTRAL) == folder
    assert path(config_format="mistral") == path(config_format="mistral", load_format="dummy") == made
    assert refusal(config_format="hf").id == "model_incomplete"
    for config_format, load_format in (("mistral", "gguf"), ("mistral", "pt"), ("hf", "mistral")):
        both = {"config_format": config_format, "load_format": load_format}
        assert refusal(**both).id == "option_conflict"
    shutil.copy(made / "config.json", folder)
    assert path() == path(config_format="hf") == folder
    assert path(config_format="mistral") == made
    (folder / "params.json").unlink()
    assert "params.json is missing" in str(refusal(config_format="mistral"))


def test_a_checkpoint_names_the_folder_and_its_changes(tmp_path):
    folder = write_mistral(tmp_path / "model")
    checkpoint = Checkpoint.fetch(str(folder))
    assert checkpoint.named_path == folder and checkpoint.weights_folder == folder
    assert checkpoint.changed_files() == [] and checkpoint.remarks == []
    (folder / "consolidated.safetensors").touch()
    assert checkpoint.changed_files() == ["consolidated.safetensors"]
    assert resolve_model(folder) != checkpoint.path


def test_only_a_folder_in_the_cache_names_another(tmp_path):
    made = resolve_model(write_mistral(tmp_path / "model"))
    copied = shutil.copytree(made, tmp_path / "copied")
    assert source_of(copied, MISTRAL) is None
    with pytest.raises(AiakqError, match="safetensors"):
        Checkpoint.open(copied)


def test_ids_of_the_ends_of_texts_are_those_of_the_tokenizer(tmp_path):
    folder = write_mistral(tmp_path / "model")
    tokens = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(("<unk>", "</s>", "<s>"))
    ]
    (folder / "tekken.json").write_text(json.dumps({"special_tokens": tokens}))
    made = resolve_model(folder)
    config = json.loads((made / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (2, 1)
    assert (made / "tekken.json").read_bytes() == (folder / "tekken.json").read_bytes()
    (folder / "tekken.json").write_text("[]")
    with pytest.raises(AiakqError, match="not a tokenizer of Mistral's"):
        resolve_model(folder)


def test_missing_files_are_named(tmp_path):
    folder = write_mistral(tmp_path / "model")
    (folder / "consolidated.safetensors").unlink()
    with pytest.raises(AiakqError, match=r"no consolidated\*\.safetensors"):
        resolve_model(folder)
    (folder / "params.json").unlink()
    with pytest.raises(AiakqError, match=r"params\.json is missing"):
        resolve_model(folder, weights="mistral")
