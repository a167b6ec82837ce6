"""Gemma 3n: the embeddings of the model around it, memory, bits beside other requests, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_comparison import TOLERANCE, largest_difference, ours, prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.inspect.inspection import inspect_checkpoint
from aiakq.runtime.models.decoder import Decoder

NAME = "Gemma3nForCausalLM"
PARTS = {
    "vision": {"model_type": "gemma3n_vision", "vocab_offset": 300, "vocab_size": 8, "hidden_size": 24},
    "audio": {"model_type": "gemma3n_audio", "vocab_offset": 308, "vocab_size": 12, "hidden_size": 40},
}


def model_of(folder: Path, **arguments: object) -> Decoder:
    fixed = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 9}
    model = LLM(str(folder), **{**fixed, **arguments}).engine.executor.runner.model
    assert isinstance(model, Decoder)
    return model


def test_layers_that_read_the_keys_of_others_take_no_pages(tiny_model: Callable[..., Path]) -> None:
    model = model_of(tiny_model(NAME))
    assert model.kv_bytes_per_token(torch.float16) == 3 * 2 * 2 * 2 * 32
    assert [len(cache) for cache in model.new_caches(4, 16)] == [2, 2, 2, 0, 0, 0]
    # Ten of three hidden states of 128 elements, and inputs of 6 layers.
    assert model.mixture_elements() == 10 * 3 * 128 + 2 * 6 * 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_runs_beside_a_request_does_not_change_its_bits(dtype: str, tiny_model: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_model(NAME)), dtype=dtype, max_model_len=128, num_gpu_blocks_override=257, max_logprobs=-1)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    given = [{"prompt_token_ids": each} for each in prompts()]
    together = llm.generate(given, params, use_tqdm=False)
    for prompt, beside in zip(given, together, strict=True):
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
        assert alone.outputs[0].logprobs == beside.outputs[0].logprobs


def test_coefficients_of_hidden_states_are_not_rounded_at_load(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_model(NAME)), dtype="float32", max_model_len=64, num_gpu_blocks_override=9, quantization="int8")
    # 18 of the others are coefficients, 3 in each of 6 layers.
    assert "60 x w8a16: cpu; 28 x w16: cpu" in llm.engine.facts["linear layers"]


def around(text: Path, folder: Path, **changes: Any) -> dict[str, torch.nn.Module]:
    """Write a model to ``folder`` that has the one in ``text`` inside; returns its modules beside that by name."""
    from transformers import CONFIG_MAPPING
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nMultimodalEmbedder

    inside = json.loads((text / "config.json").read_text())
    shutil.copytree(text, folder)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    torch.manual_seed(2)
    embedders = {}
    for part, values in PARTS.items():
        config = type("Config", (), {"rms_norm_eps": 1e-6, **values})
        embedders[part] = Gemma3nMultimodalEmbedder(config, CONFIG_MAPPING["gemma3n_text"](**inside))
        for parameter in embedders[part].parameters():
            parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.3)
        tensors |= {f"model.embed_{part}.{name}": tensor for name, tensor in embedders[part].state_dict().items()}
    tensors["model.vision_tower.x.weight"] = torch.ones(3, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    inside.pop("architectures")
    parts = {f"{part}_config": {**values, **changes} for part, values in PARTS.items()}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": inside, **parts}))
    return embedders


def expected(text: Path, embedders: dict[str, Any]) -> list[Tensor]:
    """Log-probabilities of every prompt, with the embeddings that Gemma3nModel makes of its tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts():
            ids = torch.tensor([prompt])
            embeddings = model.model.embed_tokens(ids)
            for part, values in PARTS.items():
                first, end = values["vocab_offset"], values["vocab_offset"] + values["vocab_size"]
                here = (ids >= first) & (ids < end)
                made = embedders[part](input_ids=torch.where(here, ids, first))
                embeddings = torch.where(here[..., None], made, embeddings)
            inputs = model.model.get_per_layer_inputs(ids)
            logits = model(inputs_embeds=embeddings, per_layer_inputs=inputs, use_cache=False).logits
            found.append(logits[0].log_softmax(-1))
    return found


def test_tokens_of_images_and_sounds_have_the_embeddings_of_the_model_around(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    assert any(token >= 300 for token in prompts()[-1])
    text, folder = tiny_model(NAME), tmp_path / "model"
    wanted = expected(text, around(text, folder))
    assert largest_difference(ours(folder), wanted) < TOLERANCE
    assert largest_difference(ours(text), wanted) > 1  # the text model alone has other ones
    assert inspect_checkpoint(str(folder), device="cpu").differences == ()
    llm = LLM(str(folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=9)
    left_out = "text only: 3 tensors of embed_audio, embed_vision, vision_tower are left out"
    assert llm.engine.facts["model part"] == left_out
    with pytest.raises(AiakqError, match="only text is read|images"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        llm.chat([{"role": "user", "content": [image]}], use_tqdm=False)


def test_what_cannot_be_computed_is_refused_by_name(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(AiakqError, match="Gemma3nForCausalLM whose layers read more .* in pipeline stages"):
        model_of(tiny_model(NAME), pipeline_parallel_size=2)
    with pytest.raises(AiakqError, match="altup_num_inputs is 1"):
        model_of(tiny_model(NAME, altup_num_inputs=1, altup_active_idx=0))
    around(tiny_model(NAME), tmp_path / "model", vocab_size=7)
    with pytest.raises(AiakqError, match=r"embed_audio embeds 7 tokens from 308 on, and not all below 320"):
        model_of(tmp_path / "model")
